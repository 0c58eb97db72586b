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
    void begin_step() const {}
    void end_step() const {}
  };
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
