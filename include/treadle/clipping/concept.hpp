// SPDX-License-Identifier: Apache-2.0
// What a clipping policy offers, in the order in which a step calls it. `no_clipping.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"

namespace treadle {
inline namespace v0_1 {

/// A clipping policy: option values, facts, `check()`, and a `State`.
///
/// `clip(gradients, divisor)` returns what the gradients are still to be divided by, null for 1. What the compiler
/// cannot check: the clipped gradient is that of gradients / divisor; nothing is read on the host; NaN stays NaN.
template <class P>
concept clipping_policy = policy_of<P, axis::Clipping> &&
    requires(const P policy, typename P::State state, at::TensorList gradients, const at::Tensor* divisor,
             at::Device device) {
  { P::measures_norm } -> std::convertible_to<bool>;  // has it measure(), measured(), norm()?
  { P::rewrites } -> std::convertible_to<bool>;       // does clip() write gradients?
  policy.check();
  {typename P::State(policy, device)};
  { state.clip(gradients, divisor) } -> std::convertible_to<const at::Tensor*>;
} &&(!P::measures_norm ||
     requires(typename P::State state, at::TensorList gradients) {
       state.measure(gradients);
       { state.measured() } -> std::convertible_to<at::TensorList>;
       { state.norm() } -> std::convertible_to<const at::Tensor&>;
     }) &&
    (P::measures_norm || !requires(const typename P::State state) { state.measured(); });

}  // namespace v0_1
}  // namespace treadle
