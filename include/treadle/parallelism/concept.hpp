// SPDX-License-Identifier: Apache-2.0
// What a parallelism policy offers, in the order in which a step calls it. `single_device.hpp` is the worked example.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/loss.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/runtime/window.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {
/// The calls of a trainer's stages, for the concept alone.
struct StagesArchetype {
  template <class Model, class B, class Context>
  Loss forward(Model&, const B&, Context&) const;
  template <class B>
  Weight weigh(const Loss&, const B&) const;
  void skip() const;
  at::Tensor share() const;
  void backward(const at::Tensor&, Weight) const;
  Root root(const at::Tensor&, Weight) const;
};
}  // namespace detail

/// A parallelism policy: option values, facts, `check()`, and a `State` that knows the devices.
///
/// `run` calls, for a micro-batch or each of its shards, `forward`, then `skip` if that counts nothing, else `weigh`
/// and `backward`, or `root` and a backward pass from there. What the compiler cannot check: `run()` holds any sync
/// guard over forward *and* backward and reduces only when asked; after `finish_reduction()` every rank holds the mean
/// over ranks of the gradients and the window the sum of all shares; `agree()` returns the largest number on every
/// rank, or throws where they name different things; a rank that counts nothing takes part in every reduction.
template <class P>
concept parallelism_policy = policy_of<P, axis::Parallelism> &&
    requires(const P policy, typename P::State state, int& model, const Batch& batch, ParameterList& parameters,
             BufferList& buffers, detail::Window<true>& window, const detail::StagesArchetype& stages) {
  { P::replicates } -> std::convertible_to<bool>;  // more than one copy of the model?
  { P::slices } -> std::convertible_to<bool>;      // does it need slice_rows?
  { P::processes } -> std::convertible_to<bool>;   // one of several processes? see RanksInStep for what more State has
  { P::threads } -> std::convertible_to<bool>;     // one process, a thread a device?
  { P::finds_unused } -> std::convertible_to<bool>;  // does the set of used parameters vary?
  policy.check();
  {typename P::State(policy)};
  { state.device() } -> std::convertible_to<at::Device>;
  { state.rank() } -> std::integral;
  { state.world_size() } -> std::integral;
  state.prepare(model, parameters, buffers);
  state.begin_window();
  { state.agree(1.0, "what for") } -> std::convertible_to<double>;
  state.run(model, batch, true, model, stages);
  state.finish_reduction(window);
  state.reset();
  state.report();
  state.abandon(stages);
};

}  // namespace v0_1
}  // namespace treadle
