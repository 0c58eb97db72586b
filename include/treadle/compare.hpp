// SPDX-License-Identifier: Apache-2.0
// Several combinations of policies on the user's own model: first whether they compute the same, then what each costs.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/compare/describe.hpp"
#include "treadle/compare/losses.hpp"
#include "treadle/compare/memory.hpp"
#include "treadle/compare/table.hpp"
#include "treadle/error.hpp"
#include "treadle/loader.hpp"
#include "treadle/policies.hpp"
#include "treadle/runtime/device.hpp"
#include "treadle/runtime/random.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// Runs one comparison; `Sets` are canonical sets of policies.
template <class Make, class B, class... Sets>
class Comparing {
 public:
  Comparing(Make& make, std::vector<B> batches, const CompareOptions& options, const Sets&... sets)
      : make_(make), batches_(std::move(batches)), options_(options), sets_(sets...) {}

  Comparison run() {
    const GeneratorGuard generators;  // each combination seeds those of the process
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (check<I>(), ...);
    }
    (indices());
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      time<I...>();
    }
    (indices());
    return std::move(result_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static auto indices() { return std::index_sequence_for<Sets...>(); }
  template <std::size_t I>
  using Runner = Contestant<Make, std::tuple_element_t<I, std::tuple<Sets...>>>;
  /// Alone, so that memory is its own.
  template <std::size_t I>
  void check() {
    auto& row = result_.rows.emplace_back();
    row.name = describe(std::get<I>(sets_));
    if (cuda_available()) {  // what CUDA's libraries take for good at their first call is no combination's own
      Runner<I> runner(make_, std::get<I>(sets_), options_);
      std::size_t position = 0;
      next_step(runner.trainer, batches_, position);
    }
    {
      const MemoryMeter meter;
      Runner<I> runner(make_, std::get<I>(sets_), options_);
      row.losses = first_losses(runner.trainer, batches_, options_);
      windows_.push_back(runner.trainer.accumulation().batches_per_step());
      synchronize(runner.trainer.device());
      if (const auto peak = meter.peak(runner.trainer.device())) {
        row.peak_bytes = peak->allocated;
        row.reserved_bytes = peak->reserved;
      }
    }
    if constexpr (I > 0) compare_losses<I>(row, result_.rows.front());
  }

  template <std::size_t I>
  void compare_losses(ComparisonRow& row, const ComparisonRow& base) {
    if (row.peak_bytes && base.peak_bytes && *base.peak_bytes > 0)
      row.memory_ratio = static_cast<double>(*row.peak_bytes) / static_cast<double>(*base.peak_bytes);
    const auto& mine = std::get<I>(sets_);
    const auto& first = std::get<0>(sets_);
    using Mine = std::remove_cvref_t<decltype(mine)>;
    using First = std::remove_cvref_t<decltype(first)>;
    row.tolerance = options_.tolerance > 0
                        ? options_.tolerance
                        : std::max(loss_tolerance<typename Mine::Precision>, loss_tolerance<typename First::Precision>);
    if (windows_[I] != windows_[0]) {
      const auto common = std::lcm(windows_[I], windows_[0]);
      const double theirs = frozen_loss_of<0>(common);
      const double ours = frozen_loss_of<I>(common);
      judge(row, base, 0, ours, theirs, std::abs(theirs));
      return;
    }
    // Another clipping makes other steps on purpose, so only the losses before the first of them are the same.
    const std::int64_t steps = same_policy(mine.clipping, first.clipping) ? options_.check_steps : 1;
    double scale = 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(steps); ++i) {
      scale = std::max(scale, std::abs(base.losses[i]));
      judge(row, base, i, row.losses[i], base.losses[i], scale);
    }
  }

  template <std::size_t I>
  double frozen_loss_of(std::int64_t batches) {
    Runner<I> runner(make_, std::get<I>(sets_), options_);
    return frozen_loss(runner.trainer, batches_, batches, options_);
  }

  void judge(ComparisonRow& row, const ComparisonRow& base, std::size_t step, double ours, double theirs,
             double scale) {
    ++row.checked;
    const double apart = std::abs(ours - theirs) / std::max(scale, std::numeric_limits<double>::min());
    if (!(apart <= row.difference) && !std::isnan(row.difference)) row.difference = apart;  // NaN stays NaN
    if (apart <= row.tolerance || !row.agrees) return;
    row.agrees = false;
    const std::string sentence =
        "treadle::compare: '" + row.name + "' has a loss of " + exact_number(ours) + " in step " +
        std::to_string(step) + " where '" + base.name + "' has " + exact_number(theirs) +
        ", a relative difference of " + metric_number(apart) + " where " + metric_number(row.tolerance) +
        " is allowed; make_trainer must make a new model from the current seed at each call, and a model whose "
        "micro-batches see other random numbers or batch statistics needs a larger CompareOptions::tolerance.";
    if (options_.on_disagreement == Disagreement::Throw) throw Error(sentence);
    warn(sentence);
  }

  template <std::size_t... I>
  void time() {
    std::tuple<std::unique_ptr<Runner<I>>...> runners(
        std::make_unique<Runner<I>>(make_, std::get<I>(sets_), options_)...);
    // A block is the same batches for everyone and a whole number of windows for each.
    std::int64_t unit = 1;
    for (const auto window : windows_) unit = std::lcm(unit, static_cast<std::int64_t>(window));
    const auto warm_up = [&](auto& trainer, std::int64_t window) {
      if (options_.warmup_steps > 0) block(trainer, options_.warmup_steps * window);
    };
    (warm_up(std::get<I>(runners)->trainer, windows_[I]), ...);
    const double once = block(std::get<0>(runners)->trainer, unit);
    const auto units = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::ceil(options_.block_seconds / std::max(once, 1e-9))), 1, 1'000'000);
    std::vector<std::vector<double>> seconds(sizeof...(I));
    for (std::int64_t i = 0; i < options_.blocks; ++i)
      (seconds[I].push_back(block(std::get<I>(runners)->trainer, units * unit)), ...);
    double rows = 0;
    for (std::int64_t i = 0; i < units * unit; ++i)
      rows += static_cast<double>(treadle::rows(batches_[static_cast<std::size_t>(i) % batches_.size()]));
    (fill(result_.rows[I], seconds[I], seconds[0], rows, units * unit / windows_[I]), ...);
  }

  static void fill(ComparisonRow& row, const std::vector<double>& seconds, const std::vector<double>& first,
                   double rows, std::int64_t steps) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < seconds.size(); ++i) ratios.push_back(seconds[i] / first[i]);
    row.time_ratio = median(ratios);
    row.seconds_per_step = median(seconds) / static_cast<double>(steps);
    row.rows_per_second = rows / median(seconds);
  }

  /// Seconds for `count` batches from the first one on.
  template <class Trainer>
  double block(Trainer& trainer, std::int64_t count) {
    synchronize(trainer.device());
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) trainer.accumulate(batches_[i % batches_.size()]);
    synchronize(trainer.device());
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Make& make_;
  std::vector<B> batches_;
  CompareOptions options_;
  std::tuple<Sets...> sets_;
  std::vector<std::int64_t> windows_;  // loader batches in a step
  Comparison result_;
};

/// Copies of the loader's first batches.
template <class Range>
auto first_batches(Range& range, std::int64_t count) {
  using B = std::remove_cvref_t<decltype(*std::begin(range))>;
  std::vector<B> batches;
  for_each_batch<false>(
      range,
      [&](const auto& batch, bool) {
        batches.push_back(batch);
        return static_cast<std::int64_t>(batches.size()) < count;
      },
      [](auto&& next) { return next(); });
  if (batches.empty()) throw DataError("treadle::compare: the loader gave no batch; a comparison needs at least one.");
  return batches;
}

}  // namespace detail

/// Trains the same model under each of the sets of policies, the first being the baseline.
///
/// `make_trainer(policies)` returns a new trainer with a new model. First, each combination alone makes `check_steps`
/// steps: their losses must agree with the baseline's within the tolerance (where windows have other lengths or
/// clipping differs, the first step's), and their peak of memory is taken. Then all are timed in interleaved blocks on
/// the loader's first batches, so all must fit into memory together. The default generators are seeded meanwhile, and
/// put back. Throws `Error` for losses that differ, `ConfigError` and `DataError` for options and loaders that cannot
/// work.
template <class Make, loader Loader, policy_set... Sets>
requires(sizeof...(Sets) > 0) Comparison
    compare(Make&& make_trainer, Loader&& loader, const CompareOptions& options, const Sets&... sets) {
  options.check();
  auto batches = detail::first_batches(detail::range_of(loader), options.batches);
  using B = typename decltype(batches)::value_type;
  Comparison found =
      detail::Comparing<std::remove_reference_t<Make>, B, Sets...>(make_trainer, std::move(batches), options, sets...)
          .run();
  if (options.print) say(found.text());
  return found;
}

/// As above for sets with their default options: `compare<Policies<>, Policies<precision::Bf16>>(make, loader)`.
template <policy_set... Sets, class Make, loader Loader>
requires(sizeof...(Sets) > 0) Comparison
    compare(Make&& make_trainer, Loader&& loader, const CompareOptions& options = {}) {
  return compare(std::forward<Make>(make_trainer), std::forward<Loader>(loader), options, Sets{}...);
}

}  // namespace v0_1
}  // namespace treadle
