// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>

#include <cmath>
#include <utility>

#include "treadle/axis.hpp"
#include "treadle/clipping/norm.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace clipping {

/// Scales all gradients of a step so that their common 2-norm is at most `max_norm`, without a pass of its own: the
/// coefficient joins the device scalar that the rule divides by.
///
/// The coefficient is min(max_norm / (norm + 1e-6), 1), as in torch.nn.utils.clip_grad_norm_, over the true gradient
/// (unscaled, averaged). `StepResult::grad_norm` is the norm before clipping.
struct ClipNorm {
  using policy_axis = axis::Clipping;
  static constexpr bool measures_norm = true;
  static constexpr bool rewrites = false;

  double max_norm = 1.0;

  bool operator==(const ClipNorm&) const = default;
  void check() const {
    if (!(max_norm > 0) || !std::isfinite(max_norm))
      throw ConfigError("clipping::ClipNorm: max_norm must be positive and finite, such as 1.0.");
  }

  class State;
};

class ClipNorm::State {
 public:
  State(const ClipNorm& policy, at::Device device) : policy_(policy), device_(device) {}

  /// The norm of the raw gradients, before any division: not finite if one of them is not.
  void measure(at::TensorList gradients) { raw_norm_ = global_norm(gradients, device_); }
  /// That norm, as a list of one.
  at::TensorList measured() const { return raw_norm_; }

  /// The divisor that also clips; call after `measure`.
  const at::Tensor* clip(at::TensorList, const at::Tensor* divisor) {
    norm_ = divisor ? at::div(raw_norm_, *divisor) : raw_norm_;
    auto excess = at::add(norm_, 1e-6).div_(policy_.max_norm).clamp_min_(1.0);
    divisor_ = divisor ? excess.mul_(*divisor) : std::move(excess);
    if (divisor_.scalar_type() != at::kFloat) divisor_ = divisor_.to(at::kFloat);  // what the fused rules take
    return &divisor_;
  }
  /// The norm of the true gradient: a scalar tensor that later steps do not change.
  const at::Tensor& norm() const { return norm_; }

 private:
  ClipNorm policy_;
  at::Device device_;
  at::Tensor raw_norm_;
  at::Tensor norm_;
  at::Tensor divisor_;
};

}  // namespace clipping
}  // namespace v0_1
}  // namespace treadle
