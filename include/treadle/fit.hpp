// SPDX-License-Identifier: Apache-2.0
// The loop around the step: epochs, log points, evaluation and the reasons to stop. Reads device values at log points
// only.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/compatibility.hpp"
#include "treadle/fit_options.hpp"
#include "treadle/fit_progress.hpp"
#include "treadle/loader.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/ranks_in_step.hpp"
#include "treadle/runtime/sink.hpp"
#include "treadle/runtime/wait_meter.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {

struct NoLoader {};

template <class Trainer, class Snapshots>
class Fit {
 public:
  Fit(Trainer& trainer, const FitOptions& options, Snapshots& snapshots)
      : trainer_(trainer), options_(options), snapshots_(snapshots), ranks_(trainer.parallelism()) {
    options.check();
  }

  template <class Train, class Test>
  FitResult run(Train&& train, Test&& test) try {
    begin(train, !std::is_same_v<std::remove_cvref_t<Test>, NoLoader>);
    while (!stop_ && (options_.epochs == 0 || now_.epoch < options_.epochs)) {
      train_epoch(train);
      trainer_.check();
      if constexpr (!std::is_same_v<std::remove_cvref_t<Test>, NoLoader>) evaluate(train, test);
      end_epoch(train);
    }
    result_.stop_reason = stop_.value_or(StopReason::Finished);
    result_.seconds = since(begin_);
    if constexpr (Snapshots::saves) snapshots_.end(trainer_, train, now_);
    static_cast<void>(trainer_.observers().on_fit_end(result_, ranks_.rank()));
    return std::move(result_);
  } catch (...) {
    if constexpr (Snapshots::saves) snapshots_.fail();
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
    bool resumes = false;
    if constexpr (Snapshots::saves) resumes = snapshots_.begin(trainer_, train, ranks_, now_, sought_);
    if (!resumes) sought_ = ranks_.agree_on(sought_in(train));
    first_epoch_ = now_.epoch;
    const std::int64_t planned = planned_ = ranks_.plan(steps_of(batches));
    if (planned == 0) batches == 0 ? refuse_empty() : refuse_tail(batches, per_step);
    const std::int64_t epoch_steps = std::max<std::int64_t>(planned, 0);
    std::int64_t total = 0;
    if (__builtin_mul_overflow(epoch_steps, options_.epochs, &total)) total = 0;  // as good as no limit
    if (sought_) trainer_.next_epoch() = sought_->epoch;
    if (sought_ && !resumes) {  // the first epoch is what is left of one
      const std::int64_t left = sought_->batch < 0 ? 0 : batches < 0 ? -1 : batches - sought_->batch;
      total = std::max<std::int64_t>(total - (planned - ranks_.plan(steps_of(left))), 0);
    }
    if (options_.max_steps > 0) total = total > 0 ? std::min(total, options_.max_steps) : options_.max_steps;
    auto& rates = trainer_.rule().rates();
    if (!resumes) {  // else the schedule goes on as it was planned
      rates.check_run(total);
      if (!rates.planned() || rates.follows_run()) rates.plan(total);
      now_.skipped_before = read_skipped();
    }
    if constexpr (Trainer::Parallelism::processes)
      if (const auto odd = shard_text(train, ranks_.rank(), trainer_.parallelism().world_size()); !odd.empty())
        warn_of_this_rank(odd);
    observe::RunInfo info{.epochs = options_.epochs,
                          .steps_per_epoch = epoch_steps,
                          .total_steps = total,
                          .steps_before = result_.steps,
                          .device = trainer_.device().str(),
                          .evaluates = evaluates};
    for (const auto& parameter : trainer_.parameters())
      if (parameter.model.requires_grad()) info.parameters += parameter.model.numel();
    if (!trainer_.observers().on_fit_begin(info, ranks_.rank())) wish(StopReason::Requested);
    agree_to_stop();
  }

  template <class Train>
  void train_epoch(Train& train) {
    epoch_ = {};
    epoch_.epoch = now_.epoch;
    epoch_begin_ = log_begin_ = Clock::now();
    epoch_waited_ = 0;
    const bool whole = now_.epoch > first_epoch_ || !sought_;
    if (now_.epoch == first_epoch_ + 1 && sought_) ranks_.replan(planned_);
    const std::int64_t order = trainer_.next_epoch()++;
    now_.place = Place::InEpoch;
    const bool any = (whole || sought_->batch >= 0) && train_batches(train, order, whole ? 0 : sought_->batch);
    if (!any && whole && !Trainer::Parallelism::processes)
      refuse_empty();  // among several ranks one may well have none
    if (!stop_ && !drops_tail())
      if (auto done = trainer_.flush()) after_step(train, *done);
    if (trainer_.accumulation().open()) {
      trainer_.reset_window();
      if (!stop_ && ranks_.must_close()) after_step(train, trainer_.join());
    }
    while (!stop_ && ranks_.others_go_on(now_.step_in_epoch)) after_step(train, trainer_.join());
    log_point(/*tell=*/now_.steps_since_log > 0);
    if (!stop_) now_.place = Place::EpochOver;
    if (now_.step_in_epoch == 0 && !stop_ && whole)
      any ? refuse_tail(-1, trainer_.accumulation().batches_per_step()) : refuse_empty();
    epoch_.rows_per_second = static_cast<double>(now_.rows_in_epoch) / std::max(since(epoch_begin_), 1e-9);
    epoch_.data_wait = epoch_waited_ / std::max(since(epoch_begin_), 1e-9);
    const bool waits = epoch_.data_wait > options_.warn_data_wait && since(epoch_begin_) >= 1;
    if (waits && !std::exchange(warned_, true)) warn(wait_text(epoch_.data_wait, train));
  }

  /// Trains on the batches of epoch `order` from batch `first` on, and returns whether there was one.
  template <class Train>
  bool train_batches(Train& train, std::int64_t order, std::int64_t first) {
    bool any = false;
    if constexpr (reseedable_loader<Train>) train.set_epoch(order);
    const auto train_batch = [&](const auto& batch, bool last) {
      any = true;
      if (!trainer_.accumulation().open()) ranks_.window_begins();
      now_.rows_since_log += treadle::rows(batch);
      ++now_.batches_in_epoch;
      if (auto done = trainer_.accumulate(batch, last && !drops_tail())) after_step(train, *done);
      return !stop_;
    };
    using TakesLast = typename Trainer::PolicyTypes;
    if constexpr (Snapshots::saves) {
      auto&& rest = rest_of(train, first);
      for_each_batch<last_is_needed<TakesLast>>(rest, train_batch, snapshots_.waiting(wait_));
      if (snapshots_.gave_up_waiting()) give_up(train);
    } else {
      for_each_batch<last_is_needed<TakesLast>>(train, train_batch, wait_);
    }
    return any;
  }

  template <class Train>
  void after_step(Train& train, const StepResult& done) {
    now_.meter.add(done);
    ++result_.steps;
    ++now_.step_in_epoch;
    ++now_.steps_since_log;
    if (!trainer_.observers().on_step({done, epoch_.epoch, now_.step_in_epoch, result_.steps}, ranks_.rank()))
      wish(StopReason::Requested);
    if (options_.max_seconds > 0 && since(begin_) >= options_.max_seconds) wish(StopReason::MaxTime);
    if constexpr (Snapshots::saves)
      if (snapshots_.interrupted()) wish(StopReason::Signal);
    if constexpr (!Trainer::Parallelism::processes) stop_ = wish_;  // else at the next log point, where all ranks are
    if (options_.max_steps > 0 && result_.steps >= options_.max_steps && !stop_) stop_ = StopReason::MaxSteps;
    if (now_.steps_since_log >= options_.log_every) log_point(/*tell=*/true);
    if constexpr (Snapshots::saves) {
      if (Trainer::Parallelism::processes && !stop_ && snapshots_.asks_ranks(result_.steps, since(begin_)))
        agree_to_stop();
      snapshots_.step_done(trainer_, train, now_, stop_.has_value());
    }
  }

  /// The only place in an epoch that reads from the device.
  void log_point(bool tell) {
    trainer_.check();
    const auto totals = ranks_.gather(now_.meter.take());
    now_.epoch_totals.add(totals);
    result_.skipped = read_skipped() - now_.skipped_before;
    const double seconds = std::max(since(log_begin_), 1e-9);
    now_.rows_in_epoch += now_.rows_since_log;
    const double waited = wait_.take();
    epoch_waited_ += waited;
    if (tell) {
      observe::LogEvent event{.epoch = epoch_.epoch,
                              .step_in_epoch = now_.step_in_epoch,
                              .step = result_.steps,
                              .skipped = result_.skipped,
                              .metrics = totals.means(),
                              .learning_rate = trainer_.rule().rates().of(0).template item<float>(),  // sync: log point
                              .seconds = since(begin_),
                              .steps_per_second = static_cast<double>(now_.steps_since_log) / seconds,
                              .rows_per_second = static_cast<double>(now_.rows_since_log) / seconds,
                              .data_wait = waited / seconds};
      if constexpr (Trainer::Precision::scales_loss)
        event.loss_scale = trainer_.precision().loss_scale().template item<float>();  // sync: log point
      if (!trainer_.observers().on_log(event, ranks_.rank())) wish(StopReason::Requested);
    }
    agree_to_stop();
    now_.steps_since_log = 0;
    now_.rows_since_log = 0;
    log_begin_ = Clock::now();
  }

  template <class Train, class Test>
  void evaluate(Train& train, Test& test) {
    const bool last = stop_ || now_.epoch + 1 == options_.epochs;
    if (stop_ == StopReason::Signal || !(last || (now_.epoch + 1) % options_.evaluate_every == 0)) return;
    if constexpr (Snapshots::saves) {
      auto metrics = trainer_.evaluate(test, {.interrupt = &snapshots_.interruption()});
      if (snapshots_.interrupted()) wish(StopReason::Signal);
      agree_to_stop();
      if (stop_ == StopReason::Signal) return snapshots_.step_done(trainer_, train, now_, true);
      epoch_.test = std::move(metrics);
    } else {
      epoch_.test = trainer_.evaluate(test);
    }
  }

  template <class Train>
  void end_epoch(Train& train) {
    const bool complete = !stop_;
    epoch_.step = result_.steps;
    epoch_.train = now_.epoch_totals.means();
    epoch_.seconds = since(epoch_begin_);
    result_.history.push_back(epoch_);
    if (!trainer_.observers().on_epoch(epoch_, ranks_.rank())) wish(StopReason::Requested);
    // With a test loader only evaluated epochs count, or test and training values would be compared.
    if (complete && options_.early_stop && (epoch_.test || !evaluates_) &&
        now_.early_stopping.ends(*options_.early_stop, epoch_.test ? *epoch_.test : epoch_.train))
      wish(StopReason::EarlyStop);
    agree_to_stop();
    if (!complete) return;
    now_.next_epoch();
    if constexpr (Snapshots::saves) snapshots_.epoch_done(trainer_, train, now_, epoch_);
  }

  /// The wait for a batch has lasted too long after a signal: what an open window has taken in is dropped.
  template <class Train>
  void give_up(Train& train) {
    wish(StopReason::Signal);
    agree_to_stop();
    const bool dropped = trainer_.accumulation().open();
    trainer_.reset_window();
    if (stop_ == StopReason::Signal) snapshots_.step_done(trainer_, train, now_, true, dropped);
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
  // sync: log point
  std::int64_t read_skipped() const { return trainer_.skipped_steps().template item<std::int64_t>(); }

  Trainer& trainer_;
  FitOptions options_;
  Snapshots& snapshots_;
  RanksOf<Trainer> ranks_;
  FitProgress now_;
  FitResult& result_ = now_.result;
  observe::EpochEvent epoch_;
  std::optional<StopReason> wish_;  // of this rank
  std::optional<StopReason> stop_;  // of all
  std::optional<Begin> sought_;     // where the first epoch begins; none: at its beginning
  std::int64_t first_epoch_ = 0;    // of this process, where a run goes on
  std::int64_t planned_ = 0;        // steps of a whole epoch
  Clock::time_point begin_, epoch_begin_, log_begin_;
  bool evaluates_ = false, warned_ = false;
  WaitMeter wait_{trainer_.device()};
  double epoch_waited_ = 0;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
