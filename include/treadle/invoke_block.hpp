// SPDX-License-Identifier: Apache-2.0
// Calls a block whatever it is: a function object, a module, or a holder of one. No torch here.
#pragma once

#include <concepts>
#include <functional>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// `block(inputs...)`, or `block.forward(inputs...)`, or `block->forward(inputs...)`, whichever there is, in this order
/// except that a pointer or module holder goes to `forward` directly.
template <class Block, class... Inputs>
decltype(auto) invoke_block(Block&& block, Inputs&&... inputs) {
  if constexpr (requires { block->forward(std::forward<Inputs>(inputs)...); }) {
    return block->forward(std::forward<Inputs>(inputs)...);
  } else if constexpr (requires { block.forward(std::forward<Inputs>(inputs)...); }) {
    return block.forward(std::forward<Inputs>(inputs)...);
  } else {
    static_assert(std::invocable<Block&, Inputs...>,
                  "treadle: a checkpointed block must be callable with its inputs, or have forward(inputs...).");
    return std::invoke(block, std::forward<Inputs>(inputs)...);
  }
}

}  // namespace v0_1
}  // namespace treadle
