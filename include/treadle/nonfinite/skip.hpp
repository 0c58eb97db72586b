// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/axis.hpp"
#include "treadle/nonfinite/plain_state.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nonfinite {

/// A step with an inf or NaN gradient changes nothing: weights, moments, averages, schedule, buffers and counters stay,
/// on the device, and `StepResult::skipped` is 1.
struct Skip {
  using policy_axis = axis::NonFinite;
  static constexpr bool selects = true;
  static constexpr bool inspects_losses = false;

  bool operator==(const Skip&) const = default;
  void check() const {}

  class State : public PlainState {
   public:
    State(const Skip&, at::Device) {}
  };
};

}  // namespace nonfinite
}  // namespace v0_1
}  // namespace treadle
