// SPDX-License-Identifier: Apache-2.0
// START HERE. One trainer, and in `micro_batch` and `update` the step, each line of which is owned by one folder.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/detail/checks.hpp"
#include "treadle/detail/places.hpp"
#include "treadle/error.hpp"
#include "treadle/evaluation.hpp"
#include "treadle/fit.hpp"
#include "treadle/loader.hpp"
#include "treadle/model.hpp"
#include "treadle/objective.hpp"
#include "treadle/observe/concept.hpp"
#include "treadle/policies.hpp"
#include "treadle/runtime/buffer_guard.hpp"
#include "treadle/runtime/placement.hpp"
#include "treadle/runtime/verdict.hpp"
#include "treadle/runtime/window.hpp"
#include "treadle/stages.hpp"
#include "treadle/step_context.hpp"
#include "treadle/step_result.hpp"
#include "treadle/trainer_options.hpp"

namespace treadle {
inline namespace v0_1 {

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
  using PolicyTypes = PolicySetType;

  template <class M>
  requires std::same_as<detail::model_of<M>, Model>
  explicit Trainer(M&& model, Objective objective, Rule rule, PolicySetType policies = {}, Observers observers = {},
                   const TrainerOptions& options = {})
      : objective_(std::move(objective)),
        observers_(std::move(observers)),
        model_(detail::share_model(std::forward<M>(model))),
        parallelism_((detail::prepare(policies, rule, options), policies.parallelism)),
        parameters_((model_->to(device()), detail::list_parameters(*model_, device()))),
        buffers_(detail::list_buffers(*model_)),
        precision_((detail::check_groups(rule, parameters_), policies.precision), parameters_, buffers_,
                   Accumulation::windows),
        accumulation_(policies.accumulation),
        checkpointing_(policies.checkpointing),
        execution_(policies.execution),
        clipping_(policies.clipping, device()),
        nonfinite_(policies.nonfinite, device()),
        buffer_guard_(NonFinite::selects ? buffers_ : BufferList{}),
        averaging_((parallelism_.prepare(*model_, parameters_, buffers_), policies.averaging), parameters_),
        rule_(rule, parameters_),
        verdict_(device()),
        window_(device(), parallelism_.world_size(),
                !Accumulation::windows && !Parallelism::threads && parallelism_.world_size() == 1),
        context_((checkpointing_.attach(*model_, device(), buffers_), checkpointing_), names_) {
    window_.keep_losses(NonFinite::inspects_losses);
    window_.own_seeds(parameters_.any_of_one_element());
    if (const double c0 = parallelism_.agree(options.nominal_count, "a trainer's start"); c0 > 0) window_.set_c0(c0);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Feeds one loader batch; gives the step's result when it closes a window. `ends` closes a shorter window too. A
  /// throw drops the window's gradients and leaves weights and state as they were.
  template <class B>
  std::optional<StepResult> accumulate(const B& batch, bool ends = false) {
    detail::check_batch<PolicySetType, sliceable_batch<B>, detail::takes_context<Objective, Model, B, Context>>();
    std::optional<StepResult> result;
    guarded([&] {
      accumulation_.feed(batch, ends, [&](const auto& part, bool closes) {
        detail::placed<Precision::casts_inputs>(part, device(), precision_, [&](const auto& here) {
          execution_.run(
              here,
              closes, [&](const auto& micro, bool last) __attribute__((always_inline)) { micro_batch(micro, last); },
              [&]() __attribute__((always_inline)) { update(result.emplace()); });
        });
      });
    });
    return result;
  }

  /// Ends a window that is still open, as a step with its true weight; nothing if none is.
  std::optional<StepResult> flush() {
    if (!accumulation_.open()) return {};
    std::optional<StepResult> result;
    accumulation_.reset();
    guarded([&] { update(result.emplace()); });
    return result;
  }

  /// Feeds a range of batches and closes the window at its end: one step if the range is no longer than a window, else
  /// several, of which the last one's result is returned. Throws `DataError` for an empty range.
  template <loader Range>
  StepResult step(Range&& range) {
    std::optional<StepResult> result;
    const auto feed = [&](const auto& batch, bool last) { return result = accumulate(batch, last), true; };
    detail::for_each_batch<last_is_needed<PolicySetType>>(detail::range_of(range), feed,
                                                          [](auto&& next) { return next(); });
    if (auto done = flush()) result = std::move(done);
    if (!result) throw DataError("treadle::Trainer::step: the range gave no batch; a step needs at least one.");
    return std::move(*result);
  }

  /// Trains over `train_loader`; evaluates on `test_loader`, if one is given, after each epoch; `snapshots` saves what
  /// a later run goes on from.
  template <class Train, class Snapshots = detail::NoSnapshots>
  FitResult fit(Train&& train_loader, const FitOptions& options = {}, Snapshots&& snapshots = {}) {
    if constexpr (detail::is_loader<Train>())
      return detail::Fit(*this, options, snapshots).run(detail::range_of(train_loader), detail::NoLoader{});
  }
  template <class Train, loader Test, class Snapshots = detail::NoSnapshots>
  FitResult fit(Train&& train_loader, Test&& test_loader, const FitOptions& options = {}, Snapshots&& snapshots = {}) {
    if constexpr (detail::is_loader<Train>())
      return detail::Fit(*this, options, snapshots).run(detail::range_of(train_loader), detail::range_of(test_loader));
  }

  /// Means of loss and recorded values over a loader: no gradients, evaluation mode, and no trace in training.
  template <class Test>
  Metrics evaluate(Test&& test_loader, const EvaluateOptions& options = {}) {
    if constexpr (detail::is_loader<Test>()) return detail::evaluate(*this, detail::range_of(test_loader), options);
  }
  /// Outputs for a loader in its order, joined along the first dimension; `forward(model, batch)` defaults to
  /// `model.forward(batch.data)`.
  template <class Test, class Forward = detail::ForwardData>
  at::Tensor predict(Test&& loader, Forward forward = {}, const EvaluateOptions& options = {}) {
    if constexpr (detail::is_loader<Test>()) return detail::predict(*this, detail::range_of(loader), forward, options);
  }

  /// Reads the device's verdict: throws `NonFiniteError` if `nonfinite::Stop` has stopped, `ConfigError` if a tensor of
  /// the model has changed place. `fit` calls it at each log point.
  void check() {
    parallelism_.report();
    nonfinite_.report();
    places_.check();
  }

  /// Takes part without a batch of its own in a step that other ranks make; on one rank a step that counts nothing.
  StepResult join() {
    std::optional<StepResult> result;
    guarded([&] {
      if (!window_open_) begin_window();
      Stages{*this}.skip();
      update(result.emplace());
    });
    return std::move(*result);
  }

  /// After a throw, `fit` and the step themselves call it: tells other ranks, and drops an open window.
  void abandon() {
    parallelism_.abandon(Stages{*this});
    reset_window();
  }
  /// Drops an open window: its gradients, and what it did to the buffers where a skipped step would undo that.
  void reset_window() {
    if constexpr (NonFinite::selects)
      if (window_open_) buffer_guard_.restore();
    window_open_ = false;
    parallelism_.reset();
    accumulation_.reset();
    execution_.reset();
    window_.reset();
    context_.reset();
    rule_.release();
    parameters_.release_gradients();
  }

  Model& model() { return *model_; }
  Objective& objective() { return objective_; }
  at::Device device() const { return parallelism_.device(); }
  const ParameterList& parameters() const { return parameters_; }
  const BufferList& buffers() const { return buffers_; }
  std::int64_t steps() const { return steps_; }                           ///< made, skipped ones included
  std::int64_t& next_epoch() { return epochs_; }                          ///< number of the epoch that `fit` begins
  const at::Tensor& skipped_steps() const { return verdict_.skipped(); }  ///< int64 scalar on the device
  Observers& observers() { return observers_; }
  NameTable& names() { return names_; }
  /// States of rule and policies: `rule().rates().scale(0.1)`, say.
  typename Rule::State& rule() { return rule_; }
  typename Precision::State& precision() { return precision_; }
  typename Parallelism::State& parallelism() { return parallelism_; }
  typename Accumulation::State& accumulation() { return accumulation_; }
  typename Checkpointing::State& checkpointing() { return checkpointing_; }
  typename Averaging::State& averaging() { return averaging_; }

 private:
  using Stages = detail::Stages<Trainer>;
  friend Stages;
  friend detail::TrainerState<Trainer>;

  /// Stages 1 to 4 of a step (stages.hpp): forward, count and backward, all under the parallelism policy's sync guard.
  template <class B>
  [[gnu::always_inline]] void micro_batch(const B& batch, bool closes) {
    if (!window_open_) begin_window();
    parallelism_.run(*model_, batch, closes, context_, Stages{*this});
  }

  /// Stages 5 to 10: from reduced gradients to the new state.
  [[gnu::always_inline]] void update(StepResult& result) {
    parallelism_.finish_reduction(window_);
    checkpointing_.end_step();
    const at::TensorList gradients = rule_.collect(precision_);
    const at::Tensor* divisor = window_.divisor(detail::loss_scale_of<Precision::scales_loss>(precision_));
    if constexpr (Clipping::measures_norm) clipping_.measure(gradients);
    const at::Tensor* found_inf = verdict_.template decide<PolicySetType>(
        window_, nonfinite_, detail::suspects<Clipping::measures_norm>(clipping_, gradients));
    divisor = clipping_.clip(gradients, divisor);
    if constexpr (Clipping::measures_norm) result.grad_norm = clipping_.norm();
    if constexpr (Observers::wants_gradients) divisor = rule_.expose(divisor);

    rule_.step(divisor, found_inf, found_inf ? &verdict_.applied() : nullptr);
    precision_.publish();
    if constexpr (Precision::scales_loss) verdict_.move_scale(window_, precision_);
    averaging_.update(found_inf);
    if constexpr (NonFinite::selects) buffer_guard_.restore(*found_inf);
    if (found_inf) result.skipped = found_inf->clone();
    if constexpr (!Observers::wants_gradients) rule_.release();

    window_open_ = false;
    window_.close(result);
    if (!context_.records().empty()) result.records = context_.records();
    result.index = steps_++;
    if (!idle_reported_) [[unlikely]]
      idle_reported_ = detail::report_idle(rule_.without_gradient(), parameters_);
  }

  void begin_window() {
    if (places_.moved() || (steps_ & 63) == 0) [[unlikely]]
      places_.check();
    parameters_.release_gradients();  // those of other passes than the step's
    window_open_ = true;
    parallelism_.begin_window();
    context_.records().restart();
    if constexpr (Observers::wants_gradients) rule_.release();
    if constexpr (NonFinite::selects) buffer_guard_.save();
    checkpointing_.begin_step();
  }

  template <class F>
  [[gnu::always_inline]] void guarded(F&& f) try {
    const auto math = precision_.math();
    f();
  } catch (...) {
    abandon();
    places_.check();  // a parameter that moved is the likelier cause: say that instead
    throw;
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
  detail::Places places_{parameters_, NonFinite::selects ? buffers_ : BufferList{},
                         parameters_are_fixed<PolicySetType, Rule>};
  std::int64_t steps_ = 0, epochs_ = 0;
  bool window_open_ = false, idle_reported_ = false;
};

template <class M, class Objective, class Rule, class P = Policies<>, class Observers = observe::Set<>>
Trainer(M&&, Objective, Rule, P = {}, Observers = {}, TrainerOptions = {})
    -> Trainer<detail::model_of<M>, Objective, Rule, P, Observers>;

}  // namespace v0_1
}  // namespace treadle
