// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <vector>

#include "treadle/clipping/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// Clips copies of `gradients` and returns what a rule would see.
template <class P>
std::vector<at::Tensor> clipped(typename P::State& state, const std::vector<at::Tensor>& gradients,
                                const at::Tensor* divisor, Report& report) {
  auto mine = copies(gradients);
  const auto divisor_before = divisor ? divisor->clone() : at::Tensor();
  if constexpr (P::measures_norm) state.measure(at::TensorList(mine));
  const at::Tensor* rest = state.clip(at::TensorList(mine), divisor);
  report.require(P::rewrites || same_bits(mine, copies(gradients)),
                 "rewrites is false, so clip() must not write into the gradients.");
  if (divisor)
    report.require(same_bits(*divisor, divisor_before),
                   "clip() must not write into its divisor, which may be the loss scale itself.");
  report.require(!rest || (rest->numel() == 1 && rest->scalar_type() == at::kFloat),
                 "clip() must return null or one fp32 number.");
  if (rest)
    for (auto& gradient : mine) gradient = gradient / *rest;
  return mine;
}

}  // namespace detail

/// Checks at run time what `clipping_policy` promises and the compiler cannot see; one sentence a broken promise.
template <clipping_policy P>
Violations check_clipping_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("clipping");
  policy.check();
  typename P::State state(policy, device);
  const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
  const auto four = at::full({}, 4.0, options);
  for (const double size : {1e-3, 1.0, 1e3}) {
    const std::vector<at::Tensor> gradients{at::randn({3, 4}, options) * size, at::randn({5}, options) * size};
    const std::vector<at::Tensor> scaled{gradients[0] * 4, gradients[1] * 4};
    const auto plain = detail::clipped<P>(state, gradients, nullptr, report);
    [[maybe_unused]] at::Tensor norm;
    if constexpr (P::measures_norm) norm = state.norm();
    const auto divided = detail::clipped<P>(state, scaled, &four, report);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      report.require(detail::close(plain[i] / size, divided[i] / size, 1e-5),
                     "clip(gradients, divisor) must give what clip(gradients / divisor, null) gives.");
      report.require(plain[i].abs().le(gradients[i].abs() * (1 + 1e-5)).all().template item<bool>() &&
                         plain[i].mul(gradients[i]).ge(0).all().template item<bool>(),
                     "a clipped gradient must be no longer than the gradient and point the same way.");
    }
    if constexpr (P::measures_norm) {
      const double by_hand = std::sqrt(gradients[0].square().sum().template item<double>() +
                                       gradients[1].square().sum().template item<double>());
      report.require(std::abs(norm.template item<double>() / by_hand - 1) < 1e-4 &&
                         std::abs(state.norm().template item<double>() / by_hand - 1) < 1e-4,
                     "norm() must be the norm of the true gradient before clipping, in a tensor that no later step "
                     "changes.");
    }
  }
  std::vector<at::Tensor> bad{at::randn({3, 4}, options), at::randn({5}, options)};
  bad[0][1][2] = std::numeric_limits<double>::quiet_NaN();
  report.require(detail::clipped<P>(state, bad, nullptr, report)[0][1][2].isnan().template item<bool>() &&
                     detail::clipped<P>(state, bad, &four, report)[0][1][2].isnan().template item<bool>(),
                 "a NaN in a gradient must stay NaN.");
  const auto nothing = detail::clipped<P>(state, {at::zeros({3}, options)}, &four, report);
  report.require(nothing[0].eq(0).all().template item<bool>(), "a gradient of zeros must stay one.");
  report.require_no_throw([&] { detail::clipped<P>(state, {}, nullptr, report); },
                          "a step without any gradient must be let through");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
