// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/checkpointing/offload_link.hpp"
#include "treadle/checkpointing/segments.hpp"
#include "treadle/error.hpp"
#include "treadle/invoke_block.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// Keeps what the blocks `step.checkpoint(block, x...)` save in pinned host memory, and fetches it ahead of the
/// backward pass. Parameters and what is saved outside of blocks stay.
///
/// The first blocks of a pass go first, until the budget is used up; by default it is what the link, measured when the
/// trainer is made, carries in the time of a forward pass. The first pass, which is not yet measured, sends everything.
struct OffloadActivations {
  using policy_axis = axis::Checkpointing;
  static constexpr bool recomputes = true;
  static constexpr bool offloads = true;

  std::int64_t min_bytes = std::int64_t{1} << 20;          ///< smaller memory stays on the device
  std::optional<std::int64_t> budget_bytes{};              ///< that may leave in one forward pass; default: measured
  std::int64_t in_flight_bytes = std::int64_t{256} << 20;  ///< wait for their copy, or are fetched ahead, at a time
  bool recompute_blocks = false;                           ///< recompute the blocks, and send their inputs only

  bool operator==(const OffloadActivations&) const = default;
  void check() const {
    if (min_bytes < 0 || in_flight_bytes < 0 || budget_bytes.value_or(0) < 0)
      throw ConfigError(
          "checkpointing::OffloadActivations: min_bytes, budget_bytes or in_flight_bytes is negative; sizes are 0 or "
          "more.");
  }

  class State;
};

class OffloadActivations::State {
  struct Pass {
    std::shared_ptr<detail::OffloadLink> link;
    std::optional<c10::Stream> copies;
    bool scoped = false;
    int depth = 0;
    std::size_t blocks = 0;
  };

 public:
  State() : State(OffloadActivations{}) {}
  explicit State(const OffloadActivations& policy) : policy_(policy), subject_("checkpointing::OffloadActivations") {}
  /// A fresh one: a copied model's passes are its own.
  State(const State& other) : State(other.policy_) {}
  State& operator=(const State&) = delete;

  template <class Block, class... Inputs>
  auto operator()(Block&& block, Inputs&&... inputs) {
    if (!at::GradMode::is_enabled()) return invoke_block(block, std::forward<Inputs>(inputs)...);
    subject_.note_use();
    auto& pass = passes_.here();
    const bool nested = pass.depth > 0 || detail::is_recomputing();
    if (nested && !policy_.recompute_blocks) return invoke_block(block, std::forward<Inputs>(inputs)...);
    std::optional<detail::HookScope> hooks;
    std::shared_ptr<detail::OffloadLink> link;  // the scope's, whatever becomes of the pass
    if (!nested) {
      if (!pass.link || (!pass.scoped && pass.link->has_fetched())) begin(pass, device_of(inputs...));
      link = pass.link;
      hooks.emplace(link.get());
      ++pass.blocks;
    }
    const detail::DepthScope deeper(pass.depth);
    if (!policy_.recompute_blocks) return invoke_block(block, std::forward<Inputs>(inputs)...);
    auto frame = std::make_shared<detail::Frame>(subject_.policy(), subject_.names());
    return frame->forward(pass.blocks, subject_.device(), subject_.state_of(block), std::forward<Block>(block),
                          std::forward<Inputs>(inputs)...);
  }
  template <class Region, class... Inputs>
  decltype(auto) cheap(std::string_view /*name*/, Region&& region, Inputs&&... inputs) {
    return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
  }

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    subject_.attach(model, device, buffers);
    if (device.is_cuda()) bandwidth_ = measure(device);
  }
  /// Held over an objective.
  auto pass() {
    struct Scope {
      State& state;
      Pass& pass;
      explicit Scope(State& s) : state(s), pass(s.passes_.here()) {
        pass.link.reset();
        state.subject_.note_pass();
        pass.scoped = true;
        state.clock_.start(state.subject_.device(), state.budgets());
      }
      Scope(const Scope&) = delete;
      Scope& operator=(const Scope&) = delete;
      ~Scope() {
        state.clock_.stop();
        if (pass.link) state.sent_ = pass.link->bytes();
        pass.link.reset();
        pass.scoped = false;
        pass.blocks = 0;
      }
    };
    return Scope(*this);
  }
  /// Whether what runs now has run before, and must leave no second trace.
  static bool is_repeating() { return detail::is_recomputing(); }
  void begin_step() const {}
  void end_step() const { subject_.require_use("step.checkpoint(block, x)"); }
  void reset() {}

  /// Bytes that left the device in the last forward pass.
  std::int64_t offloaded_bytes() const { return sent_; }
  /// Bytes that may leave it in one; the largest number while there is no limit, or none is known yet.
  std::int64_t budget_bytes() const {
    if (policy_.budget_bytes) return *policy_.budget_bytes;
    const double seconds = clock_.seconds();
    if (bandwidth_ <= 0 || seconds <= 0) return std::numeric_limits<std::int64_t>::max();
    return static_cast<std::int64_t>(bandwidth_ * seconds);
  }
  /// Bytes a second from the device to pinned memory; 0 on a CPU.
  double bandwidth() const { return bandwidth_; }

 private:
  /// How long a forward pass takes on the device: the shortest of the first ones, without waiting for any.
  class Clock {
   public:
    void start(std::optional<at::Device> device, bool wanted) {
      const std::lock_guard lock(mutex_);
      if (!wanted || !device || !device->is_cuda() || passes_ >= 8) return;
      if (ended_ && began_ && began_->query() && ended_->query()) {
        const double seconds = began_->elapsedTime(*ended_) / 1e3;
        // The first pass allocates its pinned memory.
        if (++passes_ > 1) seconds_ = seconds_ > 0 ? std::min(seconds_, seconds) : seconds;
      } else if (began_) {
        return;  // not over yet
      }
      device_ = *device;
      ended_.reset();
      began_.emplace(device->type(), c10::EventFlag::BACKEND_DEFAULT);
      began_->record(stream());
    }
    void stop() {
      const std::lock_guard lock(mutex_);
      if (!began_ || ended_) return;
      ended_.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
      ended_->record(stream());
    }
    double seconds() const {
      const std::lock_guard lock(mutex_);
      return seconds_;
    }

   private:
    c10::Stream stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

    mutable std::mutex mutex_;
    at::Device device_{at::kCPU};
    std::optional<c10::Event> began_;
    std::optional<c10::Event> ended_;
    int passes_ = 0;
    double seconds_ = 0;
  };

  bool budgets() const { return !policy_.budget_bytes && bandwidth_ > 0; }
  /// That of the block's inputs: replicas of one model live on several.
  template <class... Inputs>
  std::optional<at::Device> device_of(const Inputs&... inputs) const {
    std::optional<at::Device> found;
    const auto look = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && !found) found = tensor.device();
    };
    (detail::visit_tensors(inputs, look), ...);
    return found ? found : subject_.device();
  }
  void begin(Pass& pass, std::optional<at::Device> device) {
    if (device && device->is_cuda() && (!pass.copies || pass.copies->device() != *device))
      pass.copies = c10::impl::VirtualGuardImpl(device->type()).getStreamFromGlobalPool(*device);
    pass.link = std::make_shared<detail::OffloadLink>(
        detail::OffloadLimits{policy_.min_bytes, budget_bytes(), policy_.in_flight_bytes}, pass.copies);
  }
  /// Waits for the device, once, when the trainer is made.
  static double measure(at::Device device) {
    constexpr std::int64_t bytes = std::int64_t{64} << 20;
    const auto from = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    auto to = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    double best = 0;
    for (int i = 0; i < 3; ++i) {
      c10::Event began(device.type(), c10::EventFlag::BACKEND_DEFAULT);
      c10::Event ended(device.type(), c10::EventFlag::BACKEND_DEFAULT);
      began.record(stream);
      to.copy_(from, /*non_blocking=*/true);
      ended.record(stream);
      ended.synchronize();
      best = std::max(best, static_cast<double>(bytes) / (began.elapsedTime(ended) / 1e3));
    }
    return best;
  }

  OffloadActivations policy_;
  detail::CheckpointSubject subject_;
  detail::EachThread<Pass> passes_;
  Clock clock_;
  double bandwidth_ = 0;
  std::atomic<std::int64_t> sent_ = 0;
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
