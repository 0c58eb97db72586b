// SPDX-License-Identifier: Apache-2.0
// What an averaging policy offers, in the order in which a step calls it. `no_averaging.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// An averaging policy: option values, one fact, `check()`, and a `State`.
///
/// What the compiler cannot check:
///  - `update(found_inf)` is called after every step. Null means that no step can be skipped; where it is 1 the average
///    stays bitwise as it was, even if a weight is NaN.
///  - `use_average()` writes the average into the weights (`master`), `use_weights()` restores them bitwise; both keep
///    every address and leave the average alone.
///  - The two nest, because an evaluation may run within an evaluation: only the outermost pair writes. `use_weights()`
///    without `use_average()` does nothing.
///  - The list of parameters holds frozen ones (without `requires_grad()`) as well, which must stay bitwise as they
///  are.
///  - `for_each_state` visits each average under the name of its parameter and in its shape; under other names it may
///    visit more that is to be saved, such as a counter.
template <class P>
concept averaging_policy = policy_of<P, axis::Averaging> &&
    requires(const P policy, typename P::State state, const ParameterList& parameters, const at::Tensor* found_inf) {
  { P::averages } -> std::convertible_to<bool>;
  policy.check();
  {typename P::State(policy, parameters)};
  state.update(found_inf);
  state.use_average();
  state.use_weights();
  state.for_each_state([](const std::string&, at::Tensor&) {});
};

}  // namespace v0_1
}  // namespace treadle
