// SPDX-License-Identifier: Apache-2.0
// The learning rates of all groups as device tensors, moved by applied steps only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/optim/schedule.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// One fp32 learning rate a group, at a fixed address; a schedule is a table indexed by the applied steps, whose memory
/// stays in its place until `plan` needs more of it.
class LearningRate {
 public:
  LearningRate(Schedule schedule, std::vector<double> base_rates, at::Device device)
      : schedule_(std::move(schedule)),
        base_rates_(std::move(base_rates)),
        rates_(at::zeros({1, static_cast<std::int64_t>(base_rates_.size())}, at::device(device).dtype(at::kFloat))),
        position_(at::zeros({1}, at::device(device).dtype(at::kLong))) {
    for (std::size_t g = 0; g < base_rates_.size(); ++g)
      views_.push_back(rates_.select(0, 0).select(0, static_cast<std::int64_t>(g)));
    if (schedule_.constant() || !schedule_.needs_horizon()) plan(0);
  }

  /// Tabulates the schedule for a run of `run_steps` (0: unknown) that starts now, in place unless the table is longer
  /// than every one before. Throws `ConfigError` where the schedule does not fit.
  void plan(std::int64_t run_steps) {
    set_table(schedule_.tabulate(run_steps));
    position_.zero_();
    run_steps_ = run_steps;
    planned_ = true;
  }
  bool planned() const { return planned_; }
  /// Throws `ConfigError` if a run of `run_steps` from here is too short for the schedule; reads the position.
  void check_run(std::int64_t run_steps) const {
    const bool goes_on = run_steps > 0 && planned_ && !follows_run();
    const auto done = goes_on ? position_.item<std::int64_t>() : 0;  // sync: once, where a fit begins
    schedule_.check_run(run_steps + done);
  }
  /// Whether `fit` sets the horizon, so that each `fit` starts the schedule anew.
  bool follows_run() const { return schedule_.needs_horizon(); }
  bool constant() const { return last_ == 0; }

  /// Looks up the rates of the step that is about to be made.
  [[gnu::always_inline]] void look_up() {
    if (constant()) return;
    at::index_select_out(rates_, table_, 0, at::clamp_max(position_, last_));
  }
  /// Moves on if `applied` (int64, one element) is 1, or always where it is null.
  [[gnu::always_inline]] void advance(const at::Tensor* applied) {
    if (constant()) return;
    if (applied)
      position_.add_(*applied);
    else
      position_.add_(1);
  }

  /// The rate of group `g`: fp32, one element.
  const at::Tensor& of(std::size_t g) const { return views_[g]; }

  /// Multiplies every rate, now and for the rest of the schedule. Throws `ConfigError` for a factor that is negative or
  /// not finite.
  void scale(double factor) {
    if (!(factor >= 0) || !std::isfinite(factor))
      throw ConfigError("optim::LearningRate::scale: the factor must be finite and not negative, such as 0.1.");
    for (auto& rate : base_rates_) rate *= factor;
    rates_.mul_(factor);
    restored();
  }

  template <class Visitor>
  void for_each_state(Visitor&& visit) {
    visit("schedule_position", position_);
    visit("learning_rates", rates_);
  }
  /// The host's part of the state.
  template <class Visitor>
  void for_each_value(Visitor&& visit) {
    visit("schedule", schedule_);
    visit("base_rates", base_rates_);
    visit("run_steps", run_steps_);
    visit("planned", planned_);
  }
  /// After both were written to: makes the table that belongs to them.
  void restored() {
    if (!planned_) return;
    const auto now = rates_.clone();
    set_table(schedule_.tabulate(run_steps_));
    rates_.copy_(now);
  }

 private:
  void set_table(const std::vector<double>& factors) {
    std::vector<float> values;
    for (const double factor : factors)
      for (const double base : base_rates_) values.push_back(static_cast<float>(base * factor));
    const auto steps = static_cast<std::int64_t>(factors.size());
    const auto groups = static_cast<std::int64_t>(base_rates_.size());
    last_ = schedule_.constant() ? 0 : steps - 1;
    auto host = at::from_blob(values.data(), {steps, groups}, at::kFloat);
    rates_.copy_(host.narrow(0, 0, 1));
    if (last_ == 0) return;
    if (!table_.defined() || table_.size(0) < steps) {
      table_ = host.to(rates_.device(), /*non_blocking=*/false, /*copy=*/true);
      return;
    }
    table_.narrow(0, 0, steps).copy_(host);
    table_.narrow(0, steps, table_.size(0) - steps).copy_(host.narrow(0, steps - 1, 1));  // the last holds for ever
  }

  Schedule schedule_;
  std::vector<double> base_rates_;
  at::Tensor rates_;
  std::vector<at::Tensor> views_;
  at::Tensor table_;
  at::Tensor position_;
  std::int64_t last_ = 0;
  std::int64_t run_steps_ = 0;  // that it was planned for
  bool planned_ = false;
};

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
