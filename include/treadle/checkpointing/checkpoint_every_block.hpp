// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/axis.hpp"
#include "treadle/checkpointing/segments.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// Keeps the inputs of each `step.checkpoint(block, x...)` and computes the block a second time in the backward pass.
///
/// Gradients, buffers and generators are those of the plain run. Throws `ConfigError` where another autograd engine
/// than LibTorch's is installed, and, naming the block, where a block computes something else the second time.
struct CheckpointEveryBlock {
  using policy_axis = axis::Checkpointing;
  static constexpr bool recomputes = true;
  static constexpr bool offloads = false;

  bool operator==(const CheckpointEveryBlock&) const = default;
  void check() const {}

  class State : public detail::Segments {
   public:
    State() : State(CheckpointEveryBlock{}) {}
    explicit State(const CheckpointEveryBlock&) : Segments("checkpointing::CheckpointEveryBlock", 1) {}
  };
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
