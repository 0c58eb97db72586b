// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <utility>

#include "treadle/axis.hpp"
#include "treadle/invoke_block.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// Keeps every activation: `step.checkpoint(block, x...)` is `block(x...)`.
///
/// This is the axis's no-op policy and the worked example of `checkpointing/concept.hpp`.
struct NoCheckpointing {
  using policy_axis = axis::Checkpointing;
  static constexpr bool recomputes = false;
  static constexpr bool offloads = false;

  bool operator==(const NoCheckpointing&) const = default;
  void check() const {}

  class State {
   public:
    explicit State(const NoCheckpointing&) {}
    template <class Block, class... Inputs>
    decltype(auto) operator()(Block&& block, Inputs&&... inputs) const {
      return invoke_block(std::forward<Block>(block), std::forward<Inputs>(inputs)...);
    }
    template <class Region, class... Inputs>
    decltype(auto) cheap(std::string_view /*name*/, Region&& region, Inputs&&... inputs) const {
      return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
    }
    /// The model, its device and its buffers, before the first step.
    template <class Model, class Device, class Buffers>
    void attach(Model&, Device, const Buffers&) const {}
    void begin_step() const {}
    /// Held over each call of the objective, which gets this model: the trainer's, or a replica of it.
    template <class Model>
    [[nodiscard]] NoGuard pass(Model&) const {
      return {};
    }
    /// After a window's last backward pass.
    void end_step() const {}
    /// Forgets an open window.
    void reset() const {}
  };
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
