// SPDX-License-Identifier: Apache-2.0
// Any torch::optim::Optimizer as a rule, with the costs it brings.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/optim/schedule.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Whether an adapted optimizer may wait for the device to learn if a step counts.
enum class HostSync { Refused, Allowed };

/// Drives the `torch::optim` optimizer that `make(parameters)` returns, by value or in a unique_ptr.
///
/// Costs against the fused rules: a kernel launch or more for each parameter, a pass of its own to divide gradients,
/// and, with `Fp16`, `Skip` or `Stop`, a host synchronization each step, which `HostSync::Allowed` has to opt into. The
/// optimizer's state belongs to the optimizer; its learning rates, read when it is made, are what `schedule`
/// multiplies.
template <class Make, HostSync Sync = HostSync::Refused>
struct Adapter {
  static constexpr bool host_stepped = true;
  static constexpr bool may_synchronize = Sync == HostSync::Allowed;

  Make make;
  Schedule schedule{};

  void check() const { schedule.check(); }

  class State {
   public:
    State(const Adapter& rule, const ParameterList& parameters)
        : parameters_(&parameters), optimizer_(make_optimizer(rule, parameters)), factors_(rule.schedule) {
      for (auto& group : get().param_groups()) base_rates_.push_back(group.options().get_lr());
      if (!factors_.needs_horizon()) table_ = factors_.tabulate(0);
    }

    /// The schedule's factor stands in for a rate here; the optimizer's groups hold the rates.
    Adapter::State& rates() { return *this; }
    const Adapter::State& rates() const { return *this; }
    void plan(std::int64_t run_steps) {
      table_ = factors_.tabulate(run_steps);
      applied_ = 0;
    }
    bool planned() const { return !table_.empty(); }
    void check_run(std::int64_t run_steps) const {
      factors_.check_run(run_steps > 0 && !follows_run() ? run_steps + applied_ : run_steps);
    }
    bool follows_run() const { return factors_.needs_horizon(); }
    /// The first group's rate at the next step: fp32, one element, on the host.
    at::Tensor of(std::size_t) const {
      return at::full({}, base_rates_.empty() ? 0.0 : base_rates_.front() * factor());
    }
    void scale(double factor) {
      for (auto& rate : base_rates_) rate *= factor;
    }

    template <class PrecisionState>
    at::TensorList collect(PrecisionState& precision) {
      gradients_.clear();
      owners_.clear();
      for (const auto& parameter : *parameters_) {
        if (!parameter.model.grad().defined()) continue;
        gradients_.push_back(parameter.model.grad());
        owners_.push_back(&parameter);
      }
      precision.gradients(gradients_);
      return gradients_;
    }

    void step(const at::Tensor* divisor, const at::Tensor* found_inf, const at::Tensor*) {
      if (!planned()) plan(0);
      if (found_inf && found_inf->item<float>() != 0) return;  // sync: the optimizer steps on the host, as opted into
      if (divisor && !gradients_.empty()) at::_foreach_div_(gradients_, *divisor);
      for (std::size_t i = 0; i < owners_.size(); ++i) owners_[i]->master.mutable_grad() = gradients_[i];
      for (std::size_t g = 0; g < base_rates_.size(); ++g)
        get().param_groups()[g].options().set_lr(base_rates_[g] * factor());
      get().step();
      ++applied_;
    }

    const at::Tensor* expose(const at::Tensor* divisor) {
      if (divisor && !gradients_.empty()) at::_foreach_div_(gradients_, *divisor);
      for (std::size_t i = 0; i < owners_.size(); ++i) owners_[i]->model.mutable_grad() = gradients_[i];
      return nullptr;
    }

    void release() {
      gradients_.clear();
      for (const auto& parameter : *parameters_) {
        parameter.model.mutable_grad().reset();
        parameter.master.mutable_grad().reset();
      }
    }

    std::vector<std::string> without_gradient() const { return {}; }
    template <class Visitor>
    void for_each_state(Visitor&&) {}

    /// The adapted optimizer, for its own options and `torch::save`.
    auto& optimizer() { return get(); }

   private:
    static auto make_optimizer(const Adapter& rule, const ParameterList& parameters) {
      std::vector<at::Tensor> masters;
      for (const auto& parameter : parameters) {
        if (!parameter.model.requires_grad()) continue;
        masters.push_back(parameter.master);
      }
      return rule.make(masters);
    }
    using Made = std::invoke_result_t<const Make&, std::vector<at::Tensor>&>;
    auto& get() {
      if constexpr (requires(Made & made) { *made; })
        return *optimizer_;
      else
        return optimizer_;
    }
    double factor() const {
      const auto last = static_cast<std::int64_t>(table_.size()) - 1;
      return table_[static_cast<std::size_t>(std::min(applied_, last))];
    }

    const ParameterList* parameters_;
    Made optimizer_;
    Schedule factors_;
    std::vector<double> table_;
    std::vector<double> base_rates_;
    std::int64_t applied_ = 0;
    std::vector<at::Tensor> gradients_;
    std::vector<const Parameter*> owners_;
  };
};

/// Makes an `Adapter`: `adapt([](auto& p) { return torch::optim::RMSprop(p, 1e-3); })`, and `adapt<HostSync::Allowed>`.
template <HostSync Sync = HostSync::Refused, class Make>
Adapter<Make, Sync> adapt(Make make, Schedule schedule = {}) {
  return {std::move(make), std::move(schedule)};
}

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
