// SPDX-License-Identifier: Apache-2.0
// Whether a step counts, decided and kept on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// `found_inf` (fp32, 1 where the step is bad) and `applied` (int64, 1 where it is good), at fixed addresses.
class Verdict {
 public:
  explicit Verdict(at::Device device)
      : found_inf_(at::zeros({}, at::device(device).dtype(at::kFloat))),
        one_(at::full({}, 1.0, found_inf_.options())),
        applied_(at::full({}, 1, found_inf_.options().dtype(at::kLong))),
        skipped_(at::zeros({}, applied_.options())) {}

  /// Looks for inf or NaN in `tensors` (gradients, or their norm, which is not finite if one of them is not).
  void inspect(at::TensorList tensors) {
    found_inf_.zero_();
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_inf_, one_);  // multiplies by 1, so it only looks
  }
  void clear() { found_inf_.zero_(); }
  /// A step that counted nothing is no step: dividing by its count would make every weight NaN.
  void require_count(const at::Tensor& count) {
    found_inf_.copy_(at::maximum(found_inf_, count.reshape({}).le(0).to(at::kFloat)));
  }
  void reject() { found_inf_.fill_(1.0); }

  /// To be called once `found_inf` is final: derives `applied` and counts a skipped step.
  void settle() {
    at::eq_out(applied_, found_inf_, 0);
    skipped_.add_(found_inf_.to(at::kLong));
  }

  at::Tensor& found_inf() { return found_inf_; }
  const at::Tensor& applied() const { return applied_; }
  const at::Tensor& skipped() const { return skipped_; }

 private:
  at::Tensor found_inf_;
  at::Tensor one_;
  at::Tensor applied_;
  at::Tensor skipped_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
