// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 900
// DataParallel x precision x accumulation x clipping x non-finite, over batches of 1 to 9 rows, against the
// hand-written loop, which takes the shards one after the other as micro-batches.
#include "treadle/parallelism/data_parallel.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "support/policies_of.hpp"

namespace {

using namespace treadle_test;
using oracle::Clip;
using oracle::Gathering;
using oracle::NonFinite;
using oracle::Precision;

constexpr std::size_t over = 2;
constexpr std::int64_t split = 2;

struct MakePlain {
  PlainNet operator()() const { return PlainNet(); }
};

/// A batch cut as evenly as possible into at most `parts`, by hand.
std::vector<td::Batch> cut(const td::Batch& batch, std::int64_t parts) {
  const auto rows = batch.data.size(0);
  const auto n = std::max<std::int64_t>(1, std::min(parts, rows));
  std::vector<td::Batch> shards;
  std::int64_t begin = 0;
  for (std::int64_t i = 1; i <= n; ++i) {
    const auto end = rows * i / n;
    shards.push_back({batch.data.slice(0, begin, end), batch.target.slice(0, begin, end)});
    begin = end;
  }
  return shards;
}

template <bool Hard>
auto others() {
  if constexpr (Hard)
    return std::pair{td::clipping::ClipNorm{.max_norm = 0.5}, td::nonfinite::Skip{}};
  else
    return std::pair{td::clipping::NoClipping{}, td::nonfinite::Ignore{}};
}

/// `Hard`: with clipping by norm, and with a NaN in one shard of steps 1 and 5.
template <Precision P, Gathering G, bool Hard>
void run_combination() {
  oracle::Recipe recipe{.precision = P, .clip = Hard ? Clip::Norm : Clip::None};
  recipe.nonfinite = Hard ? NonFinite::Skip : NonFinite::Ignore;
  recipe.clip_at = 0.5;
  recipe.scale = 64;
  constexpr std::size_t per_step = G == Gathering::Over ? over : 1;
  std::vector<std::int64_t> rows(4 * per_step, 8);
  for (std::int64_t r = 1; r <= 9; ++r) rows.push_back(r);  // the last window of AccumulateOver is cut short
  auto batches = make_batches(rows);
  if (Hard) {
    batches[per_step] = poisoned(batches[per_step]);
    batches[5 * per_step] = poisoned(batches[5 * per_step]);
  }
  const State start = weights(*make<PlainNet>());

  for (const std::int64_t devices : {1, 2, 3}) {
    CAPTURE(devices);
    const auto parallel = td::parallelism::data_parallel(
        std::vector<at::Device>(static_cast<std::size_t>(devices), device()), MakePlain{});
    const auto [clipping, nonfinite] = others<Hard>();
    td::Trainer trainer{
        make<PlainNet>(), CrossEntropy{},
        td::optim::AdamW{.learning_rate = recipe.learning_rate, .weight_decay = recipe.weight_decay},
        td::policies(parallel, precision_of<P>(recipe), accumulation_of<G>(over, split), clipping, nonfinite)};
    const auto got = oracle::run(trainer, batches);

    auto loop = oracle::classifier(make<PlainNet>(), recipe);
    std::vector<oracle::Record> want;
    for (std::size_t i = 0; i < batches.size(); i += per_step) {
      std::vector<td::Batch> window;
      for (std::size_t k = i; k < std::min(i + per_step, batches.size()); ++k)
        for (const auto& part : cut(batches[k], G == Gathering::Split ? split : 1))
          for (const auto& shard : cut(part, devices)) window.push_back(shard);
      want.push_back(loop.step(window));
    }
    // Bitwise where two gradients, or equal counts of a power of two, are added; clipping and fp16 never are.
    const bool exact = !Hard && P != Precision::Fp16 && G == Gathering::None && devices < 3 && device().is_cpu();
    const double tolerance = P == Precision::Fp32 ? 5e-4 : 5e-2;
    oracle::check_same(got, want, start, exact ? 4 : 0, tolerance);
    std::size_t skipped = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      skipped += want[i].skipped;
      if (P == Precision::Fp16) CHECK(got[i].scale == want[i].scale);
      if (Hard && std::isfinite(want[i].grad_norm))
        CHECK(got[i].grad_norm == doctest::Approx(want[i].grad_norm).epsilon(tolerance));
    }
    CHECK(skipped == (Hard ? 2 : 0));
    CHECK(finite(got.back().weights));
  }
}

template <Precision P>
void run_precision() {
  run_combination<P, Gathering::None, false>();
  run_combination<P, Gathering::None, true>();
  run_combination<P, Gathering::Over, false>();
  run_combination<P, Gathering::Over, true>();
  run_combination<P, Gathering::Split, false>();
  run_combination<P, Gathering::Split, true>();
}

}  // namespace

TEST_CASE("DataParallel trains as the hand-written loop over its shards: Fp32") {
  run_precision<Precision::Fp32>();
}
TEST_CASE("DataParallel trains as the hand-written loop over its shards: Bf16") {
  run_precision<Precision::Bf16>();
}
TEST_CASE("DataParallel trains as the hand-written loop over its shards: Fp16") {
  run_precision<Precision::Fp16>();
}
TEST_CASE("DataParallel trains as the hand-written loop over its shards: Bf16Weights") {
  run_precision<Precision::Bf16Weights>();
}
