// SPDX-License-Identifier: Apache-2.0
// What a precision policy offers, in the order in which a step calls it. `fp32.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <span>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// A precision policy: option values, facts, `check()`, and a `State` with the calls below.
///
/// What the compiler cannot check: `State`'s constructor may replace a parameter's `model` data and `master`, before
/// any rule state exists; `math()` stands around a whole step and turns off an autocast region of the caller's,
/// `autocast()` around model and objective, and both return guards that restore on destruction, also after a throw;
/// `gradients()` leaves every gradient in its master's dtype; `publish()` writes masters to weights and does the same
/// when called twice; nothing reads a device value on the host.
template <class P>
concept precision_policy = policy_of<P, axis::Precision> &&
    requires(const P policy, typename P::State state, ParameterList& parameters, const BufferList& buffers,
             Batch& batch, std::span<at::Tensor> gradients) {
  { P::scales_loss } -> std::convertible_to<bool>;     // has State loss_scale() and update_scale()?
  { P::master_weights } -> std::convertible_to<bool>;  // does the rule update copies of the weights?
  { P::casts_inputs } -> std::convertible_to<bool>;    // does cast_inputs() change a batch?
  policy.check();
  {typename P::State(policy, parameters, buffers, true)};
  state.math();
  state.autocast();
  state.cast_inputs(batch);
  state.gradients(gradients);
  state.publish();
  state.for_each_state([](const char*, at::Tensor&) {});
} &&(!P::scales_loss ||
     requires(typename P::State state, const at::Tensor& found_inf) {
       { state.loss_scale() } -> std::convertible_to<const at::Tensor&>;
       state.update_scale(found_inf);
     }) &&
    (P::scales_loss || !requires(const typename P::State state) { state.loss_scale(); });

}  // namespace v0_1
}  // namespace treadle
