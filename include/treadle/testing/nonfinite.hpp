// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <limits>

#include "treadle/error.hpp"
#include "treadle/loss.hpp"
#include "treadle/nonfinite/concept.hpp"
#include "treadle/runtime/verdict.hpp"
#include "treadle/runtime/window.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// What `judge` makes of a window of three losses, the second of which is `value`, or of that one alone, whose
/// gradients were found finite (`found_inf` 0) or not (1).
template <class P, bool Windows>
float judged(typename P::State& state, double value, float found_inf, bool loss_scale, at::Device device,
             Report& report) {
  treadle::detail::Window<Windows> window(device);
  window.keep_losses(P::inspects_losses);
  const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
  for (int i = Windows ? 0 : 1; i < (Windows ? 3 : 2); ++i)
    window.add(
        Loss::mean(at::full({}, i == 1 ? value : 1.0, options), 2), [] { return 2; },
        [](double count) { return count; });
  treadle::detail::Verdict verdict(device);
  verdict.found_inf().fill_(found_inf);
  const void* place = verdict.found_inf().const_data_ptr();
  state.judge(window, verdict, loss_scale);
  report.require(verdict.found_inf().const_data_ptr() == place && verdict.found_inf().numel() == 1,
                 "judge() must write into found_inf and keep its address.");
  const auto result = verdict.found_inf().template item<float>();
  report.require(result == 0 || result == 1, "found_inf must be 0 or 1 after judge().");
  return result;
}

template <class P, bool Windows>
void check_judgment(const P& policy, bool loss_scale, at::Device device, Report& report) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  typename P::State state(policy, device);
  for (int i = 0; i < 3; ++i)
    report.require(judged<P, Windows>(state, 0.5, 0, loss_scale, device, report) == 0,
                   "a window with finite losses and gradients must be let through.");
  report.require_no_throw([&] { state.report(); }, "report() must be silent while every step was good");
  // A policy may throw at once where a step is bad, which says it, too.
  try {
    report.require(judged<P, Windows>(state, 0.5, 1, loss_scale, device, report) == 1,
                   "judge() may add to found_inf, and must not clear it.");
  } catch (const NonFiniteError&) {
  }
  if constexpr (P::inspects_losses) {
    typename P::State fresh(policy, device);
    try {
      report.require(judged<P, Windows>(fresh, nan, 0, loss_scale, device, report) == 1,
                     "inspects_losses is true, so a NaN loss must set found_inf.");
    } catch (const NonFiniteError&) {
    }
  }
  for (const auto& tensor : visited(state))
    report.require(tensor.defined(), "for_each_state() must visit defined tensors.");
}

}  // namespace detail

/// Checks at run time what `nonfinite_policy` promises and the compiler cannot see; one sentence a broken promise.
template <nonfinite_policy P>
Violations check_nonfinite_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("non-finite");
  policy.check();
  for (const bool loss_scale : {false, true}) {
    detail::check_judgment<P, true>(policy, loss_scale, device, report);
    detail::check_judgment<P, false>(policy, loss_scale, device, report);
  }
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
