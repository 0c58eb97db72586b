// SPDX-License-Identifier: Apache-2.0
// What a parallelism policy offers, in the order in which a step calls it. `single_device.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// A parallelism policy: option values, facts, `check()`, and a `State` that knows the devices.
///
/// What the compiler cannot check: `run()` holds any sync guard over forward *and* backward and reduces only when
/// asked; after `finish_reduction()` every rank holds the mean over ranks of the gradients; `agree()` returns rank 0's
/// value on every rank.
template <class P>
concept parallelism_policy = policy_of<P, axis::Parallelism> &&
    requires(const P policy, typename P::State state, int& model, const Batch& batch, ParameterList& parameters,
             BufferList& buffers) {
  { P::replicates } -> std::convertible_to<bool>;    // more than one copy of the model?
  { P::slices } -> std::convertible_to<bool>;        // does it need slice_rows?
  { P::threads } -> std::convertible_to<bool>;       // one process, a thread a device?
  { P::finds_unused } -> std::convertible_to<bool>;  // does the set of used parameters vary?
  policy.check();
  {typename P::State(policy)};
  { state.device() } -> std::convertible_to<at::Device>;
  { state.rank() } -> std::integral;
  { state.world_size() } -> std::integral;
  state.prepare(model, parameters, buffers);
  { state.agree(1.0) } -> std::convertible_to<double>;
  state.run(model, batch, true, [](int&, const Batch&) {});
  state.finish_reduction();
};

}  // namespace v0_1
}  // namespace treadle
