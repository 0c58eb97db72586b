// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/axis.hpp"
#include "treadle/nonfinite/plain_state.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nonfinite {

/// Applies whatever the backward pass gave.
///
/// This is the axis's no-op policy and, with `plain_state.hpp`, the worked example of `nonfinite/concept.hpp`. Under
/// `Fp16` the loss scale still backs off on overflow, but the overflowed update is applied: prefer `Skip`.
struct Ignore {
  using policy_axis = axis::NonFinite;
  static constexpr bool selects = false;
  static constexpr bool inspects_losses = false;

  bool operator==(const Ignore&) const = default;
  void check() const {}

  class State : public PlainState {
   public:
    State(const Ignore&, at::Device) {}
  };
};

}  // namespace nonfinite
}  // namespace v0_1
}  // namespace treadle
