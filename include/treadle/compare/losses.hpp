// SPDX-License-Identifier: Apache-2.0
// What has to agree before anything is timed: the losses of the first steps.
#pragma once

#include <ATen/Context.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/precision/fp32.hpp"
#include "treadle/precision/tf32.hpp"
#include "treadle/step_result.hpp"

namespace treadle {
inline namespace v0_1 {

/// What `compare` does about losses that differ by more than the tolerance.
enum class Disagreement {
  Throw,  ///< `Error`, before anything is timed
  Warn    ///< a warning and a mark in the table
};

/// Options of `compare`.
struct CompareOptions {
  std::uint64_t seed = 1;           ///< of the weights and of each step's random numbers
  std::int64_t check_steps = 5;     ///< first steps whose losses are compared
  double tolerance = 0;             ///< relative; 0: 1e-4, or 1e-2 with TF32, or 5e-2 with a 16-bit precision
  std::int64_t blocks = 7;          ///< timed blocks of each combination, in turn
  double block_seconds = 0.2;       ///< how long a block of the first combination is to take
  std::int64_t warmup_steps = 3;    ///< steps of each combination before the first block
  std::int64_t batches = 32;        ///< first batches of the loader, which are kept and used over and over
  std::int64_t run_steps = 10'000;  ///< the length of run that a schedule without one of its own is planned for
  Disagreement on_disagreement = Disagreement::Throw;
  bool print = true;  ///< writes the table to the sink

  /// Throws `ConfigError` for a value out of its range.
  void check() const {
    if (check_steps < 1 || blocks < 1 || batches < 1 || run_steps < 1)
      throw ConfigError("treadle::compare: check_steps, blocks, batches and run_steps must be at least 1.");
    if (!(tolerance >= 0) || !(block_seconds >= 0) || warmup_steps < 0)
      throw ConfigError("treadle::compare: tolerance, block_seconds and warmup_steps must not be negative.");
  }
};

namespace detail {

/// A trainer as `make` returns it, which is neither copied nor moved, ready for its first step.
template <class Make, class Set>
struct Contestant {
  Contestant(Make& make, const Set& set, const CompareOptions& options)
      : trainer((at::manual_seed(options.seed), make(set))) {
    auto& rates = trainer.rule().rates();
    if (!rates.planned() || rates.follows_run()) rates.plan(options.run_steps);
    if (!trainer.model().is_training()) trainer.model().train();
  }
  std::invoke_result_t<Make&, const Set&> trainer;
};

/// One step from `batches[position]` on; moves `position`.
template <class Trainer, class B>
StepResult next_step(Trainer& trainer, const std::vector<B>& batches, std::size_t& position) {
  for (;;)
    if (auto done = trainer.accumulate(batches[position++ % batches.size()])) return std::move(*done);
}

/// Losses of the first steps. A step that the loss scale skips is made again, since it has changed nothing else, and
/// each begins at a seed of its own, so that one combination's random numbers are not shifted against another's.
template <class Trainer, class B>
std::vector<double> first_losses(Trainer& trainer, const std::vector<B>& batches, const CompareOptions& options) {
  std::vector<double> losses;
  std::size_t position = 0;
  for (std::int64_t i = 0; i < options.check_steps; ++i) {
    const auto begin = position;
    for (int attempt = 0; attempt < 64; ++attempt) {
      at::manual_seed(options.seed + 1 + static_cast<std::uint64_t>(i));
      position = begin;
      const StepResult done = next_step(trainer, batches, position);
      if (attempt == 0) losses.emplace_back();
      losses.back() = done.loss.template item<double>();
      if (!done.skipped.defined() || done.skipped.template item<float>() == 0) break;
    }
  }
  trainer.check();
  return losses;
}

/// The mean loss of the first `count` batches at the first weights: what combinations with windows of different
/// lengths have in common.
template <class Trainer, class B>
double frozen_loss(Trainer& trainer, const std::vector<B>& batches, std::int64_t count, const CompareOptions& options) {
  trainer.rule().rates().scale(0);
  at::manual_seed(options.seed + 1);
  double sum = 0, weight = 0;
  for (std::size_t position = 0; position < static_cast<std::size_t>(count);) {
    const StepResult done = next_step(trainer, batches, position);
    const double rows = done.device_count.defined() ? done.device_count.template item<double>() : done.count;
    if (rows == 0) continue;
    sum += rows * done.loss.template item<double>();
    weight += rows;
  }
  return sum / weight;
}

template <class Precision>
inline constexpr double loss_tolerance = std::same_as<Precision, precision::Fp32>   ? 1e-4
                                         : std::same_as<Precision, precision::Tf32> ? 1e-2
                                                                                    : 5e-2;

template <class A, class B>
bool same_policy(const A& a, const B& b) {
  if constexpr (std::same_as<A, B> && std::equality_comparable<A>)
    return a == b;
  else
    return std::same_as<A, B>;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
