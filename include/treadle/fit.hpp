// SPDX-License-Identifier: Apache-2.0
// The loop around the step: epochs, log points, evaluation and the reasons to stop. Reads device values at log points
// only.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/compatibility.hpp"
#include "treadle/error.hpp"
#include "treadle/fit_options.hpp"
#include "treadle/loader.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/meter.hpp"
#include "treadle/ranks_in_step.hpp"
#include "treadle/runtime/sink.hpp"
#include "treadle/runtime/wait_meter.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {

struct NoLoader {};

template <class Trainer>
class Fit {
 public:
  Fit(Trainer& trainer, const FitOptions& options)
      : trainer_(trainer), options_(options), ranks_(trainer.parallelism()) {
    if (options.epochs < 0 || options.max_steps < 0 || !(options.max_seconds >= 0))
      throw ConfigError(
          "treadle::Trainer::fit: epochs, max_steps and max_seconds must not be negative; 0 sets no limit.");
    if (options.epochs == 0 && options.max_steps == 0 && options.max_seconds == 0)
      throw ConfigError("treadle::Trainer::fit: there is no limit; set epochs, max_steps or max_seconds.");
    if (options.log_every < 1 || options.evaluate_every < 1)
      throw ConfigError("treadle::Trainer::fit: log_every and evaluate_every must be at least 1.");
    if (options.early_stop && options.early_stop->patience < 1)
      throw ConfigError("treadle::Trainer::fit: early_stop needs a patience of at least 1 epoch.");
    if (options.early_stop && !(options.early_stop->min_delta >= 0 && std::isfinite(options.early_stop->min_delta)))
      throw ConfigError("treadle::Trainer::fit: early_stop needs a min_delta that is finite and not negative.");
  }

  template <class Train, class Test>
  FitResult run(Train&& train, Test&& test) try {
    begin(train, !std::is_same_v<std::remove_cvref_t<Test>, NoLoader>);
    for (std::int64_t epoch = 0; !stop_ && (options_.epochs == 0 || epoch < options_.epochs); ++epoch) {
      train_epoch(train, epoch);
      const bool complete = !stop_;
      trainer_.check();
      if constexpr (!std::is_same_v<std::remove_cvref_t<Test>, NoLoader>) {
        const bool last = stop_ || epoch + 1 == options_.epochs;
        if (last || (epoch + 1) % options_.evaluate_every == 0) epoch_.test = trainer_.evaluate(test);
      }
      end_epoch(complete);
    }
    result_.stop_reason = stop_.value_or(StopReason::Finished);
    result_.seconds = since(begin_);
    static_cast<void>(trainer_.observers().on_fit_end(result_, ranks_.rank()));
    return std::move(result_);
  } catch (...) {
    trainer_.abandon();  // a loader or an observer may have thrown in the middle of a window
    throw;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  template <class Train>
  void begin(Train& train, bool evaluates) {
    begin_ = Clock::now();
    evaluates_ = evaluates;
    trainer_.check();
    if (!trainer_.model().is_training()) trainer_.model().train();
    trainer_.reset_window();
    const std::int64_t batches = batches_of(train);
    if (batches == 0 && !Trainer::Parallelism::processes) refuse_empty();
    const auto per_step = static_cast<std::int64_t>(trainer_.accumulation().batches_per_step());
    const auto steps_of = [&](std::int64_t b) {
      return b < 0 ? -1 : (b + (drops_tail() ? 0 : per_step - 1)) / per_step;
    };
    ranks_.require_same("epochs " + std::to_string(options_.epochs) + ", max_steps " +
                        std::to_string(options_.max_steps) + ", log_every " + std::to_string(options_.log_every) +
                        ", evaluate_every " + std::to_string(options_.evaluate_every) +
                        (evaluates ? " and a" : " and no") + " test loader");
    sought_ = ranks_.agree_on(sought_in(train));
    const std::int64_t planned = planned_ = ranks_.plan(steps_of(batches));
    if (planned == 0) batches == 0 ? refuse_empty() : refuse_tail(batches, per_step);
    const std::int64_t epoch_steps = std::max<std::int64_t>(planned, 0);
    std::int64_t total = 0;
    if (__builtin_mul_overflow(epoch_steps, options_.epochs, &total)) total = 0;  // as good as no limit
    if (sought_) {  // the first epoch is what is left of one
      trainer_.next_epoch() = sought_->epoch;
      const std::int64_t left = sought_->batch < 0 ? 0 : batches < 0 ? -1 : batches - sought_->batch;
      total = std::max<std::int64_t>(total - (planned - ranks_.plan(steps_of(left))), 0);
    }
    if (options_.max_steps > 0) total = total > 0 ? std::min(total, options_.max_steps) : options_.max_steps;
    auto& rates = trainer_.rule().rates();
    rates.check_run(total);
    if (!rates.planned() || rates.follows_run()) rates.plan(total);
    if constexpr (Trainer::Parallelism::processes)
      if (const auto odd = shard_text(train, ranks_.rank(), trainer_.parallelism().world_size()); !odd.empty())
        warn_of_this_rank(odd);
    skipped_before_ = read_skipped();
    observe::RunInfo info{.epochs = options_.epochs,
                          .steps_per_epoch = epoch_steps,
                          .total_steps = total,
                          .device = trainer_.device().str(),
                          .evaluates = evaluates};
    for (const auto& parameter : trainer_.parameters())
      if (parameter.model.requires_grad()) info.parameters += parameter.model.numel();
    if (!trainer_.observers().on_fit_begin(info, ranks_.rank())) wish(StopReason::Requested);
    agree_to_stop();
  }

  template <class Train>
  void train_epoch(Train& train, std::int64_t epoch) {
    epoch_ = {};
    epoch_.epoch = epoch;
    epoch_begin_ = log_begin_ = Clock::now();
    epoch_totals_ = {};
    step_in_epoch_ = rows_ = epoch_rows_ = 0;
    epoch_waited_ = 0;
    const bool whole = epoch > 0 || !sought_;
    if (epoch == 1 && sought_) ranks_.replan(planned_);
    const std::int64_t order = trainer_.next_epoch()++;
    const bool any = (whole || sought_->batch >= 0) && train_batches(train, order);
    if (!any && !Trainer::Parallelism::processes) refuse_empty();  // among several ranks one may well have none
    if (!stop_ && !drops_tail())
      if (auto done = trainer_.flush()) after_step(*done);
    if (trainer_.accumulation().open()) {
      trainer_.reset_window();
      if (!stop_ && ranks_.must_close()) after_step(trainer_.join());
    }
    while (!stop_ && ranks_.others_go_on(step_in_epoch_)) after_step(trainer_.join());
    log_point(/*tell=*/steps_since_log_ > 0);
    if (step_in_epoch_ == 0 && !stop_ && whole)
      any ? refuse_tail(-1, trainer_.accumulation().batches_per_step()) : refuse_empty();
    epoch_.rows_per_second = static_cast<double>(epoch_rows_) / std::max(since(epoch_begin_), 1e-9);
    epoch_.data_wait = epoch_waited_ / std::max(since(epoch_begin_), 1e-9);
    const bool waits = epoch_.data_wait > options_.warn_data_wait && since(epoch_begin_) >= 1;
    if (waits && !std::exchange(warned_, true)) warn(wait_text(epoch_.data_wait, train));
  }

  /// Trains on the batches of epoch `order`, and returns whether there was one.
  template <class Train>
  bool train_batches(Train& train, std::int64_t order) {
    bool any = false;
    if constexpr (reseedable_loader<Train>) train.set_epoch(order);
    for_each_batch<last_is_needed<typename Trainer::PolicyTypes>>(
        train,
        [&](const auto& batch, bool last) {
          any = true;
          if (!trainer_.accumulation().open()) ranks_.window_begins();
          rows_ += treadle::rows(batch);
          if (auto done = trainer_.accumulate(batch, last && !drops_tail())) after_step(*done);
          return !stop_;
        },
        wait_);
    return any;
  }

  void after_step(const StepResult& done) {
    meter_.add(done);
    ++result_.steps;
    ++step_in_epoch_;
    ++steps_since_log_;
    if (!trainer_.observers().on_step({done, epoch_.epoch, step_in_epoch_, result_.steps}, ranks_.rank()))
      wish(StopReason::Requested);
    if (options_.max_seconds > 0 && since(begin_) >= options_.max_seconds) wish(StopReason::MaxTime);
    if constexpr (!Trainer::Parallelism::processes) stop_ = wish_;  // else at the next log point, where all ranks are
    if (options_.max_steps > 0 && result_.steps >= options_.max_steps && !stop_) stop_ = StopReason::MaxSteps;
    if (steps_since_log_ >= options_.log_every) log_point(/*tell=*/true);
  }

  /// The only place in an epoch that reads from the device.
  void log_point(bool tell) {
    trainer_.check();
    const auto totals = ranks_.gather(meter_.take());
    epoch_totals_.add(totals);
    result_.skipped = read_skipped() - skipped_before_;
    const double seconds = std::max(since(log_begin_), 1e-9);
    epoch_rows_ += rows_;
    const double waited = wait_.take();
    epoch_waited_ += waited;
    if (tell) {
      observe::LogEvent event{.epoch = epoch_.epoch,
                              .step_in_epoch = step_in_epoch_,
                              .step = result_.steps,
                              .skipped = result_.skipped,
                              .metrics = totals.means(),
                              .learning_rate = trainer_.rule().rates().of(0).template item<float>(),  // sync: log point
                              .seconds = since(begin_),
                              .steps_per_second = static_cast<double>(steps_since_log_) / seconds,
                              .rows_per_second = static_cast<double>(rows_) / seconds,
                              .data_wait = waited / seconds};
      if constexpr (Trainer::Precision::scales_loss)
        event.loss_scale = trainer_.precision().loss_scale().template item<float>();  // sync: log point
      if (!trainer_.observers().on_log(event, ranks_.rank())) wish(StopReason::Requested);
    }
    agree_to_stop();
    steps_since_log_ = 0;
    rows_ = 0;
    log_begin_ = Clock::now();
  }

  void end_epoch(bool complete) {
    epoch_.step = result_.steps;
    epoch_.train = epoch_totals_.means();
    epoch_.seconds = since(epoch_begin_);
    if (complete) ++result_.epochs;
    result_.history.push_back(epoch_);
    if (!trainer_.observers().on_epoch(epoch_, ranks_.rank())) wish(StopReason::Requested);
    // With a test loader only evaluated epochs count, or test and training values would be compared.
    if (complete && options_.early_stop && (epoch_.test || !evaluates_)) early_stop(*options_.early_stop);
    agree_to_stop();
  }

  void early_stop(const EarlyStop& rule) {
    const Metrics& metrics = epoch_.test ? *epoch_.test : epoch_.train;
    // An epoch that counted nothing, all of its steps skipped say, judges nothing; a name that never comes is a
    // mistake.
    if (metrics.empty() || (judged_ && !metrics.find(rule.metric))) return;
    judged_ = true;
    const double value = metrics[rule.metric] * (rule.maximize ? -1 : 1);
    if (std::isfinite(value) && value < best_ - rule.min_delta) {
      best_ = value;
      epochs_without_ = 0;
    } else if (++epochs_without_ >= rule.patience) {
      wish(StopReason::EarlyStop);
    }
  }

  void wish(StopReason reason) {
    if (!wish_) wish_ = reason;
  }
  void agree_to_stop() {
    const auto agreed = ranks_.agree(wish_);
    if (!stop_) stop_ = agreed;
  }
  bool drops_tail() const {
    if constexpr (Trainer::Accumulation::drops_tail)
      return trainer_.accumulation().drop_tail();
    else
      return false;
  }
  std::int64_t read_skipped() const {
    return trainer_.skipped_steps().template item<std::int64_t>();
  }  // sync: log point
  [[noreturn]] static void refuse_tail(std::int64_t batches, std::int64_t per_step) {
    throw DataError("treadle::Trainer::fit: an epoch " +
                    (batches < 0 ? std::string() : "of " + std::to_string(batches) + " batches ") +
                    "makes no step, because it is shorter than a window of " + std::to_string(per_step) +
                    " batches, which accumulation::Tail::Drop drops; use Tail::Step, or fewer batches a step.");
  }
  [[noreturn]] static void refuse_empty() {
    throw DataError("treadle::Trainer::fit: the training loader gave no batch; it needs at least one an epoch.");
  }

  Trainer& trainer_;
  FitOptions options_;
  RanksOf<Trainer> ranks_;
  FitResult result_;
  observe::Meter meter_;
  observe::Totals epoch_totals_;
  observe::EpochEvent epoch_;
  std::optional<StopReason> wish_;  // of this rank
  std::optional<StopReason> stop_;  // of all
  std::optional<Begin> sought_;     // where the first epoch begins; none: at its beginning
  std::int64_t planned_ = 0;        // steps of a whole epoch
  Clock::time_point begin_, epoch_begin_, log_begin_;
  std::int64_t step_in_epoch_ = 0;
  std::int64_t steps_since_log_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t epoch_rows_ = 0;
  std::int64_t skipped_before_ = 0;
  std::int64_t epochs_without_ = 0;
  bool evaluates_ = false;
  bool judged_ = false;
  bool warned_ = false;
  WaitMeter wait_{trainer_.device()};
  double epoch_waited_ = 0;
  double best_ = std::numeric_limits<double>::infinity();
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
