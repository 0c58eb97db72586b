// SPDX-License-Identifier: Apache-2.0
// What a trainer refuses, at compile time and when it runs, each with one sentence.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/accumulation/concept.hpp"
#include "treadle/averaging/concept.hpp"
#include "treadle/checkpointing/concept.hpp"
#include "treadle/clipping/concept.hpp"
#include "treadle/compatibility.hpp"
#include "treadle/error.hpp"
#include "treadle/execution/concept.hpp"
#include "treadle/loss.hpp"
#include "treadle/model.hpp"
#include "treadle/nonfinite/concept.hpp"
#include "treadle/observe/concept.hpp"
#include "treadle/optim/concept.hpp"
#include "treadle/optim/parameter_group.hpp"
#include "treadle/parallelism/concept.hpp"
#include "treadle/policies.hpp"
#include "treadle/precision/concept.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/runtime/sink.hpp"
#include "treadle/runtime/sum_dtype.hpp"
#include "treadle/trainer_options.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

template <class T>
struct is_observer_set : std::false_type {};
template <class... Os>
struct is_observer_set<observe::Set<Os...>> : std::true_type {};

/// What the policies of a set can be wrong about, each on its own and together with the rule.
template <class P, class Rule>
struct CheckPolicies {
  static_assert(
      precision_policy<typename P::Precision>,
      "treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false; "
      "precision/concept.hpp lists them.");
  static_assert(parallelism_policy<typename P::Parallelism>,
                "treadle::Trainer: the parallelism policy lacks a call; parallelism/concept.hpp lists them.");
  static_assert(accumulation_policy<typename P::Accumulation>,
                "treadle::Trainer: the accumulation policy lacks a call; accumulation/concept.hpp lists them.");
  static_assert(checkpointing_policy<typename P::Checkpointing>,
                "treadle::Trainer: the checkpointing policy lacks a call; checkpointing/concept.hpp lists them.");
  static_assert(execution_policy<typename P::Execution>,
                "treadle::Trainer: the execution policy lacks a call; execution/concept.hpp lists them.");
  static_assert(
      clipping_policy<typename P::Clipping>,
      "treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false; "
      "clipping/concept.hpp lists them.");
  static_assert(nonfinite_policy<typename P::NonFinite>,
                "treadle::Trainer: the non-finite policy lacks a call; nonfinite/concept.hpp lists them.");
  static_assert(averaging_policy<typename P::Averaging>,
                "treadle::Trainer: the averaging policy lacks a call; averaging/concept.hpp lists them.");
  /// Rules between axes are asked only where their parts are what they should be: one sentence a mistake.
  static constexpr bool whole =
      update_rule<Rule> && precision_policy<typename P::Precision> && parallelism_policy<typename P::Parallelism> &&
      accumulation_policy<typename P::Accumulation> && checkpointing_policy<typename P::Checkpointing> &&
      execution_policy<typename P::Execution> && clipping_policy<typename P::Clipping> &&
      nonfinite_policy<typename P::NonFinite> && averaging_policy<typename P::Averaging>;
  static_assert(
      !whole || capture_without_threads<P>,
      "treadle::Trainer: execution::CudaGraph cannot capture parallelism::DataParallel, which drives a thread a "
      "device; use parallelism::DistributedDataParallel, or execution::Eager.");
  static_assert(
      !whole || capture_without_search<P>,
      "treadle::Trainer: execution::CudaGraph cannot capture a search for unused parameters "
      "(DistributedDataParallel<ParameterUse::Find>); use ParameterUse::Every or Static, or execution::Eager.");
  static_assert(
      !whole || capture_without_offload<P>,
      "treadle::Trainer: execution::CudaGraph cannot capture checkpointing::OffloadActivations; recompute instead "
      "(checkpointing::CheckpointEveryBlock), or use execution::Eager.");
  static_assert(
      !whole || capture_without_host_rule<P, Rule>,
      "treadle::Trainer: execution::CudaGraph cannot capture an adapted torch::optim optimizer, which steps on "
      "the host; use a rule of treadle::optim (AdamW, Adam, Sgd), or execution::Eager.");
  static_assert(
      !whole || host_rule_may_synchronize<P, Rule>,
      "treadle::Trainer: an adapted torch::optim optimizer steps on the host, so precision::Fp16, nonfinite::Skip "
      "and nonfinite::Stop make it wait for the device in every step; accept that with "
      "adapt<treadle::optim::HostSync::Allowed>(...), or use a rule of treadle::optim.");
};
struct NoPolicies {};

/// Everything that the types of a trainer can be wrong about; an empty base, so that it is checked first.
template <class Model, class Objective, class Rule, class PolicySetType, class Observers>
struct CheckTrainer : std::conditional_t<policy_set<PolicySetType>, CheckPolicies<PolicySetType, Rule>, NoPolicies> {
  static_assert(treadle::model<Model>,
                "treadle::Trainer: the model lacks something that training needs; it must have named_parameters(), "
                "named_buffers(), train(bool), eval(), is_training() and to(device), as torch::nn::Module has.");
  static_assert(
      !std::is_pointer_v<Objective>,
      "treadle::Trainer: the objective is a bare function pointer, which would be called through memory at each "
      "step; pass treadle::fn<your_function>{} instead.");
  static_assert(
      policy_set<PolicySetType>,
      "treadle::Trainer: the fourth argument must be a set of policies; write treadle::policies(...) around them.");
  static_assert(
      is_observer_set<Observers>::value,
      "treadle::Trainer: the fifth argument must be a set of observers; write treadle::observers(...) around them.");
  static_assert(
      update_rule<Rule>,
      "treadle::Trainer: the third argument is not an update rule; use treadle::optim::AdamW and its like, or "
      "treadle::optim::adapt(...) for a torch::optim optimizer (optim/concept.hpp lists what a rule needs).");
};

/// Checks every option value, then does what the options ask for before anything else.
template <class Policies, class Rule>
void prepare(const Policies& policies, const Rule& rule, const TrainerOptions& options) {
  policies.check();
  rule.check();
  options.check();
  if (options.determinism) apply(*options.determinism);
}

/// Throws `ConfigError` for parameter groups that match nothing, before anything is done to the parameters.
template <class Rule>
void check_groups(const Rule& rule, const ParameterList& parameters) {
  if constexpr (requires { rule.groups; }) optim::assign_groups(rule.groups, parameters);
}

/// Whether a loss is what losses are: an fp32 scalar with a gradient.
[[gnu::always_inline]] inline bool is_plain_loss(const at::Tensor& value) {
  const auto* impl = value.unsafeGetTensorImpl();  // spares calls that are not always inlined
  return value.defined() && impl->sizes().empty() && impl->dtype() == caffe2::TypeMeta::Make<float>() &&
         impl->requires_grad();
}

/// Throws `ConfigError` for a loss that has no backward pass, else returns false: it is not a plain one.
[[gnu::cold]] inline bool check_loss(const at::Tensor& value) {
  require_scalar(value);
  if (!value.requires_grad())
    throw ConfigError(
        "treadle::Trainer: the objective's loss has no gradient; it must depend on parameters that require "
        "one, and must not be computed under no-grad or from detached tensors.");
  return false;
}

/// Where the backward pass of a loss of any shape and dtype starts, and from what.
[[gnu::cold]] inline Root root_of(const at::Tensor& value, const at::Tensor& seed, double factor) {
  auto root = value.dim() == 0 ? value : value.reshape({});
  if (is_narrow(root.scalar_type())) root = root.to(at::kFloat);
  if (root.scalar_type() ==
      at::kDouble)  // the factor anew, which the fp32 seed has rounded; seed / its factor is the scale
    return {root, seed.to(at::kDouble).mul_(factor / static_cast<double>(static_cast<float>(factor)))};
  return {root, seed};
}

/// The backward pass of a loss from `seed`, fp32 and on its device. The optional saves `Tensor::backward` a copy.
[[gnu::always_inline]] inline void backward(const at::Tensor& value, bool plain, const std::optional<at::Tensor>& seed,
                                            double factor) {
  if (plain) [[likely]]
    return value._backward({}, seed, std::nullopt, false);
  const Root root = root_of(value, *seed, factor);
  root.value.backward(root.seed);
}

/// What the types of a batch can be wrong about.
template <class Policies, bool Sliceable, bool TakesContext>
consteval void check_batch() {
  static_assert(
      batch_can_be_sliced<Policies, Sliceable>,
      "treadle::Trainer: accumulation::SplitBatch and parallelism::DataParallel take batches apart, and this "
      "batch type has no slice_rows; give it a member or a free function slice_rows(batch, begin, end), or use "
      "accumulation::AccumulateOver.");
  static_assert(recompute_has_context<Policies, TakesContext>,
                "treadle::Trainer: a checkpointing policy needs to be given the blocks to recompute; let the objective "
                "take the step context as its third parameter (auto& step) and call step.checkpoint(block, x).");
}

/// After the first step that had gradients: parameters that got none are most often forgotten ones. Whether it was one.
inline bool report_idle(const std::vector<std::string>& names, const ParameterList& parameters) {
  const auto trained =
      std::ranges::count_if(parameters, [](const auto& parameter) { return parameter.model.requires_grad(); });
  if (names.size() == static_cast<std::size_t>(trained)) return false;
  if (names.empty()) return true;
  std::string list;
  for (std::size_t i = 0; i < names.size() && i < 5; ++i) list += (i ? ", '" : "'") + names[i] + "'";
  if (names.size() > 5) list += " and " + std::to_string(names.size() - 5) + " more";
  warn("treadle::Trainer: in the first step " + std::to_string(names.size()) + " of " +
       std::to_string(parameters.size()) + " parameters got no gradient (" + list +
       "); they are left as they are until they get one. Freeze them with requires_grad_(false) if that is meant.");
  return true;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
