// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <cstdint>
#include <mutex>
#include <set>

#include "treadle/batch.hpp"
#include "treadle/parallelism/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

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
  if (state.rank() == 0) report.require(state.agree(2.5) == 2.5, "agree() must return rank 0's value.");
  for (const bool reduces : {false, true}) {
    const auto numbers = at::arange(0, 6, at::TensorOptions().device(device).dtype(at::kLong));
    std::mutex mutex;  // a policy may run its replicas in threads
    std::multiset<std::int64_t> seen;
    state.run(model, Batch{numbers, numbers}, reduces, [&](int&, const Batch& part) {
      const std::lock_guard lock(mutex);
      for (std::int64_t i = 0; i < part.data.size(0); ++i) seen.insert(part.data[i].template item<std::int64_t>());
    });
    report.require(seen == std::multiset<std::int64_t>{0, 1, 2, 3, 4, 5},
                   "run() must pass on each row of its batch exactly once.");
  }
  report.require_no_throw([&] { state.finish_reduction(); }, "finish_reduction() must end a step");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
