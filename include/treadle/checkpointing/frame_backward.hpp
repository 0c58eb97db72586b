// SPDX-License-Identifier: Apache-2.0
// The backward side of a checkpoint: what was dropped is asked for, and computed again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "treadle/checkpointing/block_call.hpp"
#include "treadle/checkpointing/frame.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/saved_tensor.hpp"
#include "treadle/checkpointing/streams.hpp"
#include "treadle/checkpointing/surroundings.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The hooks of a recompute, which bring what is saved to its slot.
class Frame::Refill final : public HookSource {
 public:
  explicit Refill(Frame& frame) : frame_(frame) {
    for (std::size_t i = 0; i < frame.slots_.size(); ++i)
      if (frame.slots_[i].needed && !frame.slots_[i].kept.defined()) end_ = i + 1;
    stops_ = !frame.wants_outputs();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    if (torch::autograd::get_current_graph_task_id() != around_) return nullptr;
    return std::make_unique<Keeper>(*this);
  }
  /// Before and after a call is repeated: it must fill its own slots, and no others.
  void begin(const BlockCall& call) {
    call_ = &call;
    next_ = call.first_slot;
  }
  void end() {
    if (stopped_ || next_ >= end_ || call_->end_slot == BlockCall::unknown) return;
    if (next_ != call_->end_slot) mismatch_ = counts(std::to_string(next_ - call_->first_slot));
  }
  bool is_complete() const { return next_ >= end_; }
  /// Whether there is nothing left to repeat for, or no sense in it.
  bool is_over() const { return stopped_ || !mismatch_.empty(); }
  const std::string& mismatch() const { return mismatch_; }

 private:
  // Backward passes within a block find what they need here.
  class Keeper final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Keeper(Refill& refill) : refill_(&refill) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      kept_ = kept_form(tensor);
      refill_->save(tensor);
    }
    at::Tensor call_unpack_hook() override { return kept_; }

   private:
    Refill* refill_;
    at::Tensor kept_;
  };

  void save(const at::Tensor& tensor) {
    if (stopped_ || next_ >= end_) return;  // the block caught EnoughRecomputed and goes on
    if (next_ == call_->end_slot) return fail(counts("more"));
    Slot& slot = frame_.slots_[next_];
    if (slot.dtype != tensor.scalar_type() || slot.device != tensor.device() ||
        !std::ranges::equal(slot.sizes, tensor.sizes()) || (slot.kept.defined() && !slot.kept.is_alias_of(tensor))) {
      auto what = "saved tensor " + std::to_string(next_ - call_->first_slot + 1) + " was " +
                  describe(slot.dtype, slot.sizes, slot.device) + " and is " +
                  describe(tensor.scalar_type(), tensor.sizes(), tensor.device());
      if (slot.kept.defined()) what += " (of a parameter, which must be the same one)";
      return fail(std::move(what));
    }
    if (slot.needed && !slot.kept.defined()) {
      slot.value = tensor.detach();
      slot.version = static_cast<std::int64_t>(slot.value._version());
    }
    if (++next_ == end_ && stops_) stop();
  }
  void fail(std::string what) {
    mismatch_ = std::move(what);
    stop();
  }
  void stop() {
    stopped_ = true;
    if (call_->may_throw) throw EnoughRecomputed{};
  }
  std::string counts(const std::string& now) const {
    return "it saved " + std::to_string(call_->end_slot - call_->first_slot) + " tensors and now " + now;
  }
  static std::string describe(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device) {
    return std::string(c10::toString(dtype)) + c10::str(sizes) + " on " + device.str();
  }

  Frame& frame_;
  int around_ = torch::autograd::get_current_graph_task_id();
  const BlockCall* call_ = nullptr;  // that is repeated
  std::size_t next_ = 0;
  std::size_t end_ = 0;   // of the slots that anybody needs
  bool stops_ = true;     // once the last of them is filled
  bool stopped_ = false;  // has thrown EnoughRecomputed, whatever the block has made of it
  std::string mismatch_;
};

/// A saved tensor in the backward pass.
inline at::Tensor Frame::take(std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!slots_[index].kept.defined()) {
    const int task = torch::autograd::get_current_graph_task_id();
    if (task != task_ || !slots_[index].value.defined()) recompute(task);
  }
  Slot& slot = slots_[index];
  at::Tensor value = slot.kept.defined() ? slot.kept : std::move(slot.value);
  slot.value.reset();
  use_here(value, streams_);
  if (task_ == -1) drop_values();  // no backward pass that would fetch the others
  if (static_cast<std::int64_t>(value._version()) != slot.version)
    refuse("has had a tensor that its backward pass needs changed in place",
           "change it out of place, or after the backward pass");
  return value;
}

inline void Frame::recompute(int task) {
  closed_ = true;
  task_ = task;
  drop_values();
  Refill refill(*this);
  run(refill);
  if (!refill.mismatch().empty() || !refill.is_complete()) {
    drop_values();
    refuse("computes something else in the backward pass than it did in the forward pass: " +
               (refill.mismatch().empty() ? "it saves less" : refill.mismatch()),
           "let it depend on nothing but its inputs, its weights and buffers, and the default random generators");
  }
}

inline void Frame::take_inputs(BlockCall& call) {
  call.inputs.assign(call.origins.size(), at::Tensor());
  try {
    for (std::size_t i = 0; i < call.origins.size(); ++i) {
      const auto& origin = call.origins[i];
      if (origin.kind != Origin::Kind::Saved) continue;
      auto input = call.saved[origin.index].unpack();
      if (input.requires_grad() != origin.requires_grad) input = input.detach().set_requires_grad(origin.requires_grad);
      call.inputs[i] = std::move(input);
    }
  } catch (const c10::Error& error) {
    if (std::string(error.what_without_backtrace()).find("inplace") == std::string::npos) throw;
    refuse("has had an input changed in place, from which its backward pass would recompute it",
           "change it out of place, or after the backward pass");
  }
}

inline void Frame::run(Refill& refill) {
  struct Repeats {  // and what they hold, whatever happens
    std::vector<std::shared_ptr<BlockCall>> calls{};
    ~Repeats() {
      for (auto& call : calls) {
        if (!call) continue;
        call->inputs.clear();
        call->outputs.clear();
      }
    }
  } repeats;
  OnStreams streams(streams_);
  std::vector<const Surroundings*> all;
  for (running_ = 0; running_ < calls_.size(); ++running_) {
    // One that nobody needs any more is gone, and with it what it would be repeated for.
    auto& call = repeats.calls.emplace_back(calls_[running_].lock());
    if (!call) continue;
    take_inputs(*call);  // before the generators move: an input may itself be recomputed
    all.push_back(&*call->surroundings);
    if (all.back()->weight_changed()) refuse_change(all.back()->of_model());
    if (all.back()->buffer_written()) refuse_write();
  }
  PutBack put_back(all);
  {
    const DepthScope inside(HookEngine::get().recomputes());
    const at::AutoGradMode with_grad(true);
    const HookScope hooks(&refill);
    try {
      for (running_ = 0; running_ < calls_.size(); ++running_) {
        if (!repeats.calls[running_]) continue;
        auto& call = *repeats.calls[running_];
        for (std::size_t i = 0; i < call.origins.size(); ++i)
          if (const auto& origin = call.origins[i]; origin.kind == Origin::Kind::Output)
            call.inputs[i] = repeats.calls[origin.call]->outputs[origin.index];
        call.surroundings->reinstate();
        const AutocastAs cast(call.surroundings->autocast());
        refill.begin(call);
        call.repeat();
        refill.end();
        if (refill.is_over()) break;
      }
      if (!refill.is_over() && wants_outputs()) keep_outputs(*repeats.calls.back());
    } catch (...) {
      if (!refill.is_over()) throw;  // else a block has made another exception of EnoughRecomputed
    }
  }
  put_back.end();
  streams.end();
}

inline std::size_t Frame::add_output(std::size_t position, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  Output output{position, tensor.scalar_type(), {}, {}};
  output.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  output.strides.assign(tensor.strides().begin(), tensor.strides().end());
  outputs_.push_back(std::move(output));
  calls_.back().lock()->keeps_outputs = true;
  return outputs_.size() - 1;
}
inline void Frame::use_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  ++outputs_[index].users;
}
inline void Frame::release_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (--outputs_[index].users == 0) outputs_[index].value.reset();
}
inline at::Tensor Frame::take_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != task_ || !outputs_[index].value.defined()) recompute(task);
  Output& output = outputs_[index];
  at::Tensor value = output.value;
  use_here(value, streams_);
  if (--output.pending <= 0) output.value.reset();
  if (task_ == -1) drop_values();
  if (static_cast<std::int64_t>(value._version()) != output.version)
    refuse("has had a tensor that a backward pass needs changed in place", "change it out of place");
  return value;
}
inline bool Frame::wants_outputs() const {
  return std::ranges::any_of(outputs_, [](const Output& output) { return output.users > 0; });
}
inline void Frame::keep_outputs(const BlockCall& call) {
  for (auto& output : outputs_) {
    if (output.users == 0) continue;
    const auto& tensor = call.outputs.at(output.position);
    if (tensor.scalar_type() != output.dtype || !std::ranges::equal(tensor.sizes(), output.sizes) ||
        !std::ranges::equal(tensor.strides(), output.strides))
      refuse("gives something else in the backward pass than it did in the forward pass",
             "let it depend on nothing but its inputs, its weights and the default random generators");
    output.value = tensor.detach();
    output.version = static_cast<std::int64_t>(output.value._version());
    output.pending = output.users;
  }
}
inline void Frame::drop_values() {
  for (auto& slot : slots_) slot.value.reset();
  for (auto& output : outputs_) output.value.reset();
}

inline std::string Frame::name() const {
  if (!region_.empty()) return "region '" + region_ + "'";
  const auto call = calls_[std::min(running_, calls_.size() - 1)].lock();
  if (!call) return "a block";
  if (model_)
    if (const auto found = model_->names.find(call->module); found != model_->names.end())
      return "block '" + found->second + "'";
  return "block number " + std::to_string(call->number) + " of the forward pass (" + c10::demangle(call->type->name()) +
         ")";
}
inline void Frame::refuse(const std::string& what, const std::string& advice) const {
  throw ConfigError(std::string(policy_) + ": " + name() + " " + what + "; " + advice + ".");
}
inline void Frame::refuse_change(bool of_model) const {
  if (of_model)
    refuse("is a function object, which may use any weight of the model, and one has been changed in place since",
           "pass the block as a module, or change weights after the backward pass");
  refuse("has had a weight changed in place, with which its backward pass would recompute it",
         "change weights after the backward pass");
}
inline void Frame::refuse_write() const {
  refuse("writes a buffer of more than 1 MiB, which is not copied for its recompute",
         "keep what it writes out of the block");
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
