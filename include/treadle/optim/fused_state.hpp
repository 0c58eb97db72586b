// SPDX-License-Identifier: Apache-2.0
// What AdamW, Adam and Sgd share: grouping, lazily made state by name, and the update on ATen's fused operations.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/optim/learning_rate.hpp"
#include "treadle/optim/parameter_group.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Parameters that one fused call updates: same device, dtypes, group, and the same steps behind them.
struct Cohort {
  std::vector<at::Tensor> parameters;          ///< masters
  std::vector<std::vector<at::Tensor>> state;  ///< [slot][parameter], slots as the rule names them
  std::vector<at::Tensor> steps;               ///< one tensor, repeated: ATen wants one a parameter
  at::Tensor step;                             ///< applied steps, fp32
  at::Tensor learning_rate;                    ///< fp32
  double weight_decay = 0;
  std::size_t begin = 0;  ///< place of the first gradient in the rule's order
  std::size_t size = 0;
};

/// Run-time state of a rule on fused operations.
///
/// All parameters of a cohort share one step tensor, so a step counts once and not once a parameter. A parameter that
/// gets no gradient in a step is left out of it, as PyTorch does, and its own count then parts from the others'.
template <class Rule>
class FusedState {
 public:
  FusedState(const Rule& rule, const ParameterList& parameters)
      : rule_(rule),
        parameters_(&parameters),
        group_of_(assign_groups(rule.groups, parameters)),
        rates_(rule.schedule, base_rates(rule), parameters.device()),
        slots_(parameters.size()) {
    idle_ = parameters.gradients();
  }

  LearningRate& rates() { return rates_; }
  const LearningRate& rates() const { return rates_; }

  /// The gradients of the window, in the rule's order and the masters' dtypes; the span stays valid until `release`.
  template <class PrecisionState>
  [[gnu::always_inline]] at::TensorList collect(PrecisionState& precision) {
    if (!gather()) [[unlikely]]
      regroup();
    precision.gradients(gradients_);
    return gradients_;
  }

  /// One update. `divisor` (fp32, may be null): what gradients are to be divided by; `found_inf` (fp32, may be null): 1
  /// leaves everything as it was; `applied` (int64, null with `found_inf`): 1 where the step counts.
  [[gnu::always_inline]] void step(const at::Tensor* divisor, const at::Tensor* found_inf, const at::Tensor* applied) {
    const at::NoGradGuard no_grad;
    if (!rates_.planned()) [[unlikely]]
      rates_.plan(0);
    rates_.look_up();
    const auto &grad_scale = divisor ? divisor_.emplace(*divisor), divisor_ : none_;
    const auto &skip = found_inf ? found_inf_.emplace(*found_inf), found_inf_ : none_;
    for (auto& cohort : cohorts_) {
      if (applied)
        cohort.step.add_(*applied);
      else
        cohort.step.add_(1);
      try {
        rule_.update(cohort, at::TensorList(gradients_.data() + cohort.begin, cohort.size), grad_scale, skip);
      } catch (...) {
        refuse_update(cohort, applied);
      }
    }
    rates_.advance(applied);
  }

  /// Makes the gradients true ones and shows them in the parameters' `.grad()`; nothing is left to divide by.
  const at::Tensor* expose(const at::Tensor* divisor) {
    if (divisor && !gradients_.empty()) at::_foreach_div_(gradients_, *divisor);
    for (std::size_t i = 0; i < sources_.size(); ++i) *sources_[i] = gradients_[i];
    return nullptr;
  }

  /// Lets go of the gradients.
  [[gnu::always_inline]] void release() {
    for (auto& gradient : gradients_) gradient.reset();
  }

  /// Names of parameters that require a gradient and have got none so far.
  std::vector<std::string> without_gradient() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if ((*parameters_)[i].model.requires_grad() && !slots_[i].step.defined()) names.push_back((*parameters_)[i].name);
    return names;
  }

  /// Visits state by name: "exp_avg/<parameter>" and so on, "step/<parameter>", schedule position.
  template <class Visitor>
  void for_each_state(Visitor&& visit) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].step.defined()) continue;
      const auto& name = (*parameters_)[i].name;
      visit("step/" + name, slots_[i].step);
      for (std::size_t k = 0; k < slots_[i].state.size(); ++k)
        visit(std::string(rule_.state_name(k)) + "/" + name, slots_[i].state[k]);
    }
    rates_.for_each_state(visit);
  }
  template <class Visitor>
  void for_each_value(Visitor&& visit) {
    rates_.for_each_value(visit);
  }
  /// Before state is written to: makes what `holds(name)` says that there will be, and drops the rest. Counts are one a
  /// parameter until `restored`.
  template <class Holds>
  void prepare_restore(Holds&& holds) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      auto& slot = slots_[i];
      const bool wanted = holds("step/" + (*parameters_)[i].name);
      if (wanted && !slot.step.defined()) make_state(i);
      slot.step = wanted ? at::zeros({}, rates_.of(0).options()) : at::Tensor();
      if (!wanted) slot.state.clear();
    }
  }
  /// After state was written to: parameters with the same count share it again.
  void restored() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> steps;
    for (const auto& slot : slots_)
      if (slot.step.defined()) steps.push_back(slot.step);
    std::vector<std::pair<float, at::Tensor>> shared;
    const auto counts = steps.empty() ? at::Tensor() : at::stack(steps).cpu();  // sync: training has not begun
    std::size_t k = 0;
    for (auto& slot : slots_) {
      slot.state_is_fresh = false;
      if (!slot.step.defined()) continue;
      const float count = counts.const_data_ptr<float>()[k++];
      const auto found = std::ranges::find(shared, count, &std::pair<float, at::Tensor>::first);
      if (found == shared.end())
        shared.emplace_back(count, slot.step);
      else
        slot.step = found->second;
    }
    cohorts_.clear();  // made again with the next gradients
    sources_.clear();
    gradients_.clear();
    idle_ = parameters_->gradients();
    rates_.restored();
  }

 private:
  struct Slot {
    std::vector<at::Tensor> state;
    at::Tensor step;              // shared within a cohort; undefined until the first gradient
    bool state_is_fresh = false;  // made in the regrouping under way, so it has no company yet
  };

  static std::vector<double> base_rates(const Rule& rule) {
    std::vector<double> rates{rule.learning_rate};
    for (const auto& group : rule.groups) rates.push_back(rule.learning_rate * group.rate);
    return rates;
  }

  // False if the set of parameters with a gradient is not the one that the cohorts were made for.
  // Gradients are taken out of the parameters, so that nothing is left there to release.
  [[gnu::always_inline]] bool gather() {
    at::Tensor* taken = gradients_.data();
    for (at::Tensor* source : sources_) {
      if (!source->defined()) [[unlikely]]
        return give_back();
      std::construct_at(taken++, std::move(*source));  // over an undefined tensor, which owns nothing
    }
    for (const at::Tensor* source : idle_)
      if (source->defined()) [[unlikely]]
        return give_back();
    return true;
  }
  [[noreturn, gnu::cold]] void refuse_update(Cohort& cohort, const at::Tensor* applied) {
    applied ? cohort.step.sub_(*applied) : cohort.step.sub_(1);  // it was no step
    for (std::size_t i = cohort.begin; i < cohort.begin + cohort.size; ++i)
      for (std::size_t k = 0; k < parameters_->size(); ++k)
        if (gradients_[i].is_sparse() && parameters_->gradients()[k] == sources_[i])
          refuse_sparse((*parameters_)[k].name);
    throw;
  }
  [[noreturn]] static void refuse_sparse(const std::string& name) {
    throw ConfigError("treadle::optim: parameter '" + name +
                      "' has a sparse gradient, which the fused rules do not take; build the embedding with "
                      "sparse(false), or use the torch::optim adapter.");
  }
  bool give_back() {
    for (std::size_t i = 0; i < gradients_.size() && gradients_[i].defined(); ++i)
      *sources_[i] = std::move(gradients_[i]);
    return false;
  }

  // Cohorts are remade whenever the set of parameters with a gradient changes. Those who were together and are so still
  // share a fresh copy of their count; those left out keep the old one, which nobody moves.
  void regroup() {
    const at::NoGradGuard no_grad;
    using Key = std::tuple<at::Device, at::ScalarType, at::ScalarType, std::size_t, const void*>;
    std::vector<std::pair<Key, std::vector<std::size_t>>> members;
    std::vector<at::Tensor*> idle;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const auto& parameter = (*parameters_)[i];
      if (at::Tensor* gradient = parameters_->gradients()[i]; !gradient->defined()) {
        idle.push_back(gradient);
        continue;
      }
      if (!slots_[i].step.defined()) make_state(i);
      const bool fresh = slots_[i].state_is_fresh;
      const Key key{parameter.master.device(), parameter.master.scalar_type(), parameter.model.scalar_type(),
                    group_of_[i], fresh ? nullptr : slots_[i].step.unsafeGetTensorImpl()};
      auto found = std::ranges::find(members, key, &std::pair<Key, std::vector<std::size_t>>::first);
      if (found == members.end()) found = members.insert(found, {key, {}});
      found->second.push_back(i);
    }
    std::vector<at::Tensor> steps;
    for (const auto& [key, indices] : members) steps.push_back(slots_[indices.front()].step.clone());
    // What can fail has been done, members change below: a refused gradient leaves the old grouping whole.
    idle_ = std::move(idle);
    cohorts_.clear();
    sources_.clear();
    gradients_.clear();
    for (std::size_t c = 0; c < members.size(); ++c) cohorts_.push_back(make_cohort(members[c].second, steps[c]));
    for (at::Tensor* source : sources_) gradients_.push_back(std::move(*source));
  }

  void make_state(std::size_t i) {
    auto& slot = slots_[i];
    const auto& parameter = (*parameters_)[i];
    const at::Tensor& gradient = *parameters_->gradients()[i];
    if (gradient.defined() && gradient.is_sparse()) refuse_sparse(parameter.name);
    std::vector<at::Tensor> state;
    for (std::size_t k = 0; k < rule_.state_count(); ++k) state.push_back(at::zeros_like(parameter.master));
    slot.step = at::zeros({}, at::device(parameter.master.device()).dtype(at::kFloat));
    slot.state = std::move(state);
    slot.state_is_fresh = true;
  }

  Cohort make_cohort(const std::vector<std::size_t>& indices, const at::Tensor& step) {
    Cohort cohort;
    cohort.begin = sources_.size();
    cohort.size = indices.size();
    const auto group = group_of_[indices.front()];
    cohort.learning_rate = rates_.of(group);
    cohort.weight_decay = rule_.weight_decay;
    if (group > 0) cohort.weight_decay = rule_.groups[group - 1].weight_decay.value_or(rule_.weight_decay);
    cohort.step = step;
    cohort.state.resize(rule_.state_count());
    for (const auto i : indices) {
      auto& slot = slots_[i];
      slot.step = cohort.step;
      slot.state_is_fresh = false;
      sources_.push_back(parameters_->gradients()[i]);
      cohort.parameters.push_back((*parameters_)[i].master.detach());
      cohort.steps.push_back(cohort.step);
      for (std::size_t k = 0; k < slot.state.size(); ++k) cohort.state[k].push_back(slot.state[k]);
    }
    return cohort;
  }

  Rule rule_;
  const ParameterList* parameters_;
  std::vector<std::size_t> group_of_;
  LearningRate rates_;
  std::vector<Slot> slots_;           // by parameter
  std::vector<Cohort> cohorts_;       // by fused call
  std::vector<at::Tensor*> sources_;  // places of the gradients that come, in the rule's order
  std::vector<at::Tensor*> idle_;     // of those that do not
  std::vector<at::Tensor> gradients_;
  std::optional<at::Tensor> divisor_;
  std::optional<at::Tensor> found_inf_;
  const std::optional<at::Tensor> none_;
};

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
