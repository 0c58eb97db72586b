// SPDX-License-Identifier: Apache-2.0
// What a checkpointing policy (activation recompute or offload) offers. `no_checkpointing.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"

namespace treadle {
inline namespace v0_1 {

/// A checkpointing policy: option values, facts, `check()`, and a `State` that is what `step.checkpoint` names.
///
/// What the compiler cannot check: gradients, buffers and generators end as they do in the plain run.
template <class P>
concept checkpointing_policy = policy_of<P, axis::Checkpointing> &&
    requires(const P policy, typename P::State state, const at::Tensor& x) {
  { P::recomputes } -> std::convertible_to<bool>;  // must the objective take the step context?
  { P::offloads } -> std::convertible_to<bool>;    // do activations leave the device?
  policy.check();
  {typename P::State(policy)};
  state.begin_step();
  {
    state([](const at::Tensor& y) { return y; }, x)
    } -> std::convertible_to<at::Tensor>;
  {
    state.cheap(
        "name", [](const at::Tensor& y) { return y; }, x)
    } -> std::convertible_to<at::Tensor>;
  state.end_step();
};

}  // namespace v0_1
}  // namespace treadle
