// SPDX-License-Identifier: Apache-2.0
// The steps of treadle_step.cpp by hand, on the same ATen calls: the indirect calls that these objects hold are the
// ones that ATen's own headers bring, and the only ones that Treadle's may hold.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <vector>

#include "dispatch/step.hpp"

struct HandState {
  std::vector<at::Tensor> parameters, weights, exp_avg, exp_avg_sq, steps, gradients, average;
  at::Tensor step, learning_rate, scale, tracker, found_inf, one, table, position, skipped, quarter, sum;
  std::optional<at::Tensor> none;
  int filled = 0;
};

/// What a careful loop asks of a batch and a loss. Each question is an inline function of LibTorch that answers itself
/// but for subclasses of tensors, whose answer is a virtual call.
bool hand_checks(const at::Tensor& data, const at::Tensor& target, const at::Tensor& loss, at::Device device) {
  const bool lengths = data.dim() > 0 && data.size(0) == target.size(0) && data.sizes()[0] == target.numel();
  return lengths && data.device() == device && loss.dim() == 0 && loss.scalar_type() == at::kFloat &&
         loss.requires_grad() && loss.options().device() == device;
}

/// A table of learning rates on the device.
void hand_plan(HandState& state, std::vector<float>& rates) {
  const auto host = at::from_blob(rates.data(), {static_cast<std::int64_t>(rates.size()), 1}, at::kFloat);
  state.table = host.to(state.step.device(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor hand_step_with_defaults(DispatchNet& net, HandState& state, const at::Tensor& data,
                                   const at::Tensor& target) {
  const auto loss = at::cross_entropy_loss(net.forward(data), target);
  loss.backward();
  state.gradients.clear();
  for (const auto& p : state.parameters) state.gradients.push_back(p.grad());
  const at::NoGradGuard no_grad;
  state.step.add_(1);
  at::_fused_adamw_(state.weights, state.gradients, state.exp_avg, state.exp_avg_sq, {}, state.steps,
                    state.learning_rate, 0.9, 0.999, 1e-2, 1e-8, false, false, state.none, state.none);
  for (const auto& p : state.parameters) p.mutable_grad().reset();
  return at::Tensor(loss.tensor_data());
}

std::optional<at::Tensor> hand_step_with_everything(DispatchNet& net, HandState& state, const at::Tensor& data,
                                                    const at::Tensor& target) {
  at::Tensor loss;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  loss = at::cross_entropy_loss(net.forward(data), target);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  loss.backward(state.scale);
  at::Tensor plain(loss.tensor_data());
  state.sum = state.sum.defined() ? at::add(state.sum, plain) : plain;
  if (++state.filled < 4) return std::nullopt;
  state.filled = 0;
  const at::NoGradGuard no_grad;
  state.gradients.clear();
  for (const auto& p : state.parameters) state.gradients.push_back(p.grad());
  auto divisor = at::mul(state.scale, state.quarter);
  const auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(state.gradients, 2, at::kFloat)));
  state.found_inf.zero_();
  at::_amp_foreach_non_finite_check_and_unscale_(norm, state.found_inf, state.one);
  divisor = at::add(at::div(norm, divisor), 1e-6).div_(1.0).clamp_min_(1.0).mul_(divisor);
  const auto applied = state.found_inf.eq(0);
  state.skipped.add_(state.found_inf.to(at::kLong));
  at::index_select_out(state.learning_rate, state.table, 0, at::clamp_max(state.position, 9));
  state.step.add_(applied);
  at::_fused_adamw_(state.weights, state.gradients, state.exp_avg, state.exp_avg_sq, {}, state.steps,
                    state.learning_rate, 0.9, 0.999, 1e-2, 1e-8, false, false, divisor, state.found_inf);
  state.position.add_(applied);
  at::_amp_update_scale_(state.scale, state.tracker, state.found_inf, 2.0, 0.5, 2000);
  at::_fused_sgd_(state.average, state.weights, {}, 1.0, 0.0, 0.001, 0.0, false, true, false, {}, state.found_inf);
  for (const auto& p : state.parameters) p.mutable_grad().reset();
  return at::mul(state.sum, 0.25);
}
