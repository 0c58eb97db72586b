// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "treadle/optim/concept.hpp"
#include "treadle/precision/fp32.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// One rule over probe parameters, fed with gradients from outside.
template <class R>
class RuleProbe {
 public:
  RuleProbe(const R& rule, at::Device device)
      : device_(device),
        parameters_(seeded(device)),
        precision_(precision::Fp32{}, parameters_, buffers_, false),
        state_(rule, parameters_) {}

  /// One step with `size` times the same gradients each time. `divisor` and `found_inf` below 0 are null.
  void step(double size, double divisor, float found_inf) {
    const auto options = at::TensorOptions().device(device_).dtype(at::kFloat);
    const auto d = at::full({}, divisor, options);
    const auto f = at::full({}, found_inf, options);
    const auto applied = f.eq(0).to(at::kLong);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& p = parameters_[i].model;
      if (p.requires_grad() && parameters_[i].name != "linear.bias") p.mutable_grad() = pattern(p) * size;
    }
    state_.collect(precision_);
    state_.step(divisor < 0 ? nullptr : &d, found_inf < 0 ? nullptr : &f, found_inf < 0 ? nullptr : &applied);
    state_.release();
  }
  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> tensors;
    for (const auto& p : parameters_) tensors.push_back(p.master.detach().clone());
    return tensors;
  }
  /// The rule's state without the learning rates of the step under way, which are looked up before its verdict.
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> tensors;
    state_.for_each_state([&](const auto& name, at::Tensor& tensor) {
      if (std::string(name) != "learning_rates") tensors.push_back(tensor.clone());
    });
    return tensors;
  }
  std::vector<std::string> without_gradient() const { return state_.without_gradient(); }
  auto& rates() { return state_.rates(); }
  double rate() { return at::Tensor(state_.rates().of(0)).template item<double>(); }
  bool released() const {
    for (const auto& p : parameters_)
      if (p.model.grad().defined()) return false;
    return true;
  }

 private:
  static at::Tensor pattern(const at::Tensor& like) { return like.detach().sin().add_(0.25); }
  static ParameterList seeded(at::Device device) {
    auto parameters = probe_parameters(device);
    for (const auto& p : parameters)
      for (std::int64_t i = 0; i < p.model.numel(); ++i)
        p.model.detach().view({-1})[i] = 0.1 * static_cast<double>(i + 1);
    return parameters;
  }

  at::Device device_;
  ParameterList parameters_;
  BufferList buffers_;
  precision::Fp32::State precision_;
  typename R::State state_;
};

inline bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, double tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!close(a[i], b[i], tolerance)) return false;
  return a.size() == b.size();
}

template <class R>
void check_rates(const R& rule, at::Device device, Report& report) {
  RuleProbe<R> probe(rule, device);
  probe.rates().plan(1000);
  report.require(probe.rates().planned(), "rates().planned() must be true after rates().plan().");
  report.require(at::Tensor(probe.rates().of(0)).numel() == 1, "rates().of(0) must be one number.");
  const double before = probe.rate();
  probe.rates().scale(0.5);
  report.require(probe.rate() == 0.5 * before, "rates().scale() must multiply the rates at once.");
  probe.rates().scale(0);
  const auto start = probe.weights();
  for (int i = 0; i < 2; ++i) probe.step(1.0, -1, -1);
  report.require(probe.rate() == 0 && same_bits(probe.weights(), start),
                 "rates().scale() must hold for the steps that follow.");
}

}  // namespace detail

/// Checks at run time what `update_rule` promises and the compiler cannot see; one sentence a broken promise.
template <update_rule R>
Violations check_rule_contract(const R& rule = {}, at::Device device = at::kCPU) {
  Report report("rule");
  rule.check();
  detail::RuleProbe<R> plain(rule, device);
  detail::RuleProbe<R> divided(rule, device);
  detail::RuleProbe<R> skipping(rule, device);
  const auto start = plain.weights();

  skipping.step(std::numeric_limits<double>::quiet_NaN(), 4.0, 1);
  report.require(detail::same_bits(skipping.weights(), start),
                 "a first step with found_inf 1 must leave the weights as they are, even if gradients are NaN.");
  for (int i = 0; i < 3; ++i) {
    plain.step(1.0, -1, -1);
    divided.step(4.0, 4.0, -1);
    skipping.step(1.0, -1, 0);
    const auto weights = skipping.weights();
    const auto state = skipping.state();
    skipping.step(std::numeric_limits<double>::quiet_NaN(), 4.0, 1);
    report.require(detail::same_bits(skipping.weights(), weights) && detail::same_bits(skipping.state(), state),
                   "a step with found_inf 1 must leave weights and state bitwise as they are.");
    report.require(detail::close(divided.weights(), plain.weights(), 1e-5),
                   "a step must be that of the gradients over the divisor.");
    report.require(detail::close(skipping.weights(), plain.weights(), 1e-5),
                   "after skipped steps, the first one included, a step must be what it would have been without them.");
  }
  report.require(!detail::same_bits(plain.weights(), start), "a step must move the weights.");
  report.require(plain.without_gradient() == std::vector<std::string>{"linear.bias"},
                 "without_gradient() must name the trained parameters that have got no gradient.");
  detail::check_rates(rule, device, report);
  report.require(plain.released(), "release() must let go of every gradient.");
  report.require(detail::same_bits(plain.weights()[2], start[2]), "a frozen parameter must be left alone.");
  report.require(detail::same_bits(plain.weights()[1], start[1]), "a parameter without a gradient must be left alone.");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
