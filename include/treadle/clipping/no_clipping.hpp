// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/axis.hpp"

namespace treadle {
inline namespace v0_1 {
namespace clipping {

/// Leaves gradients as they are.
///
/// This is the axis's no-op policy and the worked example of `clipping/concept.hpp`.
struct NoClipping {
  using policy_axis = axis::Clipping;
  static constexpr bool measures_norm = false;
  static constexpr bool rewrites = false;

  bool operator==(const NoClipping&) const = default;
  void check() const {}

  class State {
   public:
    State(const NoClipping&, at::Device) {}
    const at::Tensor* clip(at::TensorList, const at::Tensor* divisor) const { return divisor; }
  };
};

}  // namespace clipping
}  // namespace v0_1
}  // namespace treadle
