// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules as values, tabulated on the host once. No torch here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// A learning rate as a factor on the base rate, by applied step: `factor(t)` for t = 0, 1, ...
///
/// Made by the functions in `treadle::schedule`. A decaying schedule needs a horizon: its own `steps`, or the steps
/// that `fit` is going to make. From the horizon on the factor is the schedule's last value exactly.
struct Schedule {
  enum class Kind { Constant, Linear, Cosine, Step, Polynomial, OneCycle, WarmupStableDecay, Table, Chain };

  Kind kind = Kind::Constant;
  std::int64_t steps = 0;   ///< horizon in applied steps; 0 takes it from `fit`
  std::int64_t warmup = 0;  ///< steps of linear warm-up: factor (t + 1) / (warmup + 1)
  double floor = 0.0;       ///< last factor of a decaying schedule
  double power = 1.0;       ///< Polynomial
  std::int64_t every = 1;   ///< Step: steps between drops
  double gamma = 0.1;       ///< Step: factor at each drop
  double rise = 0.3;        ///< OneCycle: share of the horizon spent rising; WarmupStableDecay: share spent decaying
  double initial_divisor = 25;    ///< OneCycle: first factor is 1 / this
  double final_divisor = 1e4;     ///< OneCycle: last factor is first / this
  std::vector<double> table{};    ///< Table: the factors
  std::vector<Schedule> parts{};  ///< Chain: one after the other, all but the last with `steps`

  bool operator==(const Schedule&) const = default;

  /// Whether the factor is 1 for ever.
  bool constant() const { return kind == Kind::Constant && warmup == 0; }

  /// Whether a horizon is needed that the schedule does not know itself.
  bool needs_horizon() const {
    switch (kind) {
      case Kind::Constant:
      case Kind::Table:
        return false;
      case Kind::Chain:
        return !parts.empty() && parts.back().needs_horizon();
      default:
        return steps == 0;
    }
  }

  /// Throws `ConfigError` if a value is out of range.
  void check() const {
    const auto refuse = [](const std::string& why) { throw ConfigError("treadle::schedule: " + why); };
    if (steps < 0 || warmup < 0) refuse("steps and warmup must not be negative.");
    if (steps > most_steps || warmup > most_steps) refuse_length(std::max(steps, warmup));
    if (!(floor >= 0 && floor <= 1)) refuse("floor must lie in [0, 1]; it is a factor on the learning rate.");
    if (kind == Kind::Polynomial && !(power > 0 && std::isfinite(power)))
      refuse("polynomial: power must be positive and finite.");
    if (kind == Kind::Step && (every < 1 || !(gamma > 0 && std::isfinite(gamma))))
      refuse("step: every must be at least 1 and gamma positive and finite.");
    if (kind == Kind::OneCycle && !(rise > 0 && rise < 1)) refuse("one_cycle: rise must lie between 0 and 1.");
    if (kind == Kind::OneCycle &&
        !(initial_divisor >= 1 && final_divisor >= 1 && std::isfinite(initial_divisor) && std::isfinite(final_divisor)))
      refuse("one_cycle: initial_divisor and final_divisor must be at least 1 and finite.");
    if (kind == Kind::WarmupStableDecay && !(rise > 0 && rise <= 1))
      refuse("warmup_stable_decay: decay must lie in (0, 1]; it is the share of the run spent decaying.");
    if (kind == Kind::Table && table.empty()) refuse("table: give at least one factor.");
    for (const double one : table)
      if (kind == Kind::Table && !(one >= 0 && std::isfinite(one)))
        refuse("table: every factor must be finite and not negative.");
    if (kind == Kind::Chain) {
      if (parts.empty()) refuse("chain: give at least one schedule.");
      for (std::size_t i = 0; i < parts.size(); ++i) {
        parts[i].check();
        if (parts[i].kind == Kind::Chain) refuse("chain: a chain cannot hold another chain.");
        if (i + 1 < parts.size() && parts[i].steps < 1 && parts[i].kind != Kind::Table)
          refuse("chain: every schedule but the last needs its steps.");
      }
    }
    if (steps > 0 && warmup >= steps) refuse_warmup(steps);
  }

  /// Throws `ConfigError` if a run of `run_steps` would end before the warm-up does.
  void check_run(std::int64_t run_steps) const {
    const auto& first = kind == Kind::Chain && !parts.empty() ? parts.front() : *this;
    if (run_steps > 0 && first.warmup >= run_steps && first.warmup > 0) first.refuse_warmup(run_steps);
  }

  /// The factors for steps 0 to the horizon; the last entry holds for ever after. `run_steps` is the length of the run,
  /// 0 if unknown. Throws `ConfigError` for a decaying schedule without a horizon and a warm-up that outlasts it.
  std::vector<double> tabulate(std::int64_t run_steps) const {
    if (kind == Kind::Table) return table;
    if (kind == Kind::Chain) return tabulate_chain(run_steps);
    std::int64_t horizon = steps > 0 ? steps : run_steps;
    if (needs_horizon() && horizon <= 0)
      throw ConfigError(
          "treadle::schedule: a decaying schedule needs to know its length; set its steps, or use fit with "
          "epochs and a loader of known size, or max_steps.");
    if (kind == Kind::Constant && horizon <= 0) horizon = warmup + 1;
    if (horizon > most_steps + 1) refuse_length(horizon);
    if (warmup >= horizon && warmup > 0 && !(kind == Kind::Constant && run_steps <= 0 && steps == 0))
      refuse_warmup(horizon);
    std::vector<double> factors(static_cast<std::size_t>(horizon) + 1);
    for (std::int64_t t = 0; t <= horizon; ++t) factors[static_cast<std::size_t>(t)] = factor(t, horizon);
    return factors;
  }

 private:
  static constexpr std::int64_t most_steps = 1'000'000'000;  // 12 GB of factors while the table is made

  [[noreturn]] static void refuse_length(std::int64_t length) {
    throw ConfigError("treadle::schedule: a schedule of " + std::to_string(length) +
                      " steps is too long, because it is tabulated; steps and warmup can be at most 1000000000.");
  }
  [[noreturn]] void refuse_warmup(std::int64_t horizon) const {
    throw ConfigError("treadle::schedule: a warm-up of " + std::to_string(warmup) +
                      " steps does not fit into a run of " + std::to_string(horizon) +
                      "; shorten the warm-up or train longer.");
  }

  double factor(std::int64_t t, std::int64_t horizon) const {
    if (kind == Kind::OneCycle) return one_cycle(t, horizon);
    if (t < warmup) return static_cast<double>(t + 1) / static_cast<double>(warmup + 1);
    const auto done = static_cast<double>(t - warmup);
    const auto length = static_cast<double>(horizon - warmup);
    const double progress = length > 0 ? done / length : 1.0;
    switch (kind) {
      case Kind::Linear:
        return t >= horizon ? floor : 1.0 + (floor - 1.0) * progress;
      case Kind::Cosine:
        return t >= horizon ? floor : floor + (1.0 - floor) * (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
      case Kind::Polynomial:
        return t >= horizon ? floor : floor + (1.0 - floor) * std::pow(1.0 - progress, power);
      case Kind::Step:
        return std::pow(gamma, static_cast<double>((t - warmup) / every));
      case Kind::WarmupStableDecay: {
        const double decay_length = rise * static_cast<double>(horizon);
        const double decay_start = static_cast<double>(horizon) - decay_length;
        if (t >= horizon) return floor;
        const auto now = static_cast<double>(t);
        return now < decay_start ? 1.0 : 1.0 + (floor - 1.0) * (now - decay_start) / decay_length;
      }
      default:
        return 1.0;
    }
  }

  // Cosine up and cosine down between the same step numbers as torch.optim.lr_scheduler.OneCycleLR (its last step is
  // horizon - 1), without momentum cycling.
  double one_cycle(std::int64_t t, std::int64_t horizon) const {
    const double initial = 1.0 / initial_divisor;
    const double last = initial / final_divisor;
    const auto anneal = [](double from, double to, double share) {
      return to + (from - to) / 2.0 * (std::cos(std::numbers::pi * share) + 1.0);
    };
    const double up = rise * static_cast<double>(horizon) - 1.0;
    const double end = static_cast<double>(horizon) - 1.0;
    const auto now = static_cast<double>(t);
    if (now >= end) return last;
    if (now <= up && up > 0) return anneal(initial, 1.0, now / up);
    return anneal(1.0, last, (now - up) / (end - up));
  }

  std::vector<double> tabulate_chain(std::int64_t run_steps) const {
    std::vector<double> factors;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool last = i + 1 == parts.size();
      const auto used = static_cast<std::int64_t>(factors.size());
      if (last && run_steps > 0 && run_steps <= used)
        throw ConfigError("treadle::schedule: the first schedules of a chain take " + std::to_string(used) +
                          " steps, which is all of a run of " + std::to_string(run_steps) + "; shorten them.");
      auto part = parts[i].tabulate(last && run_steps > 0 ? run_steps - used : 0);
      if (!last && parts[i].kind != Kind::Table) part.resize(static_cast<std::size_t>(parts[i].steps));
      factors.insert(factors.end(), part.begin(), part.end());
    }
    return factors;
  }
};

namespace schedule {

/// The base rate for ever, after `warmup` steps of linear warm-up.
struct Constant {
  std::int64_t warmup = 0;
  std::int64_t steps = 0;  ///< as a part of a chain: how long it lasts
};
inline Schedule constant(Constant o = {}) {
  return {.kind = Schedule::Kind::Constant, .steps = o.steps, .warmup = o.warmup};
}

/// Options of the decaying schedules: horizon (0: from `fit`), warm-up steps, last factor.
struct Decay {
  std::int64_t steps = 0;
  std::int64_t warmup = 0;
  double floor = 0.0;
};
/// A straight line from 1 to `floor` after the warm-up.
inline Schedule linear(Decay o = {}) {
  return {.kind = Schedule::Kind::Linear, .steps = o.steps, .warmup = o.warmup, .floor = o.floor};
}
/// Half a cosine from 1 to `floor` after the warm-up.
inline Schedule cosine(Decay o = {}) {
  return {.kind = Schedule::Kind::Cosine, .steps = o.steps, .warmup = o.warmup, .floor = o.floor};
}

/// Options of `polynomial`: as `Decay`, with the power.
struct Polynomial {
  std::int64_t steps = 0;
  std::int64_t warmup = 0;
  double floor = 0.0;
  double power = 1.0;
};
/// floor + (1 - floor) x (1 - progress)^power after the warm-up.
inline Schedule polynomial(Polynomial o = {}) {
  return {.kind = Schedule::Kind::Polynomial, .steps = o.steps, .warmup = o.warmup, .floor = o.floor, .power = o.power};
}

/// Options of `step`: the factor is multiplied by `gamma` every `every` steps after the warm-up.
struct Step {
  std::int64_t every = 1;
  double gamma = 0.1;
  std::int64_t steps = 0;
  std::int64_t warmup = 0;
};
/// gamma^floor((t - warmup) / every).
inline Schedule step(Step o) {
  return {.kind = Schedule::Kind::Step, .steps = o.steps, .warmup = o.warmup, .every = o.every, .gamma = o.gamma};
}

/// Options of `one_cycle`, with PyTorch's names in `rise` (pct_start), `initial_divisor` and `final_divisor`.
struct OneCycle {
  std::int64_t steps = 0;
  double rise = 0.3;
  double initial_divisor = 25;
  double final_divisor = 1e4;
};
/// Up to the base rate and down again by cosines, as PyTorch's OneCycleLR without momentum cycling.
inline Schedule one_cycle(OneCycle o = {}) {
  return {.kind = Schedule::Kind::OneCycle,
          .steps = o.steps,
          .rise = o.rise,
          .initial_divisor = o.initial_divisor,
          .final_divisor = o.final_divisor};
}

/// Options of `warmup_stable_decay`: `decay` is the share of the horizon spent on the straight line down to `floor`.
struct WarmupStableDecay {
  std::int64_t steps = 0;
  std::int64_t warmup = 0;
  double decay = 0.2;
  double floor = 0.0;
};
/// Linear warm-up, then the base rate, then a straight line to `floor`.
inline Schedule warmup_stable_decay(WarmupStableDecay o = {}) {
  return {.kind = Schedule::Kind::WarmupStableDecay,
          .steps = o.steps,
          .warmup = o.warmup,
          .floor = o.floor,
          .rise = o.decay};
}

/// Any factors at all, one a step; the last one holds for ever.
inline Schedule table(std::vector<double> factors) {
  return {.kind = Schedule::Kind::Table, .table = std::move(factors)};
}

/// One schedule after the other; all but the last need `steps`, and each starts its own count at 0.
inline Schedule chain(std::vector<Schedule> parts) {
  return {.kind = Schedule::Kind::Chain, .parts = std::move(parts)};
}

}  // namespace schedule
}  // namespace v0_1
}  // namespace treadle
