// SPDX-License-Identifier: Apache-2.0
// The crossing matrix: precision x accumulation x rule x clipping x non-finite x averaging as types, and schedules as
// values, each combination against the hand-written loop. A file a precision runs the combinations of a pairwise cover,
// or all of them in a nightly build.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "support/oracle.hpp"
#include "support/policies_of.hpp"

namespace treadle_test::matrix {

using oracle::Clip;
using oracle::Gathering;
using oracle::NonFinite;
using oracle::Precision;
using oracle::Rate;
using oracle::Rule;

struct Row {
  Precision precision;
  Gathering gathering;
  Rule rule;
  Clip clip;
  NonFinite nonfinite;
  bool averages;
};

inline constexpr std::size_t axes = 6;
inline constexpr std::array<std::size_t, axes> levels{5, 3, 3, 3, 3, 2};
inline constexpr std::size_t combinations = 5 * 3 * 3 * 3 * 3 * 2;
inline constexpr std::size_t per_precision = combinations / levels[0];

constexpr std::array<std::size_t, axes> digits(std::size_t index) {
  std::array<std::size_t, axes> d{};
  for (std::size_t a = axes; a-- > 0;) {
    d[a] = index % levels[a];
    index /= levels[a];
  }
  return d;
}
constexpr Row row_of(std::size_t index) {
  const auto d = digits(index);
  return {static_cast<Precision>(d[0]), static_cast<Gathering>(d[1]), static_cast<Rule>(d[2]),
          static_cast<Clip>(d[3]),      static_cast<NonFinite>(d[4]), d[5] != 0};
}

/// A pairwise cover: combinations that have every pair of levels of two axes. Found greedily (always the combination
/// with the most new pairs); five levels times three need fifteen at least.
inline constexpr std::array<std::size_t, 19> cover{0,   81,  215, 442, 554, 613, 738, 182, 483, 655,
                                                   400, 532, 786, 160, 222, 324, 270, 650, 652};
constexpr bool covers_all_pairs() {
  bool seen[axes][axes][5][5]{};
  for (const auto index : cover) {
    const auto d = digits(index);
    for (std::size_t a = 0; a < axes; ++a)
      for (std::size_t b = a + 1; b < axes; ++b) seen[a][b][d[a]][d[b]] = true;
  }
  for (std::size_t a = 0; a < axes; ++a)
    for (std::size_t b = a + 1; b < axes; ++b)
      for (std::size_t i = 0; i < levels[a]; ++i)
        for (std::size_t j = 0; j < levels[b]; ++j)
          if (!seen[a][b][i][j]) return false;
  return true;
}
static_assert(covers_all_pairs());

inline std::string name_of(const Row& row, Rate rate) {
  static constexpr const char* precisions[] = {"Fp32", "Tf32", "Bf16", "Fp16", "Bf16Weights"};
  static constexpr const char* gatherings[] = {"NoAccumulation", "AccumulateOver", "SplitBatch"};
  static constexpr const char* rules[] = {"AdamW", "Adam", "Sgd"};
  static constexpr const char* clips[] = {"NoClipping", "ClipNorm", "ClipValue"};
  static constexpr const char* nonfinites[] = {"Ignore", "Skip", "Stop"};
  static constexpr const char* rates[] = {"constant", "cosine", "one_cycle", "table"};
  std::string name = precisions[static_cast<int>(row.precision)];
  name += std::string(" ") + gatherings[static_cast<int>(row.gathering)] + " " + rules[static_cast<int>(row.rule)];
  name += std::string(" ") + clips[static_cast<int>(row.clip)] + " " + nonfinites[static_cast<int>(row.nonfinite)];
  return name + (row.averages ? " ExponentialAverage " : " NoAveraging ") + rates[static_cast<int>(rate)];
}

inline td::Schedule schedule_of(Rate rate) {
  switch (rate) {
    case Rate::CosineWarmup:
      return td::schedule::cosine(
          {.steps = oracle::rate_steps, .warmup = oracle::rate_warmup, .floor = oracle::rate_floor});
    case Rate::OneCycle:
      return td::schedule::one_cycle({.steps = oracle::rate_steps});
    case Rate::Table:
      return td::schedule::table(oracle::rate_table);
    default:
      return td::schedule::constant();
  }
}

// Numbers that both sides share. The clips are low enough to act, the loss scale starts low enough for fp16.
inline constexpr double norm_limit = 0.5;
inline constexpr double value_limit = 0.05;
inline constexpr int window = 2;
inline constexpr int slices = 4;

/// The recipe of a combination. SGD comes in four kinds, one with each schedule.
inline oracle::Recipe recipe_of(const Row& row, Rate rate) {
  oracle::Recipe recipe{.precision = row.precision,
                        .rule = row.rule,
                        .clip = row.clip,
                        .nonfinite = row.nonfinite,
                        .rate = rate,
                        .averages = row.averages};
  recipe.learning_rate = row.rule == Rule::Sgd ? 0.1 : 1e-2;
  recipe.clip_at = row.clip == Clip::Norm ? norm_limit : value_limit;
  recipe.keep_fp32 = {"batch_norm.weight", "batch_norm.bias"};
  recipe.scale = 64;  // with Ignore an overflow would end the run
  if (row.rule == Rule::Sgd) {
    recipe.momentum = rate == Rate::Constant ? 0.0 : 0.9;
    recipe.dampening = rate == Rate::CosineWarmup ? 0.5 : 0.0;
    recipe.nesterov = rate == Rate::OneCycle;
  }
  return recipe;
}

template <Rule R>
auto rule_of(const oracle::Recipe& r) {
  if constexpr (R == Rule::AdamW)
    return td::optim::AdamW{
        .learning_rate = r.learning_rate, .weight_decay = r.weight_decay, .schedule = schedule_of(r.rate)};
  else if constexpr (R == Rule::Adam)
    return td::optim::Adam{
        .learning_rate = r.learning_rate, .weight_decay = r.weight_decay, .schedule = schedule_of(r.rate)};
  else
    return td::optim::Sgd{.learning_rate = r.learning_rate,
                          .momentum = r.momentum,
                          .dampening = r.dampening,
                          .weight_decay = r.weight_decay,
                          .nesterov = r.nesterov,
                          .schedule = schedule_of(r.rate)};
}
template <Clip C>
auto clipping_of() {
  if constexpr (C == Clip::None)
    return td::clipping::NoClipping{};
  else if constexpr (C == Clip::Norm)
    return td::clipping::ClipNorm{.max_norm = norm_limit};
  else
    return td::clipping::ClipValue{.max_value = value_limit};
}
template <NonFinite N>
auto nonfinite_of() {
  if constexpr (N == NonFinite::Ignore)
    return td::nonfinite::Ignore{};
  else if constexpr (N == NonFinite::Skip)
    return td::nonfinite::Skip{};
  else
    return td::nonfinite::Stop{};
}
template <bool A>
auto averaging_of(const oracle::Recipe& r) {
  if constexpr (A)
    return td::averaging::ExponentialAverage{.decay = r.decay};
  else
    return td::averaging::NoAveraging{};
}

/// Loader batches of 12 steps. The first 10 windows are of equal micro-batches, the last two ragged, the last one cut
/// short. Under Skip the first step is bad and step 4 in its second micro-batch; under Stop step 7.
inline std::vector<td::Batch> batches_of(const Row& row) {
  const std::size_t per_step = row.gathering == Gathering::Over ? window : 1;
  // Batch norm over the two rows of a slice would be too ill-conditioned to compare: slices have four or more.
  std::vector<std::int64_t> rows(10 * per_step, row.gathering == Gathering::Split ? 16 : 8);
  std::vector<std::int64_t> ragged{11, 9};
  if (row.gathering == Gathering::Over) ragged = {8, 5, 3};
  if (row.gathering == Gathering::Split) ragged = {19, 17};
  rows.insert(rows.end(), ragged.begin(), ragged.end());
  auto batches = make_batches(rows);
  const auto poison = [&](std::size_t i) { batches[i] = poisoned(batches[i]); };
  if (row.nonfinite == NonFinite::Skip) {
    poison(0);
    poison(4 * per_step + per_step - 1);
  }
  if (row.nonfinite == NonFinite::Stop) poison(7 * per_step + per_step - 1);
  return batches;
}

inline std::vector<oracle::Record> by_hand(oracle::Loop<TinyNet>& loop, const Row& row,
                                           const std::vector<td::Batch>& batches) {
  reseed(7);
  if (row.gathering == Gathering::Split) return oracle::run_slices(loop, batches, slices);
  return oracle::run_windows(loop, batches, row.gathering == Gathering::Over ? window : 1);
}

/// How far two implementations may part where they round differently.
inline double tolerance_of(Precision precision) {
  switch (precision) {
    case Precision::Bf16:
    case Precision::Bf16Weights:
      return 5e-2;
    case Precision::Fp16:
      return 2e-2;
    case Precision::Tf32:  // rounds as Fp16 does, where it is not plain Fp32
      return device().is_cuda() ? 2e-2 : 5e-4;
    default:
      return 5e-4;
  }
}

template <std::size_t Index>
void run_combination() {
  constexpr Row row = row_of(Index);
  const auto batches = batches_of(row);
  const State start = weights(*make<TinyNet>());
  for (const Rate rate : {Rate::Constant, Rate::CosineWarmup, Rate::OneCycle, Rate::Table}) {
    INFO(name_of(row, rate));
    auto recipe = recipe_of(row, rate);
    td::Trainer trainer{
        make<TinyNet>(), CrossEntropy{}, rule_of<row.rule>(recipe),
        td::policies(precision_of<row.precision>(recipe), accumulation_of<row.gathering>(window, slices),
                     clipping_of<row.clip>(), nonfinite_of<row.nonfinite>(), averaging_of<row.averages>(recipe))};
    reseed(7);
    const auto got = oracle::run(trainer, batches);

    auto loop = oracle::classifier(make<TinyNet>(), recipe);
    const auto want = by_hand(loop, row, batches);
    // Everything is bitwise but clipping by norm, ragged counts, and fp16 windows, where a scale of 1/N in the backward
    // pass, which only one of the two has, moves gradients in and out of fp16's subnormal numbers.
    std::size_t exact = row.gathering == Gathering::None ? want.size() : 10;
    if (row.clip == Clip::Norm || (row.precision == Precision::Fp16 && row.gathering != Gathering::None)) exact = 0;
    // ATen's CUDA kernels for SGD, and for Adam with weight decay, round differently in the last place where they
    // divide the gradient themselves (`grad_scale`) than where it comes divided; AdamW's and the CPU's do not.
    const bool divides = row.gathering != Gathering::None || row.precision == Precision::Fp16;
    if (divides && row.rule != Rule::AdamW && device().is_cuda()) exact = 0;
    const double tolerance = tolerance_of(row.precision);
    oracle::check_same(got, want, start, exact, tolerance);
    if (exact == want.size()) {
      const auto state = state_of(trainer.rule());
      for (const auto& item : loop.moments()) CHECK_MESSAGE(same_bits(state.at(item.first), item.second), item.first);
    }
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      if (row.precision == Precision::Fp16) CHECK(got[i].scale == want[i].scale);
      if (row.clip == Clip::Norm && std::isfinite(want[i].grad_norm))
        CHECK(got[i].grad_norm == doctest::Approx(want[i].grad_norm).epsilon(tolerance));
    }
    if (row.nonfinite == NonFinite::Ignore) {
      CHECK(finite(got.back().weights));
    } else if (row.nonfinite == NonFinite::Skip) {
      CHECK(trainer.skipped_steps().template item<std::int64_t>() == 2);
      trainer.check();
    } else {
      CHECK(loop.stopped_at() == 7);
      try {
        trainer.check();
        FAIL_CHECK("nonfinite::Stop must throw");
      } catch (const td::NonFiniteError& error) {
        CHECK(error.step() == loop.stopped_at());
        CHECK(error.micro_batch() == loop.stopped_micro_batch());
      }
    }

    // The formulas in fp64, which share no operation with the fused ones.
    recipe.textbook = true;
    auto textbook = oracle::classifier(make<TinyNet>(), recipe);
    oracle::check_same(got, by_hand(textbook, row, batches), start, 0, tolerance);
  }
}

/// Which of `parts` parts of a precision's product this process runs: TREADLE_MATRIX_PART=2/8 is the third eighth, for
/// machines with more cores than files.
struct Part {
  std::size_t index = 0;
  std::size_t parts = 1;
  bool has(std::size_t combination) const { return combination % per_precision * parts / per_precision == index; }
};
inline Part part() {
  Part result;
  const char* const text = std::getenv("TREADLE_MATRIX_PART");
  if (text == nullptr) return result;
  REQUIRE(std::sscanf(text, "%zu/%zu", &result.index, &result.parts) == 2);
  REQUIRE(result.index < result.parts);
  return result;
}

/// The combinations of one precision: all of them in a nightly build, else those of the cover.
template <Precision P, std::size_t... I>
int run_precision(std::index_sequence<I...>) {
  int count = 0;
  const Part mine = part();
  const auto run = [&]<std::size_t Index>() {
    if constexpr (row_of(Index).precision == P)
      if (mine.has(Index)) {
        run_combination<Index>();
        ++count;
      }
  };
#ifdef TREADLE_NIGHTLY
  (run.template operator()<static_cast<std::size_t>(P) * per_precision + I>(), ...);
#else
  (run.template operator()<cover[I]>(), ...);
#endif
  return count;
}
template <Precision P>
int run_precision() {
#ifdef TREADLE_NIGHTLY
  return run_precision<P>(std::make_index_sequence<per_precision>());
#else
  return run_precision<P>(std::make_index_sequence<cover.size()>());
#endif
}

}  // namespace treadle_test::matrix
