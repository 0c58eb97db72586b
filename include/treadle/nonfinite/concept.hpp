// SPDX-License-Identifier: Apache-2.0
// What a non-finite policy offers, in the order in which a step calls it. `ignore.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/runtime/verdict.hpp"
#include "treadle/runtime/window.hpp"

namespace treadle {
inline namespace v0_1 {

/// A non-finite policy: option values, facts, `check()`, and a `State`.
///
/// `judge(window, verdict, loss_scale)` may add to `verdict.found_inf()`, which already says whether a gradient is not
/// finite. The window is of either kind, of several micro-batches or of one; a template takes both. What the compiler
/// cannot check: it decides on the device (a host read belongs in `report()`).
template <class P>
concept nonfinite_policy = policy_of<P, axis::NonFinite> &&
    requires(const P policy, typename P::State state, const detail::Window<true>& window,
             const detail::Window<false>& single, detail::Verdict& verdict, at::Device device) {
  { P::selects } -> std::convertible_to<bool>;          // does a bad step leave all state as it was?
  { P::inspects_losses } -> std::convertible_to<bool>;  // does it need each micro-batch's loss?
  policy.check();
  {typename P::State(policy, device)};
  state.judge(window, verdict, true);
  state.judge(single, verdict, true);
  state.report();
  state.for_each_state([](const char*, at::Tensor&) {});
};

}  // namespace v0_1
}  // namespace treadle
