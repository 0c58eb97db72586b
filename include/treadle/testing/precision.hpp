// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>

#include <limits>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/precision/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// The process-wide and thread-local switches that a precision may touch.
struct PrecisionSwitches {
  explicit PrecisionSwitches(at::DeviceType device)
      : matmul(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)),
        conv(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV)),
        rnn(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN)),
        autocast(at::autocast::is_autocast_enabled(device)),
        dtype(at::autocast::get_autocast_dtype(device)),
        cache(at::autocast::is_autocast_cache_enabled()),
        nesting(at::autocast::increment_nesting()) {
    at::autocast::decrement_nesting();
  }
  bool operator==(const PrecisionSwitches&) const = default;
  at::Float32Precision matmul;
  at::Float32Precision conv;
  at::Float32Precision rnn;
  bool autocast;
  at::ScalarType dtype;
  bool cache;
  int nesting;
};

template <class State>
void check_precision_guards(State& state, at::Device device, Report& report) {
  const PrecisionSwitches outside(device.type());
  {
    [[maybe_unused]] const auto math = state.math();
    [[maybe_unused]] const auto cast = state.autocast();
  }
  report.require(PrecisionSwitches(device.type()) == outside,
                 "math() and autocast() must return guards that restore every switch when they end.");
  try {
    [[maybe_unused]] const auto math = state.math();
    [[maybe_unused]] const auto cast = state.autocast();
    throw std::runtime_error("unwinding");
  } catch (const std::runtime_error&) {
  }
  report.require(PrecisionSwitches(device.type()) == outside,
                 "the guards of math() and autocast() must restore every switch after a throw, too.");

  at::autocast::set_autocast_enabled(device.type(), true);
  const PrecisionSwitches region(device.type());
  bool off = false;
  {
    [[maybe_unused]] const auto math = state.math();
    off = !at::autocast::is_autocast_enabled(device.type());
  }
  const bool restored = PrecisionSwitches(device.type()) == region;
  at::autocast::set_autocast_enabled(device.type(), outside.autocast);
  report.require(off, "math() must turn off the autocast region that a caller stands in.");
  report.require(restored, "math() must put the autocast region that a caller stands in back as it was.");
}

template <class P>
void check_precision_parameters(typename P::State& state, ParameterList& parameters,
                                const std::vector<at::Tensor>& before, Report& report) {
  std::vector<at::Tensor> gradients;
  std::vector<const Parameter*> owners;
  std::size_t i = 0;
  for (const auto& p : parameters) {
    const auto& start = before[i++];
    report.require(p.master.defined() && p.master.sizes() == start.sizes() && p.model.sizes() == start.sizes(),
                   "State's constructor must leave model and master of every parameter in its shape.");
    if (!p.master.defined()) return;
    report.require(close(p.master, start, 1e-2) && close(p.model, start, 1e-2),
                   "State's constructor may convert parameters, and must not change what they are.");
    report.require(P::master_weights || p.master.is_same(p.model),
                   "master_weights is false, so every master must be the model's own tensor.");
    if (!p.model.requires_grad()) continue;
    gradients.push_back(at::randn(p.model.sizes(), p.model.options().requires_grad(false)));
    owners.push_back(&p);
  }
  report.require(owners.size() == 3, "State's constructor must leave requires_grad of every parameter alone.");
  if (owners.size() != 3) return;

  gradients[0].view({-1})[0] = std::numeric_limits<double>::quiet_NaN();
  const auto raw = copies(gradients);
  state.gradients(std::span<at::Tensor>(gradients));
  for (std::size_t k = 0; k < gradients.size(); ++k)
    report.require(gradients[k].scalar_type() == owners[k]->master.scalar_type() &&
                       same_bits(gradients[k], raw[k].to(owners[k]->master.scalar_type())),
                   "gradients() must leave every gradient as it is, NaN included, in its master's dtype.");

  const at::NoGradGuard no_grad;
  std::vector<const void*> places;
  for (const auto* p : owners) {
    p->master.detach().add_(0.123456789);
    places.push_back(p->model.const_data_ptr());
  }
  state.publish();
  std::vector<at::Tensor> published;
  for (std::size_t k = 0; k < owners.size(); ++k) {
    const auto& p = *owners[k];
    report.require(same_bits(p.model.detach(), p.master.detach().to(p.model.scalar_type())),
                   "publish() must write every master into its weight.");
    report.require(p.model.const_data_ptr() == places[k], "publish() must keep every weight at its address.");
    published.push_back(p.model.detach().clone());
  }
  state.publish();
  for (std::size_t k = 0; k < owners.size(); ++k)
    report.require(same_bits(owners[k]->model.detach(), published[k]),
                   "publish() must do the same when it is called twice.");
}

template <class P>
void check_precision_inputs(typename P::State& state, at::Device device, Report& report) {
  const Batch given{at::randn({3, 2}, at::TensorOptions().device(device)),
                    at::full({3}, 1, at::TensorOptions().device(device).dtype(at::kLong))};
  Batch batch = given;
  state.cast_inputs(batch);
  report.require(batch.target.is_same(given.target), "cast_inputs() must leave integer tensors alone.");
  report.require(close(batch.data, given.data, 1e-2), "cast_inputs() must keep what its tensors hold.");
  report.require(P::casts_inputs || batch.data.is_same(given.data),
                 "casts_inputs is false, so cast_inputs() must leave a batch alone.");
}

template <class State>
void check_loss_scale(State& state, at::Device device, Report& report) {
  const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
  const auto good = at::full({}, 0.0, options);
  const auto bad = at::full({}, 1.0, options);
  const auto sound = [&] {
    const at::Tensor& scale = state.loss_scale();
    return scale.numel() == 1 && scale.scalar_type() == at::kFloat && scale.device() == device &&
           scale.isfinite().all().template item<bool>() && scale.gt(0).all().template item<bool>();
  };
  report.require(sound(), "loss_scale() must be one positive, finite fp32 number on the device.");
  const void* place = state.loss_scale().const_data_ptr();
  for (int i = 0; i < 3; ++i) state.update_scale(good);
  const auto before = state.loss_scale().clone();
  for (int i = 0; i < 10; ++i) state.update_scale(bad);
  report.require(sound(), "loss_scale() must stay positive and finite through ten overflows in a row.");
  report.require(state.loss_scale().const_data_ptr() == place, "loss_scale() must keep its address.");
  report.require(state.loss_scale().le(before).all().template item<bool>(),
                 "update_scale() must not raise the scale after an overflow.");
  report.require(good.template item<float>() == 0 && bad.template item<float>() == 1,
                 "update_scale() must not write into found_inf.");
}

}  // namespace detail

/// Checks at run time what `precision_policy` promises and the compiler cannot see.
///
/// Returns one sentence for each broken promise.
template <precision_policy P>
Violations check_precision_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("precision");
  policy.check();
  for (const bool window : {false, true}) {
    auto parameters = detail::probe_parameters(device);
    const auto buffers = detail::probe_buffers(device);
    std::vector<at::Tensor> before;
    for (const auto& p : parameters) before.push_back(p.model.detach().clone());
    const auto buffer_before = buffers[0].tensor.clone();
    typename P::State state(policy, parameters, buffers, window);
    report.require(detail::same_bits(buffers[0].tensor, buffer_before),
                   "State's constructor must leave buffers alone.");
    detail::check_precision_guards(state, device, report);
    detail::check_precision_inputs<P>(state, device, report);
    detail::check_precision_parameters<P>(state, parameters, before, report);
    if constexpr (P::scales_loss) detail::check_loss_scale(state, device, report);
    std::set<std::string> names;
    state.for_each_state([&](const auto& name, at::Tensor& tensor) {
      report.require(names.insert(std::string(name)).second,
                     "for_each_state() must give each tensor a name of its own.");
      report.require(tensor.defined(), "for_each_state() must visit defined tensors.");
    });
  }
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
