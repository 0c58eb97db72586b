// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "treadle/batch.hpp"
#include "treadle/execution/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

/// Checks at run time what `execution_policy` promises and the compiler cannot see; one sentence a broken promise.
///
/// What micro-batches and updates do is seen on device tensors only, so that a policy may capture and replay them.
template <execution_policy P>
Violations check_execution_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("execution");
  policy.check();
  typename P::State state(policy);
  const auto options = at::TensorOptions().device(device).dtype(at::kDouble);
  const auto sum = at::zeros({1}, options);  // order-sensitive: 10 x sum + value
  const auto updates = at::zeros({1}, options);
  const auto at_update = at::zeros({1}, options);
  const auto feed = [&](double value, bool closes) {
    const auto data = at::full({1}, value, options);
    state.run(
        Batch{data, data}, closes, [&](const Batch& batch, bool) { sum.mul_(10).add_(batch.data); },
        [&] {
          updates.add_(1);
          at_update.copy_(sum);
          sum.zero_();
        });
  };
  double steps = 0;
  const auto window = [&](const std::vector<double>& values) {
    double expected = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      feed(values[i], i + 1 == values.size());
      expected = 10 * expected + values[i];
    }
    ++steps;
    report.require(updates.template item<double>() == steps,
                   "update must have run exactly once by the time that run() with `closes` returns.");
    report.require(at_update.template item<double>() == expected,
                   "each micro-batch of a window must have had its effect, in order and once, before the update.");
  };
  for (int repeat = 0; repeat < 15; ++repeat) {
    window({1, 2, 3});
    window({4, 5, 6});
  }
  feed(7, false);
  state.reset();
  sum.zero_();
  window({8, 9, 1});
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
