// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <mutex>
#include <set>

#include "treadle/batch.hpp"
#include "treadle/parallelism/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

namespace detail {
/// Notes the rows that it is given.
struct StagesProbe {
  std::mutex& mutex;
  std::multiset<std::int64_t>& seen;
  std::size_t& forwards;
  std::size_t& backwards;

  template <class Context>
  Loss forward(int&, const Batch& part, Context&) const {
    const std::lock_guard lock(mutex);
    for (std::int64_t i = 0; i < part.data.size(0); ++i)
      seen.insert(part.data[i].item<std::int64_t>());  // sync: a check looks
    ++forwards;
    return Loss::mean(part.data.to(at::kFloat).mean(), part.data.size(0));
  }
  treadle::detail::Weight weigh(const Loss&, const Batch&) const { return {1.0, true}; }
  void skip() const {}
  at::Tensor share() const { return at::zeros({3}, at::kDouble); }
  void backward(const at::Tensor&, treadle::detail::Weight) const {
    const std::lock_guard lock(mutex);
    ++backwards;
  }
  treadle::detail::Root root(const at::Tensor& value, treadle::detail::Weight) const {
    const std::lock_guard lock(mutex);
    ++backwards;
    return {value, at::ones_like(value)};
  }
};
}  // namespace detail

/// Checks at run time what `parallelism_policy` promises and can be seen on one rank with a model that has no
/// parameters of its own; one sentence a broken promise. Whether gradients are reduced shows only in a real run.
template <parallelism_policy P>
Violations check_parallelism_contract(const P& policy = {}) {
  Report report("parallelism");
  policy.check();
  typename P::State state(policy);
  const at::Device device = state.device();
  report.require(device.is_cpu() || device.has_index(), "device() must name a device with its index.");
  report.require(state.world_size() >= 1 && state.rank() >= 0 && state.rank() < state.world_size(),
                 "rank() must lie in [0, world_size()).");
  auto parameters = detail::probe_parameters(device);
  auto buffers = detail::probe_buffers(device);
  int model = 0;
  state.prepare(model, parameters, buffers);
  report.require(state.agree(2.5) == 2.5, "agree() must return the number that all ranks gave.");
  for (const bool reduces : {false, true}) {
    const auto numbers = at::arange(0, 6, at::TensorOptions().device(device).dtype(at::kLong));
    std::mutex mutex;  // a policy may run its replicas in threads
    std::size_t forward = 0;
    std::multiset<std::int64_t> seen;
    std::size_t backward = 0;
    state.begin_window();
    state.run(model, Batch{numbers, numbers}, reduces, model, detail::StagesProbe{mutex, seen, forward, backward});
    report.require(seen == std::multiset<std::int64_t>{0, 1, 2, 3, 4, 5},
                   "run() must pass on each row of its batch exactly once.");
    report.require(forward == backward, "run() must call backward() once for each forward() that counts something.");
  }
  treadle::detail::Window<true> window(device);
  report.require_no_throw([&] { state.finish_reduction(window); }, "finish_reduction() must end a step");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
