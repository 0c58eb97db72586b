// SPDX-License-Identifier: Apache-2.0
// What an accumulation policy offers, in the order in which a step calls it. `no_accumulation.hpp` is the worked
// example.
#pragma once

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"

namespace treadle {
inline namespace v0_1 {

/// An accumulation policy: option values, facts, `check()`, and a `State` that owns the window.
///
/// `feed(batch, ends, micro_batch)` calls `micro_batch(part, closes)` for each micro-batch, in order, with `closes`
/// true exactly for the one that ends a step; `ends` says that the epoch has no further batch. What the compiler cannot
/// check: an open window closes when `ends` is true; `reset()` forgets an open window; each row is fed exactly once;
/// `drop_tail()` says the same throughout a run.
template <class P>
concept accumulation_policy = policy_of<P, axis::Accumulation> &&
    requires(const P policy, typename P::State state, const Batch& batch) {
  { P::windows } -> std::convertible_to<bool>;     // may a step have several micro-batches?
  { P::slices } -> std::convertible_to<bool>;      // does it need slice_rows?
  { P::drops_tail } -> std::convertible_to<bool>;  // does State have drop_tail()?
  policy.check();
  {typename P::State(policy)};
  state.feed(batch, true, [](const Batch&, bool) {});
  { state.open() } -> std::convertible_to<bool>;
  state.reset();
  { state.batches_per_step() } -> std::integral;
} &&(!P::drops_tail || requires(typename P::State state) {
  { state.drop_tail() } -> std::convertible_to<bool>;
});

}  // namespace v0_1
}  // namespace treadle
