// SPDX-License-Identifier: Apache-2.0
// What an update rule offers. `adamw.hpp` on `fused_state.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// An update rule: an aggregate of option values with one fact, `check()`, and a `State`.
///
/// `State(rule, parameters)`, then each step `collect(precision)` (gradients in the rule's order, in the masters'
/// dtypes), `step(divisor, found_inf, applied)` and `release()`; `expose(divisor)` comes before `step` if an observer
/// wants gradients. What the compiler cannot check: nothing is read on the host unless `host_stepped`; where
/// `found_inf` is 1 all state stays bitwise as it was; state is visited by parameter name.
template <class R>
concept update_rule = requires(const R rule, const ParameterList& parameters, typename R::State state,
                               const at::Tensor* tensor) {
  { R::host_stepped } -> std::convertible_to<bool>;  // does step() run on host values?
  rule.check();
  {typename R::State(rule, parameters)};
  state.step(tensor, tensor, tensor);
  { state.expose(tensor) } -> std::convertible_to<const at::Tensor*>;
  state.release();
  { state.rates().planned() } -> std::convertible_to<bool>;
};

}  // namespace v0_1
}  // namespace treadle
