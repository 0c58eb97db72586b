// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <cstdint>
#include <vector>

#include "treadle/accumulation/concept.hpp"
#include "treadle/batch.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {
namespace detail {

/// Feeds numbered rows and notes what comes out.
template <class State>
struct FeedLog {
  State& state;
  Report& report;
  std::int64_t given = 0;
  std::int64_t seen = 0;
  bool in_order = true;
  int parts = 0;
  int closed = 0;
  bool last_closed = false;

  void feed(std::int64_t rows, bool ends) {
    const auto numbers = at::arange(given, given + rows, at::kLong);
    given += rows;
    const Batch batch{numbers, numbers};
    last_closed = false;
    state.feed(batch, ends, [&](const Batch& part, bool closes) {
      ++parts;
      closed += closes;
      last_closed = closes;
      for (std::int64_t i = 0; i < part.data.size(0); ++i)
        in_order &= part.data[i].template item<std::int64_t>() == seen++ && part.target.size(0) == part.data.size(0);
    });
    report.require(state.open() == !last_closed,
                   "open() must say whether the last micro-batch that was fed left its step unfinished.");
  }
  void require_rows() const {
    report.require(in_order && seen == given, "feed() must pass on each row exactly once and in order.");
  }
};

}  // namespace detail

/// Checks at run time what `accumulation_policy` promises and the compiler cannot see; one sentence a broken promise.
template <accumulation_policy P>
Violations check_accumulation_contract(const P& policy = {}) {
  Report report("accumulation");
  policy.check();
  const std::vector<std::int64_t> rows{5, 8, 3, 1, 4, 7, 2};
  const auto rows_of = [&](std::int64_t i) { return rows[static_cast<std::size_t>(i) % rows.size()]; };

  typename P::State state(policy);
  report.require(!state.open(), "open() must be false before anything is fed.");
  bool drops = false;
  if constexpr (P::drops_tail) drops = state.drop_tail();
  const auto per_step = static_cast<std::int64_t>(state.batches_per_step());
  report.require(per_step >= 1, "batches_per_step() must be at least 1.");
  if (per_step < 1) return report.take();

  detail::FeedLog<typename P::State> log{state, report};
  for (std::int64_t i = 0; i < 2 * per_step; ++i) {
    const int closed = log.closed;
    log.feed(rows_of(i), false);
    report.require((log.closed - closed == 1) == ((i + 1) % per_step == 0) && log.closed - closed <= 1,
                   "a step must close after exactly batches_per_step() batches.");
    report.require(log.closed == closed || log.last_closed, "closes must be true for the last micro-batch of a step.");
  }
  log.require_rows();
  report.require(P::windows || log.parts == 2 * per_step, "windows is false, so a step must be one micro-batch.");

  const int before_end = log.closed;
  log.feed(6, true);
  report.require(log.closed == before_end + 1 && !state.open(), "a window must close when `ends` is true.");
  log.require_rows();
  log.feed(0, true);
  report.require(log.closed == before_end + 2 && !state.open(), "a batch without rows must close its step, too.");

  if (per_step > 1) {
    log.feed(2, false);
    state.reset();
    report.require(!state.open(), "reset() must forget an open window.");
    const int closed = log.closed;
    for (std::int64_t i = 0; i + 1 < per_step; ++i) log.feed(2, false);
    report.require(log.closed == closed, "after reset() a step must take batches_per_step() batches again.");
    log.feed(2, false);
    report.require(log.closed == closed + 1, "after reset() a step must take batches_per_step() batches again.");
  } else {
    state.reset();
    report.require(!state.open(), "reset() must leave no window open.");
  }
  log.require_rows();
  if constexpr (P::drops_tail)
    report.require(state.drop_tail() == drops, "drop_tail() must say the same throughout a run.");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
