// SPDX-License-Identifier: Apache-2.0
// What an update rule offers. `adamw.hpp` on `fused_state.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "treadle/precision/fp32.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// An update rule: an aggregate of option values with its facts, `check()`, and a `State`.
///
/// `State(rule, parameters)`, then each step `collect(precision)` (gradients in the rule's order, in the masters'
/// dtypes), `step(divisor, found_inf, applied)` and `release()`; `expose(divisor)` comes before `step` if an observer
/// wants gradients. `rates()` holds the schedule: `fit` asks `check_run` whether a run is long enough, plans it unless
/// that was done and does not depend on the run, and reports `of(0)`. What the compiler cannot check: nothing is read
/// on the host unless `host_stepped`; where `found_inf` is 1 all state stays bitwise as it was; state is visited by
/// parameter name; `without_gradient()` names the trained parameters that have got no gradient so far.
template <class R>
concept update_rule = requires(const R rule, const ParameterList& parameters, typename R::State state,
                               const at::Tensor* tensor, precision::Fp32::State& precision, std::int64_t steps) {
  { R::host_stepped } -> std::convertible_to<bool>;  // does step() run on host values?
  rule.check();
  {typename R::State(rule, parameters)};
  { state.collect(precision) } -> std::convertible_to<at::TensorList>;
  state.step(tensor, tensor, tensor);
  { state.expose(tensor) } -> std::convertible_to<const at::Tensor*>;
  state.release();
  { state.without_gradient() } -> std::convertible_to<std::vector<std::string>>;
  state.for_each_state([](const std::string&, at::Tensor&) {});
  requires std::is_lvalue_reference_v<decltype(state.rates())>;
  state.rates().check_run(steps);
  { state.rates().planned() } -> std::convertible_to<bool>;
  { state.rates().follows_run() } -> std::convertible_to<bool>;
  state.rates().plan(steps);
  { state.rates().of(std::size_t{0}) } -> std::convertible_to<at::Tensor>;
  state.rates().scale(1.0);
}
&&(!R::host_stepped || requires {
  { R::may_synchronize } -> std::convertible_to<bool>;  // may step() wait for the device?
});

}  // namespace v0_1
}  // namespace treadle
