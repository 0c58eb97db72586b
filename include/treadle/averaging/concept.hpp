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
/// What the compiler cannot check: `update(found_inf)` leaves the average bitwise alone where `found_inf` is 1, even if
/// a weight is NaN; `use_weights()` after `use_average()` restores every weight bitwise, and both keep every address.
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
