// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_div.h>

#include <cmath>

#include "treadle/axis.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace clipping {

/// Clamps each element of the true gradient to [-max_value, max_value]; costs a pass over all gradients.
struct ClipValue {
  using policy_axis = axis::Clipping;
  static constexpr bool measures_norm = false;
  static constexpr bool rewrites = true;

  double max_value = 1.0;

  bool operator==(const ClipValue&) const = default;
  void check() const {
    const auto bound = static_cast<float>(max_value);  // as it is compared with gradients
    if (!(bound > 0) || !std::isfinite(bound))
      throw ConfigError("clipping::ClipValue: max_value must be positive and finite in fp32, such as 1.0.");
  }

  class State;
};

class ClipValue::State {
 public:
  State(const ClipValue& policy, at::Device) : policy_(policy) {}

  /// Divides and clamps in place, so nothing is left to divide by.
  const at::Tensor* clip(at::TensorList gradients, const at::Tensor* divisor) {
    if (gradients.empty()) return nullptr;
    if (divisor) at::_foreach_div_(gradients, *divisor);
    at::_foreach_clamp_min_(gradients, -policy_.max_value);
    at::_foreach_clamp_max_(gradients, policy_.max_value);
    return nullptr;
  }

 private:
  ClipValue policy_;
};

}  // namespace clipping
}  // namespace v0_1
}  // namespace treadle
