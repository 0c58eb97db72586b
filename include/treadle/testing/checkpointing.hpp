// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <string>
#include <vector>

#include "treadle/checkpointing/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// Three blocks with dropout one after the other, then their gradients and the next random numbers.
template <class Call>
std::vector<at::Tensor> through_blocks(bool input_needs_gradient, at::Device device, Call&& call) {
  at::manual_seed(11);
  const auto options = at::TensorOptions().device(device);
  auto x = at::randn({4, 6}, options).set_requires_grad(input_needs_gradient);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) weights.push_back(at::randn({6, 6}, options).set_requires_grad(true));
  at::Tensor y = x;
  for (const auto& w : weights)
    y = call([w](const at::Tensor& z) { return at::dropout(z.matmul(w).tanh(), 0.5, true); }, y);
  y.square().sum().backward();
  std::vector<at::Tensor> seen{y.detach()};
  if (input_needs_gradient) seen.push_back(x.grad());
  for (const auto& w : weights) seen.push_back(w.grad());
  seen.push_back(at::rand({4}, options));
  seen.push_back(at::rand({4}));
  return seen;
}

}  // namespace detail

/// Checks at run time what `checkpointing_policy` promises and the compiler cannot see: outputs, gradients and
/// generators bitwise those of the plain run; one sentence a broken promise. Seeds the default generators.
template <checkpointing_policy P>
Violations check_checkpointing_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("checkpointing");
  policy.check();
  typename P::State state(policy);
  int no_model = 0;
  state.attach(no_model, device, BufferList{});
  const auto plain_call = [](auto&& block, const at::Tensor& x) { return block(x); };
  for (const bool input_needs_gradient : {true, false}) {
    const auto plain = detail::through_blocks(input_needs_gradient, device, plain_call);
    const auto compare = [&](const char* how, auto&& call) {
      for (int step = 0; step < 2; ++step) {
        std::vector<at::Tensor> got;
        state.begin_step();
        report.require_no_throw([&] { got = detail::through_blocks(input_needs_gradient, device, call); },
                                std::string("a step with ") + how + " must run");
        state.end_step();
        if (got.empty()) return;
        const auto gradients_of = [](const std::vector<at::Tensor>& all) {
          return std::vector<at::Tensor>(all.begin(), all.end() - 2);
        };
        report.require(detail::same_bits(gradients_of(got), gradients_of(plain)),
                       std::string("outputs and gradients of a step with ") + how + " must be those of the plain run" +
                           (input_needs_gradient ? "." : ", also where the input needs no gradient."));
        report.require(detail::same_bits(got[got.size() - 1], plain[plain.size() - 1]) &&
                           detail::same_bits(got[got.size() - 2], plain[plain.size() - 2]),
                       std::string("generators must end a step with ") + how + " as they end the plain run.");
      }
    };
    compare("checkpoint(block, x)", [&](auto&& block, const at::Tensor& x) { return at::Tensor(state(block, x)); });
    compare("checkpoint.cheap(name, f, x)",
            [&](auto&& block, const at::Tensor& x) { return at::Tensor(state.cheap("region", block, x)); });
  }
  const at::NoGradGuard no_grad;
  const auto x = at::randn({3}, at::TensorOptions().device(device));
  report.require(detail::same_bits(at::Tensor(state([](const at::Tensor& z) { return z * 2; }, x)), x * 2),
                 "under no-grad, as in evaluation, a block must give its plain output.");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
