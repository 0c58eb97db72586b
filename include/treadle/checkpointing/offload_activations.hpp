// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "treadle/axis.hpp"
#include "treadle/checkpointing/frame_backward.hpp"
#include "treadle/checkpointing/offload_clock.hpp"
#include "treadle/checkpointing/offload_link.hpp"
#include "treadle/checkpointing/subject.hpp"
#include "treadle/error.hpp"
#include "treadle/invoke_block.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// Keeps what the blocks `step.checkpoint(block, x...)` save in pinned host memory, and fetches it ahead of the
/// backward pass. Weights, buffers, block inputs that have no graph (data) and what is saved outside of blocks stay.
///
/// The first blocks of a pass go first, until the budget is used up; by default it is what the link, measured when the
/// trainer is made, carries in the time of a forward pass less its waits for the link. The first passes, which are not
/// yet measured, send everything.
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
    std::optional<detail::OffloadStreams> streams;
    std::shared_ptr<const detail::ModelFacts> model;
    detail::ForwardClock clock;
    bool timed = false;
    bool scoped = false;
    int depth = 0;
    std::size_t blocks = 0;
    std::atomic<std::int64_t> sent = 0;
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
      // Data, which its owner keeps.
      const auto stays = [&](const at::Tensor& tensor) {
        if (tensor.defined() && !tensor.requires_grad()) link->keep(tensor);
      };
      (detail::visit_tensors(inputs, stays), ...);
      hooks.emplace(link.get());
      ++pass.blocks;
    }
    const detail::DepthScope deeper(pass.depth);
    if (!policy_.recompute_blocks) return invoke_block(block, std::forward<Inputs>(inputs)...);
    auto frame = std::make_shared<detail::Frame>(subject_.policy(), pass.model ? pass.model : subject_.attached());
    std::shared_ptr<detail::BlockCall> call;
    return frame->forward(call, pass.blocks, subject_, std::forward<Block>(block), std::forward<Inputs>(inputs)...);
  }
  template <class Region, class... Inputs>
  decltype(auto) cheap(std::string_view /*name*/, Region&& region, Inputs&&... inputs) {
    return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
  }

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    subject_.attach(model, device, buffers);
    if (device.is_cuda()) bandwidth_ = detail::measure_link(device);
  }
  /// Held over an objective that is called with `model`.
  template <class Model>
  [[nodiscard]] auto pass(Model& model) {
    struct Scope {
      State& state;
      Pass& pass;
      int exceptions = std::uncaught_exceptions();
      Scope(State& s, std::shared_ptr<const detail::ModelFacts> facts) : state(s), pass(s.passes_.here()) {
        pass.link.reset();
        state.subject_.note_pass();
        pass.scoped = true;
        pass.model = std::move(facts);
      }
      Scope(const Scope&) = delete;
      Scope& operator=(const Scope&) = delete;
      ~Scope() { state.end(pass, std::uncaught_exceptions() == exceptions); }
    };
    return Scope(*this, subject_.facts_of(model));
  }
  /// Whether what runs now has run before, and must leave no second trace.
  static bool is_repeating() { return detail::is_recomputing(); }
  void begin_step() const {}
  void end_step() const { subject_.require_use("step.checkpoint(block, x)"); }
  void reset() {}

  /// Bytes that left the device, or devices, in the last forward pass.
  std::int64_t offloaded_bytes() const {
    std::int64_t sum = 0;
    passes_.for_each([&](const Pass& pass) { sum += pass.sent; });
    return sum;
  }
  /// Bytes that may leave a device in one; the largest number while there is no limit, or none is known yet.
  std::int64_t budget_bytes() const {
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    if (policy_.budget_bytes) return *policy_.budget_bytes;
    passes_.for_each([&](const Pass& pass) { least = std::min(least, budget_of(pass)); });
    return least;
  }
  /// Bytes a second from the device to pinned memory; 0 on a CPU.
  double bandwidth() const { return bandwidth_; }

 private:
  std::int64_t budget_of(const Pass& pass) const {
    if (policy_.budget_bytes) return *policy_.budget_bytes;
    const double seconds = pass.clock.seconds();
    if (bandwidth_ <= 0 || seconds <= 0) return std::numeric_limits<std::int64_t>::max();
    return static_cast<std::int64_t>(bandwidth_ * seconds);
  }
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
  /// At the first block of a pass.
  void begin(Pass& pass, std::optional<at::Device> device) {
    if (device && device->is_cuda() && (!pass.streams || pass.streams->out.device() != *device)) {
      const c10::impl::VirtualGuardImpl guard(device->type());
      pass.streams = {guard.getStreamFromGlobalPool(*device), guard.getStreamFromGlobalPool(*device)};
    }
    pass.link = std::make_shared<detail::OffloadLink>(
        detail::OffloadLimits{policy_.min_bytes, budget_of(pass), policy_.in_flight_bytes}, pass.streams);
    if (const auto& model = pass.model ? pass.model : subject_.attached()) {
      for (const auto& weight : model->weights) pass.link->keep(weight);
      for (const auto& buffer : model->buffers) pass.link->keep(buffer);
    }
    pass.timed = pass.scoped && !policy_.budget_bytes && bandwidth_ > 0 && pass.streams && pass.clock.start(*device);
    if (pass.timed) pass.link->time_stalls();
  }
  void end(Pass& pass, bool whole) noexcept {
    if (pass.link) {
      pass.sent = pass.link->bytes();
      auto stalls = pass.link->take_stalls();
      try {
        if (pass.timed) pass.clock.stop(whole, pass.streams->out.device(), pass.link->offered(), std::move(stalls));
      } catch (...) {  // the device has failed, which the next operation tells
      }
    }
    pass.link.reset();
    pass.model.reset();
    pass.timed = false;
    pass.scoped = false;
    pass.blocks = 0;
  }

  OffloadActivations policy_;
  detail::CheckpointSubject subject_;
  mutable detail::EachThread<Pass> passes_;
  double bandwidth_ = 0;
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
