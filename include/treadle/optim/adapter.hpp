// SPDX-License-Identifier: Apache-2.0
// Any torch::optim::Optimizer as a rule, with the costs it brings.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/full.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/optim/schedule.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Whether an adapted optimizer may wait for the device to learn if a step counts.
enum class HostSync { Refused, Allowed };

namespace detail {
/// An optimizer whose `step()` needs no closure; `torch::optim::LBFGS` is none.
template <class Optimizer>
concept steps_alone = requires(Optimizer& optimizer) {
  optimizer.step();
};
/// What was made, by value or behind a pointer.
template <class Made>
auto& optimizer_of(Made& made) {
  if constexpr (requires { *made; })
    return *made;
  else
    return made;
}
}  // namespace detail

/// Drives the `torch::optim` optimizer that `make(parameters)` returns, by value or in a unique_ptr; any whose `step()`
/// needs no closure.
///
/// Costs against the fused rules: a kernel launch or more for each parameter, a pass of its own to divide gradients,
/// and, with `Fp16`, `Skip`, `Stop` or a loss whose count is on the device, a host synchronization each step, which
/// `HostSync::Allowed` has to opt into. The optimizer's state and rates belong to the optimizer; a schedule multiplies
/// the rates that it had when it was made. Throws `ConfigError` at a step that would synchronize unasked.
template <class Make, HostSync Sync = HostSync::Refused>
struct Adapter {
  static constexpr bool host_stepped = true;
  static constexpr bool may_synchronize = Sync == HostSync::Allowed;

  Make make;
  Schedule schedule{};

  void check() const { schedule.check(); }

  class State {
    using Made = std::invoke_result_t<const Make&, std::vector<at::Tensor>&>;
    static_assert(
        detail::steps_alone<std::remove_reference_t<decltype(detail::optimizer_of(std::declval<Made&>()))>>,
        "treadle::optim::adapt: the optimizer's step() needs a closure that computes the loss again, as that of "
        "torch::optim::LBFGS does, and a trainer has none to give; adapt another optimizer, or use a rule of "
        "treadle::optim.");

   public:
    State(const Adapter& rule, const ParameterList& parameters)
        : parameters_(&parameters),
          optimizer_(make_optimizer(rule, parameters)),
          factors_(rule.schedule),
          seen_(parameters.size(), false) {
      refuse_unusable();
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
    /// The first group's rate at the next step: fp32, one element, on the host; 0 before the schedule is planned.
    at::Tensor of(std::size_t) {
      double rate = 0;
      if (!base_rates_.empty()) rate = factors_.constant() ? rate_of(0) : base_rates_.front() * factor();
      return at::full({}, rate, at::kFloat);
    }
    /// Multiplies every rate: the optimizer's own, or those that a schedule multiplies.
    void scale(double factor) {
      for (std::size_t g = 0; g < base_rates_.size(); ++g) {
        base_rates_[g] *= factor;
        if (factors_.constant()) set_rate(g, rate_of(g) * factor);
      }
    }

    template <class PrecisionState>
    at::TensorList collect(PrecisionState& precision) {
      gradients_.clear();
      owners_.clear();
      for (std::size_t i = 0; i < parameters_->size(); ++i) {
        const auto& parameter = (*parameters_)[i];
        if (!parameter.model.grad().defined()) continue;
        seen_[i] = true;
        gradients_.push_back(parameter.model.grad());
        owners_.push_back(&parameter);
      }
      precision.gradients(gradients_);
      return gradients_;
    }

    void step(const at::Tensor* divisor, const at::Tensor* found_inf, const at::Tensor*) {
      if (!planned()) plan(0);
      if (found_inf && !counts(*found_inf)) return;
      if (divisor && !gradients_.empty()) at::_foreach_div_(gradients_, *divisor);
      for (std::size_t i = 0; i < owners_.size(); ++i) owners_[i]->master.mutable_grad() = gradients_[i];
      if (!factors_.constant())  // else the rates are the program's to change
        for (std::size_t g = 0; g < base_rates_.size(); ++g) set_rate(g, base_rates_[g] * factor());
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

    std::vector<std::string> without_gradient() const {
      std::vector<std::string> names;
      for (std::size_t i = 0; i < seen_.size(); ++i)
        if (!seen_[i] && (*parameters_)[i].model.requires_grad()) names.push_back((*parameters_)[i].name);
      return names;
    }
    template <class Visitor>
    void for_each_state(Visitor&&) {}
    template <class Visitor>
    void for_each_value(Visitor&& visit) {
      visit("schedule", factors_);
      visit("table", table_);
      visit("base_rates", base_rates_);
      visit("applied_steps", applied_);
    }

    /// The adapted optimizer, for its own options and `torch::save`.
    auto& optimizer() { return get(); }

   private:
    static constexpr bool holds_pointer = requires(Made & made) { *made; };

    static Made make_optimizer(const Adapter& rule, const ParameterList& parameters) {
      std::vector<at::Tensor> masters;
      for (const auto& parameter : parameters) {
        if (!parameter.model.requires_grad()) continue;
        masters.push_back(parameter.master);
      }
      return rule.make(masters);
    }
    auto& get() { return detail::optimizer_of(optimizer_); }
    void refuse_unusable() {
      if constexpr (requires { optimizer_ == nullptr; }) {
        if (optimizer_ == nullptr)
          throw ConfigError("treadle::optim::adapt: the function returned no optimizer; return a unique_ptr to one.");
      }
      // Behind a pointer to the base class only its name tells, and its header would be every program's to compile.
      const auto& made = get();
      if (c10::demangle(typeid(made).name()) == "torch::optim::LBFGS")
        throw ConfigError(
            "treadle::optim::adapt: torch::optim::LBFGS needs a closure that computes the loss again, which a trainer "
            "has not; adapt another optimizer, or use a rule of treadle::optim.");
    }
    double rate_of(std::size_t group) { return get().param_groups()[group].options().get_lr(); }
    void set_rate(std::size_t group, double rate) { get().param_groups()[group].options().set_lr(rate); }
    double factor() const {
      if (table_.empty()) return 0;
      const auto last = static_cast<std::int64_t>(table_.size()) - 1;
      return table_[static_cast<std::size_t>(std::min(applied_, last))];
    }
    bool counts(const at::Tensor& found_inf) const {
      if (gradients_.empty()) return false;  // nothing was back-propagated, and the host knows
      if constexpr (may_synchronize)
        return found_inf.item<float>() == 0;  // sync: the optimizer steps on the host, as opted into
      throw ConfigError(
          "treadle::optim::adapt: whether this step counts is known on the device only, because the loss has its "
          "count there (or counts nothing), and the adapted optimizer steps on the host, which would have to wait in "
          "every step; accept that with adapt<treadle::optim::HostSync::Allowed>(...), or give the loss a count on "
          "the host, as treadle::Loss::mean(value, rows) has.");
    }

    const ParameterList* parameters_;
    Made optimizer_;
    Schedule factors_;
    std::vector<bool> seen_;  // which parameters have ever had a gradient
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
