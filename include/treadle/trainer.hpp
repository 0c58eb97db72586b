// SPDX-License-Identifier: Apache-2.0
// START HERE. One trainer, and in `micro_batch` and `update` the step, each line of which is owned by one folder.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/compatibility.hpp"
#include "treadle/detail/checks.hpp"
#include "treadle/error.hpp"
#include "treadle/evaluation.hpp"
#include "treadle/fit.hpp"
#include "treadle/loader.hpp"
#include "treadle/model.hpp"
#include "treadle/objective.hpp"
#include "treadle/observe/concept.hpp"
#include "treadle/optim/concept.hpp"
#include "treadle/policies.hpp"
#include "treadle/runtime/buffer_guard.hpp"
#include "treadle/runtime/determinism.hpp"
#include "treadle/runtime/verdict.hpp"
#include "treadle/runtime/window.hpp"
#include "treadle/step_context.hpp"
#include "treadle/step_result.hpp"

namespace treadle {
inline namespace v0_1 {

/// What no policy says.
struct TrainerOptions {
  std::optional<Determinism> determinism{};  ///< applied before anything else
  double nominal_count = 0;                  ///< c0, see docs/accumulation.md; 0 takes the first micro-batch's count
};

/// Trains one model: composed at compile time from an objective, an update rule and one policy an axis.
///
/// The model is shared or referred to, never copied, and moved to the device at construction. Throws `ConfigError` for
/// option values, parameters and groups that cannot work.
template <class Model, class Objective, class Rule, class PolicySetType = Policies<>, class Observers = observe::Set<>>
class Trainer : detail::CheckTrainer<Model, Objective, Rule, PolicySetType, Observers> {
 public:
  using Precision = typename PolicySetType::Precision;
  using Parallelism = typename PolicySetType::Parallelism;
  using Accumulation = typename PolicySetType::Accumulation;
  using Checkpointing = typename PolicySetType::Checkpointing;
  using Execution = typename PolicySetType::Execution;
  using Clipping = typename PolicySetType::Clipping;
  using NonFinite = typename PolicySetType::NonFinite;
  using Averaging = typename PolicySetType::Averaging;
  using Context = StepContext<typename Checkpointing::State>;

  template <class M>
  requires std::same_as<detail::model_of<M>, Model>
  explicit Trainer(M&& model, Objective objective, Rule rule, PolicySetType policies = {}, Observers observers = {},
                   const TrainerOptions& options = {})
      : objective_(std::move(objective)),
        observers_(std::move(observers)),
        model_(detail::share_model(std::forward<M>(model))),
        parallelism_((prepare(policies, rule, options), policies.parallelism)),
        parameters_((model_->to(device()), detail::list_parameters(*model_, device()))),
        buffers_(detail::list_buffers(*model_)),
        precision_(policies.precision, parameters_, buffers_, Accumulation::windows),
        accumulation_(policies.accumulation),
        checkpointing_(policies.checkpointing),
        execution_(policies.execution),
        clipping_(policies.clipping, device()),
        nonfinite_(policies.nonfinite, device()),
        buffer_guard_(NonFinite::selects ? buffers_ : BufferList{}),
        averaging_((parallelism_.prepare(*model_, parameters_, buffers_), policies.averaging), parameters_),
        rule_(rule, parameters_),
        verdict_(device()),
        window_(device()),
        context_(checkpointing_, names_) {
    window_.keep_losses(NonFinite::inspects_losses);
    if (options.nominal_count > 0) window_.set_c0(options.nominal_count);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Feeds one loader batch; gives the step's result when it closes a window. `ends` closes a shorter window too. A
  /// throw drops the window's gradients and leaves the trainer as before it.
  template <class B>
  std::optional<StepResult> accumulate(const B& batch, bool ends = false) {
    static_assert(
        batch_can_be_sliced<PolicySetType, sliceable_batch<B>>,
        "treadle::Trainer: accumulation::SplitBatch and parallelism::DataParallel take batches apart, and this "
        "batch type has no slice_rows; give it a member or a free function slice_rows(batch, begin, end), or use "
        "accumulation::AccumulateOver.");
    static_assert(
        recompute_has_context<PolicySetType, detail::takes_context<Objective, Model, B, Context>>,
        "treadle::Trainer: a checkpointing policy needs to be given the blocks to recompute; let the objective "
        "take the step context as its third parameter (auto& step) and call step.checkpoint(block, x).");
    std::optional<StepResult> result;
    guarded([&] {
      const auto math = precision_.math();
      accumulation_.feed(batch, ends, [&](const auto& part, bool closes) {
        placed(part, [&](const auto& micro) {
          execution_.run(
              micro, closes, [&](const auto& m, bool last) { micro_batch(m, last); },
              [&] { update(result.emplace()); });
        });
      });
    });
    return result;
  }

  /// Ends a window that is still open, as a step with its true weight; nothing if none is.
  std::optional<StepResult> flush() {
    if (!accumulation_.open()) return std::nullopt;
    accumulation_.reset();
    std::optional<StepResult> result;
    guarded([&] {
      const auto math = precision_.math();
      update(result.emplace());
    });
    return result;
  }

  /// One step over a whole range of micro-batches, whatever the accumulation's own count; throws `DataError` for none.
  template <loader Range>
  StepResult step(Range&& range) {
    std::optional<StepResult> result;
    detail::for_each_batch<true>(
        detail::range_of(range), [&](const auto& batch, bool last) { return result = accumulate(batch, last), true; },
        [](auto&& next) { return next(); });
    if (!result) throw DataError("treadle::Trainer::step: the range gave no batch; a step needs at least one.");
    return std::move(*result);
  }

  /// Trains over `train_loader`; evaluates on `test_loader`, if one is given, after each epoch.
  template <loader Train>
  FitResult fit(Train&& train_loader, const FitOptions& options = {}) {
    return detail::Fit(*this, options).run(detail::range_of(train_loader), detail::NoLoader{});
  }
  template <loader Train, loader Test>
  FitResult fit(Train&& train_loader, Test&& test_loader, const FitOptions& options = {}) {
    return detail::Fit(*this, options).run(detail::range_of(train_loader), detail::range_of(test_loader));
  }

  /// Means of loss and recorded values over a loader: no gradients, evaluation mode, and no trace in training.
  template <loader Test>
  Metrics evaluate(Test&& test_loader, const EvaluateOptions& options = {}) {
    return detail::evaluate(*this, detail::range_of(test_loader), options);
  }
  /// Outputs for a loader in its order, joined along the first dimension; `forward(model, batch)` defaults to
  /// `model.forward(batch.data)`.
  template <loader Test, class Forward = detail::ForwardData>
  at::Tensor predict(Test&& loader, Forward forward = {}, const EvaluateOptions& options = {}) {
    return detail::predict(*this, detail::range_of(loader), forward, options);
  }

  /// Reads the device's verdict: throws `NonFiniteError` if `nonfinite::Stop` has stopped, `ConfigError` if a parameter
  /// has changed place. `fit` calls it at each log point.
  void check() const {
    nonfinite_.report();
    detail::check_places(parameters_, places_);
  }

  Model& model() { return *model_; }
  Observers& observers() { return observers_; }
  at::Device device() const { return parallelism_.device(); }
  const ParameterList& parameters() const { return parameters_; }
  const BufferList& buffers() const { return buffers_; }
  /// Steps made, skipped ones included.
  std::int64_t steps() const { return steps_; }
  /// Steps skipped: int64 scalar on the device.
  const at::Tensor& skipped_steps() const { return verdict_.skipped(); }
  /// The rule's state: its schedule and learning rates, `rates().scale(0.1)` say.
  typename Rule::State& rule() { return rule_; }
  /// The state of each policy that has one.
  auto& precision() { return precision_; }
  auto& parallelism() { return parallelism_; }
  auto& accumulation() { return accumulation_; }
  auto& averaging() { return averaging_; }
  /// What `evaluate` and `predict` run: the objective under the precision's guard, without gradients.
  template <class B, class F>
  void run_inference(const B& batch, F&& f) {
    const at::NoGradGuard no_grad;
    const auto math = precision_.math();
    placed(batch, [&](const auto& here) {
      [[maybe_unused]] const auto cast = precision_.autocast();
      f(objective_, *model_, here);
    });
  }
  Checkpointing::State& checkpointing() { return checkpointing_; }
  const typename Precision::State& precision() const { return precision_; }
  NameTable& names() { return names_; }
  /// Drops an open window and its gradients.
  void reset_window() {
    accumulation_.reset();
    execution_.reset();
    window_.reset();
    context_.records().clear();
    rule_.release();
    parameters_.release_gradients();
  }

 private:
  static constexpr bool inspects = NonFinite::selects || Precision::scales_loss;

  /// Stages 1 to 4 of a step: forward under the precision's guard, backward outside it, both under the sync guard.
  template <class B>
  void micro_batch(const B& batch, bool closes) {
    if (window_.micro_batches() == 0) begin_window();
    parallelism_.run(*model_, batch, closes, [&](Model& model, const B& shard) {
      const std::int64_t rows = treadle::rows(shard);
      if (rows == 0) return;  // an empty micro-batch counts nothing
      const Loss loss = [&] {
        [[maybe_unused]] const auto cast = precision_.autocast();
        return detail::call_objective(objective_, model, shard, context_);
      }();
      const at::Tensor root = detail::differentiable_scalar(loss.value);
      const double factor = window_.add(loss, rows, [&](double count) { return parallelism_.agree(count); });
      if constexpr (Precision::scales_loss)
        root.backward(window_.seed(factor, root, precision_.loss_scale()));
      else
        root.backward(window_.seed(factor, root));
    });
  }

  /// Stages 5 to 10: from reduced gradients to the new state.
  void update(StepResult& result) {
    parallelism_.finish_reduction();
    const std::span<at::Tensor> gradients = rule_.collect(precision_);
    const at::Tensor* divisor = window_.divisor(loss_scale());
    window_.report(result);

    if constexpr (Clipping::measures_norm) clipping_.measure(at::TensorList(gradients.data(), gradients.size()));
    const at::Tensor* found_inf = judge(gradients);
    divisor = clipping_.clip(at::TensorList(gradients.data(), gradients.size()), divisor);
    if constexpr (Clipping::measures_norm) result.grad_norm = clipping_.norm();
    if constexpr (Observers::wants_gradients) divisor = rule_.expose(divisor);

    rule_.step(divisor, found_inf, found_inf ? &verdict_.applied() : nullptr);
    precision_.publish();
    if constexpr (Precision::scales_loss) precision_.update_scale(verdict_.found_inf());
    averaging_.update(found_inf);
    if constexpr (NonFinite::selects) {
      buffer_guard_.restore(*found_inf);
      result.skipped = found_inf->clone();
    }
    checkpointing_.end_step();
    if constexpr (!Observers::wants_gradients) rule_.release();

    result.records = std::move(context_.records());
    context_.records().clear();
    result.index = steps_++;
    if (result.index == 0) [[unlikely]]
      detail::report_idle(rule_.without_gradient(), parameters_);
    window_.reset();
  }

  /// The device's verdict on the window: 1 where it must change nothing; null if it cannot be bad.
  const at::Tensor* judge(std::span<at::Tensor> gradients) {
    const bool may_count_nothing = window_.empty() || window_.counts_on_device();
    if constexpr (!inspects) {
      if (!may_count_nothing) return nullptr;
    }
    verdict_.clear();
    if constexpr (inspects) {
      if constexpr (Clipping::measures_norm)
        verdict_.inspect(clipping_.measured());
      else
        verdict_.inspect(at::TensorList(gradients.data(), gradients.size()));
    }
    if (window_.empty())
      verdict_.reject();
    else if (window_.counts_on_device())
      verdict_.require_count(window_.total_count());
    nonfinite_.judge(window_, verdict_, Precision::scales_loss);
    if constexpr (!NonFinite::selects) {
      if (!may_count_nothing) return nullptr;
    }
    verdict_.settle();
    return &verdict_.found_inf();
  }

  const at::Tensor* loss_scale() const {
    if constexpr (Precision::scales_loss)
      return &precision_.loss_scale();
    else
      return nullptr;
  }

  void begin_window() {
    if constexpr (Observers::wants_gradients) rule_.release();
    if constexpr (NonFinite::selects) buffer_guard_.save();
    checkpointing_.begin_step();
  }

  /// `f(batch on the device, cast as the precision wants it)`; the batch itself if nothing has to change.
  template <class B, class F>
  void placed(const B& batch, F&& f) {
    bool moves = Precision::casts_inputs;
    treadle::for_each_tensor(batch, [&](const at::Tensor& t) { moves |= t.defined() && t.device() != device(); });
    if (!moves) return f(batch);
    B here = batch;
    treadle::for_each_tensor(here, [&](at::Tensor& t) {
      if (t.defined()) t = to_device(t, device());
    });
    precision_.cast_inputs(here);
    f(here);
  }

  template <class F>
  void guarded(F&& f) {
    try {
      f();
    } catch (...) {
      if constexpr (NonFinite::selects) {
        if (window_.micro_batches() > 0) buffer_guard_.restore();
      }
      reset_window();
      detail::check_places(parameters_, places_);  // a parameter that moved is the likelier cause: say that instead
      throw;
    }
  }

  static void prepare(const PolicySetType& policies, const Rule& rule, const TrainerOptions& options) {
    policies.check();
    rule.check();
    if (options.determinism) apply(*options.determinism);
  }

  [[no_unique_address]] Objective objective_;
  [[no_unique_address]] Observers observers_;
  std::shared_ptr<Model> model_;
  [[no_unique_address]] typename Parallelism::State parallelism_;
  ParameterList parameters_;
  BufferList buffers_;
  [[no_unique_address]] typename Precision::State precision_;
  [[no_unique_address]] typename Accumulation::State accumulation_;
  [[no_unique_address]] typename Checkpointing::State checkpointing_;
  [[no_unique_address]] typename Execution::State execution_;
  [[no_unique_address]] typename Clipping::State clipping_;
  [[no_unique_address]] typename NonFinite::State nonfinite_;
  detail::BufferGuard buffer_guard_;
  [[no_unique_address]] typename Averaging::State averaging_;
  typename Rule::State rule_;
  detail::Verdict verdict_;
  detail::Window<Accumulation::windows || Parallelism::replicates> window_;
  NameTable names_;
  Context context_;
  detail::Places places_{parameters_};
  std::int64_t steps_ = 0;
};

template <class M, class Objective, class Rule, class P = Policies<>, class Observers = observe::Set<>>
Trainer(M&&, Objective, Rule, P = {}, Observers = {}, TrainerOptions = {})
    -> Trainer<detail::model_of<M>, Objective, Rule, P, Observers>;

}  // namespace v0_1
}  // namespace treadle
