// SPDX-License-Identifier: Apache-2.0
// A checkpoint: what a block, or several in a row, saved for the backward pass is dropped and computed again there.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/checkpointing/block_call.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/saved_tensor.hpp"
#include "treadle/checkpointing/streams.hpp"
#include "treadle/checkpointing/subject.hpp"
#include "treadle/checkpointing/surroundings.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Ends a recompute that has all it needs. No std::exception, which a block might catch.
struct [[gnu::visibility("default")]] EnoughRecomputed{};

/// Calls made under one set of hooks. Saved tensors are numbered in the order of saving.
///
/// Once the forward pass is over the hooks alone keep things alive: each the frame, the call that saved its tensor, and
/// those before. So no call is kept by the graph of an earlier one, which its function object may hold a part of, and
/// nothing holds itself.
class Frame final : public HookSource, public std::enable_shared_from_this<Frame> {
 public:
  Frame(const char* policy, std::shared_ptr<const ModelFacts> model, std::string region = {})
      : policy_(policy), model_(std::move(model)), region_(std::move(region)) {}
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  std::size_t calls() const { return calls_.size(); }
  /// Whether a recompute has begun, after which nothing can be added.
  bool closed() const { return closed_; }
  void close() { closed_ = true; }
  bool saved_anything() const { return !slots_.empty(); }

  /// Calls a block under the frame's hooks, and shares the call. Its inputs are saved for the hooks outside of it,
  /// outputs of the frame's earlier calls excepted.
  template <class Block, class... Inputs>
  auto forward(std::shared_ptr<BlockCall>& call, std::size_t number, const CheckpointSubject& subject, Block&& block,
               Inputs&&... inputs);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

  /// Makes outputs of the frame's last call things that can be dropped as well: `users` says how many saves want one.
  std::size_t add_output(std::size_t position, const at::Tensor& tensor);
  void use_output(std::size_t index);
  void release_output(std::size_t index);
  /// An output in the backward pass, recomputed.
  at::Tensor take_output(std::size_t index);

 private:
  struct Slot {
    bool needed = true;  // whoever saved it is still there
    at::Tensor kept;     // a parameter, or a view of one, which costs no memory to keep
    std::int64_t version = 0;
    at::ScalarType dtype{};
    at::Device device{at::kCPU};
    c10::SmallVector<std::int64_t, 5> sizes;
    at::Tensor value{};  // recomputed and not yet taken
  };
  struct Output {
    std::size_t position;  // among the call's
    at::ScalarType dtype;
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
    int users = 0;
    int pending = 0;  // who has not taken it in this backward pass
    at::Tensor value{};
    std::int64_t version = 0;
  };
  class Holder;
  class Refill;

  std::size_t add(const at::Tensor& tensor);
  void release(std::size_t index);
  at::Tensor take(std::size_t index);
  void recompute(int task);
  bool wants_outputs() const;
  void keep_outputs(const BlockCall& call);
  void drop_values();
  void take_inputs(BlockCall& call);
  void run(Refill& refill);
  Origin origin_of(BlockCall& call, const at::Tensor& tensor);
  std::string name() const;
  [[noreturn, gnu::cold]] void refuse_change(bool of_model) const;
  [[noreturn, gnu::cold]] void refuse_write() const;
  [[noreturn, gnu::cold]] void refuse(const std::string& what, const std::string& advice) const;

  struct Produced {  // an output of a call that may be the input of the next
    c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> impl;
    std::int64_t version;
    Origin origin;
  };

  const char* policy_;
  std::shared_ptr<const ModelFacts> model_;
  std::string region_;
  std::vector<Output> outputs_;
  std::vector<std::weak_ptr<BlockCall>> calls_;
  std::vector<c10::Stream> streams_;  // of the first call, on which recomputes run
  std::vector<Produced> produced_;
  std::vector<Slot> slots_;
  std::size_t running_ = 0;  // which call a recompute is in
  int task_ = -1;            // the backward pass that values belong to
  int around_ = -1;          // the one that the forward pass runs within, if it does
  bool closed_ = false;
  std::recursive_mutex mutex_;
};

/// The hooks of one saved tensor of the forward pass.
class Frame::Holder final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Holder(std::shared_ptr<Frame> frame) : frame_(std::move(frame)), call_(frame_->calls_.back().lock()) {}
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  ~Holder() override {
    if (packed_) frame_->release(index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = frame_->add(tensor);
    packed_ = true;
  }
  at::Tensor call_unpack_hook() override { return frame_->take(index_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::shared_ptr<BlockCall> call_;
  std::size_t index_ = 0;
  bool packed_ = false;
};

/// What a backward pass within a block saves, for another one through it, is kept: on CUDA it would be saved on another
/// thread in the forward pass, but on the recompute's own.
inline std::unique_ptr<torch::autograd::SavedVariableHooks> Frame::make_hooks() {
  if (torch::autograd::get_current_graph_task_id() != around_) return nullptr;
  return std::make_unique<Holder>(shared_from_this());
}

inline std::size_t Frame::add(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  Slot slot;
  slot.dtype = tensor.scalar_type();
  slot.device = tensor.device();
  slot.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (is_parameter(tensor) || is_view_of_parameter(tensor)) slot.kept = kept_form(tensor);
  if (slot.kept.defined()) slot.version = static_cast<std::int64_t>(slot.kept._version());
  slots_.push_back(std::move(slot));
  return slots_.size() - 1;
}

inline void Frame::release(std::size_t index) {
  const std::lock_guard lock(mutex_);
  slots_[index].needed = false;
  slots_[index].kept.reset();
  slots_[index].value.reset();
}

inline Origin Frame::origin_of(BlockCall& call, const at::Tensor& tensor) {
  for (const auto& produced : produced_)
    if (produced.impl._unsafe_get_target() == tensor.unsafeGetTensorImpl() &&
        produced.version == static_cast<std::int64_t>(tensor._version()))
      if (const auto earlier = calls_[produced.origin.call].lock()) {
        earlier->keeps_outputs = true;
        return produced.origin;
      }
  // Without its graph, which may come from this frame's earlier calls and would keep itself alive.
  call.saved.emplace_back(tensor.is_leaf() ? tensor : tensor.detach(), /*is_output=*/false);
  return {Origin::Kind::Saved, 0, call.saved.size() - 1, tensor.requires_grad()};
}

template <class Block, class... Inputs>
auto Frame::forward(std::shared_ptr<BlockCall>& call, std::size_t number, const CheckpointSubject& subject,
                    Block&& block, Inputs&&... inputs) {
  const BlockState state = subject.state_of(block, model_);
  DeviceList devices;
  auto made = std::make_shared<TypedCall<Block, Inputs...>>(
      block,
      [&](BlockCall& self, const at::Tensor& tensor) {
        devices.add(tensor);
        return origin_of(self, tensor);
      },
      inputs...);
  call = made;
  for (const auto* tensors : {&*state.weights, &*state.buffers})
    for (const auto& tensor : *tensors) devices.add(tensor);
  if (devices.list().empty()) subject.add_current_device(devices);
  call->number = number;
  call->module = identity_of(module_of(made->block()));
  call->surroundings.emplace(devices.list(), state);
  call->first_slot = slots_.size();
  for (auto last = calls_.rbegin(); last != calls_.rend() && !call->before; ++last) call->before = last->lock();
  running_ = calls_.size();
  around_ = torch::autograd::get_current_graph_task_id();
  if (calls_.empty()) streams_ = streams_here(devices.list());
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back(call);
  }
  auto result = [&] {
    const HookScope hooks(this);
    if constexpr (std::is_lvalue_reference_v<Block>)
      return invoke_block(block, std::forward<Inputs>(inputs)...);
    else
      return invoke_block(made->block(), std::forward<Inputs>(inputs)...);
  }();
  call->end_slot = slots_.size();
  call->surroundings->note_end();
  if (call->surroundings->buffer_written()) refuse_write();
  std::size_t index = 0;
  visit_tensors(result, [&](const at::Tensor& tensor) {
    if (tensor.defined())
      produced_.push_back({c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
                           static_cast<std::int64_t>(tensor._version()),
                           {Origin::Kind::Output, running_, index}});
    ++index;
  });
  return result;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
