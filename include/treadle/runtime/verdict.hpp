// SPDX-License-Identifier: Apache-2.0
// Whether a step counts, decided and kept on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>

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

  /// The verdict on a window: 1 where it must change nothing; null if it cannot be bad. `suspects` are its gradients,
  /// or their norm, which is not finite if one of them is not.
  template <class Policies, class Window, class NonFiniteState>
  const at::Tensor* decide(const Window& window, NonFiniteState& nonfinite, at::TensorList suspects) {
    constexpr bool inspects = Policies::NonFinite::selects || Policies::Precision::scales_loss;
    const bool may_count_nothing = window.empty() || window.counts_on_device();
    if (!inspects && !may_count_nothing) [[likely]]
      return nullptr;
    found_inf_.zero_();
    if (inspects && !suspects.empty())  // multiplies by 1, so it only looks
      at::_amp_foreach_non_finite_check_and_unscale_(suspects, found_inf_, one_);
    // A step that counted nothing is no step: dividing by its count would make every weight NaN.
    frozen_.reset();
    if (window.empty())
      found_inf_.fill_(1.0);
    else if (window.counts_on_device())
      require_count<Policies>(window.total_count());
    nonfinite.judge(window, *this, Policies::Precision::scales_loss);
    if (!Policies::NonFinite::selects && !may_count_nothing) return nullptr;
    at::eq_out(applied_, found_inf_, 0);
    skipped_.add_(found_inf_.to(at::kLong));
    return &found_inf_;
  }

  /// Lets the loss scale learn from the window's gradients; it stands still with everything else where the window
  /// counted nothing or a policy has called `freeze`.
  template <class Window, class PrecisionState>
  void move_scale(const Window& window, PrecisionState& precision) {
    if (window.empty()) return;
    const at::Tensor& overflow = window.counts_on_device() ? overflow_ : found_inf_;
    if (!frozen_.defined()) [[likely]]
      return precision.update_scale(overflow);
    c10::SmallVector<at::Tensor, 2> before;
    precision.for_each_state([&](const auto&, at::Tensor& tensor) { before.push_back(tensor.clone()); });
    precision.update_scale(overflow);
    std::size_t i = 0;
    precision.for_each_state(
        [&](const auto&, at::Tensor& tensor) { tensor.copy_(at::where(frozen_, before[i++], tensor)); });
  }
  /// Where `stopped` (one element) is not 0, this step does not even move the loss scale. Holds for one step.
  void freeze(const at::Tensor& stopped) {
    const auto now = stopped.ne(0);
    frozen_ = frozen_.defined() ? at::logical_or(frozen_, now) : now;
  }

  at::Tensor& found_inf() { return found_inf_; }
  const at::Tensor& applied() const { return applied_; }
  const at::Tensor& skipped() const { return skipped_; }
  template <class Visitor>
  void for_each_state(Visitor&& visit) {
    visit("skipped_steps", skipped_);
  }

 private:
  // What gradients say and what the count says are two things: a window that counted nothing did not overflow, and
  // `Ignore` applies a window that did.
  template <class Policies>
  void require_count(const at::Tensor& count) {
    const auto nothing = count.le(0);
    if constexpr (Policies::Precision::scales_loss) {
      overflow_ = found_inf_.clone();
      frozen_ = nothing;
      if constexpr (!Policies::NonFinite::selects) found_inf_.zero_();
    }
    found_inf_.copy_(at::maximum(found_inf_, nothing.to(at::kFloat)));
  }

  at::Tensor found_inf_;
  at::Tensor overflow_;  // only where the count is on the device: what the gradients alone said
  at::Tensor frozen_;    // bool; undefined if nothing is frozen
  at::Tensor one_;
  at::Tensor applied_;
  at::Tensor skipped_;
};

/// What to look at for inf and NaN: the norm, where clipping has measured it, else every gradient.
template <bool Measured, class ClippingState>
at::TensorList suspects(const ClippingState& clipping, at::TensorList gradients) {
  if constexpr (Measured)
    return clipping.measured();
  else
    return gradients;
}

/// The device's loss scale, or null where the precision `Scales` none.
template <bool Scales, class PrecisionState>
const at::Tensor* loss_scale_of(const PrecisionState& precision) {
  if constexpr (Scales)
    return &precision.loss_scale();
  else
    return nullptr;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
