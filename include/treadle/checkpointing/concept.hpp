// SPDX-License-Identifier: Apache-2.0
// What a checkpointing policy (activation recompute or offload) offers. `no_checkpointing.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// A checkpointing policy: option values, facts, `check()`, and a `State` that is what `step.checkpoint` names.
///
/// What the compiler cannot check: gradients, buffers and generators end as they do in the plain run; the state is used
/// from several threads at once under `parallelism::DataParallel`; and one that computes something a second time has
/// `is_repeating()`, which is true meanwhile, or what an objective records there would be counted twice.
template <class P>
concept checkpointing_policy = policy_of<P, axis::Checkpointing> &&
    requires(const P policy, typename P::State state, const at::Tensor& x, int& model, const BufferList& buffers) {
  { P::recomputes } -> std::convertible_to<bool>;  // must the objective take the step context?
  { P::offloads } -> std::convertible_to<bool>;    // do activations leave the device?
  policy.check();
  {typename P::State(policy)};
  state.attach(model, x.device(), buffers);  // once, before the first step
  state.begin_step();                        // before a window's first micro-batch
  state.pass(model);  // what it returns is held over each call of the objective, which gets this model or replica
  {
    state([](const at::Tensor& y) { return y; }, x)
    } -> std::convertible_to<at::Tensor>;
  {
    state.cheap(
        "name", [](const at::Tensor& y) { return y; }, x)
    } -> std::convertible_to<at::Tensor>;
  state.end_step();  // after a window's last backward pass; may throw
  state.reset();     // an open window is dropped
};

}  // namespace v0_1
}  // namespace treadle
