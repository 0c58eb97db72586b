// SPDX-License-Identifier: Apache-2.0
// What an execution policy offers. `eager.hpp` is the worked example.
#pragma once

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"

namespace treadle {
inline namespace v0_1 {

/// An execution policy: option values, one fact, `check()`, and a `State` that runs a window.
///
/// `run(batch, closes, micro_batch, update)` is called for each micro-batch; what the compiler cannot check: by the
/// time `run` with `closes` returns, `micro_batch` has had its effect for each batch of the window in order, and
/// `update` once.
template <class P>
concept execution_policy = policy_of<P, axis::Execution> &&
    requires(const P policy, typename P::State state, const Batch& batch) {
  { P::captures } -> std::convertible_to<bool>;  // does host code run only once, while a graph is captured?
  policy.check();
  {typename P::State(policy)};
  state.run(
      batch, true, [](const Batch&, bool) {}, [] {});
  state.reset();
};

}  // namespace v0_1
}  // namespace treadle
