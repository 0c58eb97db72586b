// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <string>
#include <vector>

#include "treadle/checkpointing/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// Three blocks with dropout one after the other, each of which counts its calls and keeps a running mean in `buffers`;
/// then their gradients, the buffers and the next random numbers. `forward(blocks)` calls `blocks(call)` for the loss,
/// where `call(i, block, x)` is how block number i is called.
template <class Forward>
std::vector<at::Tensor> through_blocks(bool input_needs_gradient, at::Device device, const BufferList& buffers,
                                       Forward&& forward) {
  at::manual_seed(11);
  for (const auto& buffer : buffers) buffer.tensor.zero_();
  const auto options = at::TensorOptions().device(device);
  auto x = at::randn({4, 6}, options).set_requires_grad(input_needs_gradient);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) weights.push_back(at::randn({6, 6}, options).set_requires_grad(true));
  at::Tensor y = forward([&](auto&& call) {
    at::Tensor z = x;
    for (int i = 0; i < 3; ++i)
      z = call(
          i,
          [w = weights[static_cast<std::size_t>(i)], count = buffers[0].tensor,
           mean = buffers[1].tensor](const at::Tensor& in) {
            auto scaled = in.matmul(w).tanh() * (count + 1);
            count.add_(1);
            mean.mul_(0.9).add_(scaled.detach().mean(0), 0.1);
            return at::dropout(scaled, 0.5, true);
          },
          z);
    return z;
  });
  y.square().sum().backward();
  std::vector<at::Tensor> seen{y.detach()};
  if (input_needs_gradient) seen.push_back(x.grad());
  for (const auto& w : weights) seen.push_back(w.grad());
  for (const auto& buffer : buffers) seen.push_back(buffer.tensor.clone());
  seen.push_back(at::rand({4}, options));
  seen.push_back(at::rand({4}));
  return seen;
}

}  // namespace detail

/// Checks at run time what `checkpointing_policy` promises and the compiler cannot see: outputs, gradients, buffers
/// and generators bitwise those of the plain run; one sentence a broken promise. Seeds the default generators.
template <checkpointing_policy P>
Violations check_checkpointing_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("checkpointing");
  policy.check();
  typename P::State state(policy);
  int no_model = 0;
  const auto zeros = [&](std::int64_t n) { return at::zeros({n}, at::TensorOptions().device(device)); };
  const BufferList buffers{{"count", zeros(1)}, {"mean", zeros(6)}};
  state.attach(no_model, device, buffers);
  const auto plain_call = [](int, auto&& block, const at::Tensor& x) { return block(x); };
  for (const bool input_needs_gradient : {true, false}) {
    const auto plain = detail::through_blocks(input_needs_gradient, device, buffers,
                                              [&](auto&& blocks) { return blocks(plain_call); });
    const auto compare = [&](const char* how, auto&& call) {
      for (int step = 0; step < 2; ++step) {
        std::vector<at::Tensor> got;
        state.begin_step();
        // As in a step: the forward pass within `pass`, the backward pass after it.
        const auto forward = [&](auto&& blocks) {
          [[maybe_unused]] const auto scope = state.pass(no_model);
          return blocks(call);
        };
        report.require_no_throw([&] { got = detail::through_blocks(input_needs_gradient, device, buffers, forward); },
                                std::string("a step through ") + how + " must run");
        state.end_step();
        if (got.empty()) return;
        const auto gradients_of = [](const std::vector<at::Tensor>& all) {
          return std::vector<at::Tensor>(all.begin(), all.end() - 2);
        };
        report.require(detail::same_bits(gradients_of(got), gradients_of(plain)),
                       std::string("outputs, gradients and buffers of a step through ") + how +
                           " must be those of the plain run" +
                           (input_needs_gradient ? "." : ", also where the input needs no gradient."));
        report.require(detail::same_bits(got[got.size() - 1], plain[plain.size() - 1]) &&
                           detail::same_bits(got[got.size() - 2], plain[plain.size() - 2]),
                       std::string("generators must end a step through ") + how + " as they end the plain run.");
      }
    };
    const auto in_turn = [&](int cheap) {
      return [&state, cheap](int i, auto&& block, const at::Tensor& x) {
        return i % 2 == cheap ? at::Tensor(state.cheap("region", block, x)) : at::Tensor(state(block, x));
      };
    };
    compare("a block, a cheap region and a block", in_turn(1));
    compare("a cheap region, a block and a cheap region", in_turn(0));
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
