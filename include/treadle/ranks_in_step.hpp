// SPDX-License-Identifier: Apache-2.0
// What `fit` and `evaluate` ask of the other ranks: nothing, where there is one process.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/loader.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/meter.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Keeps the ranks of a job at the same step: how many windows an epoch has, who goes on, when all stop.
///
/// Every call is made by all ranks in the same order. `Parallelism` is the State of a policy with `processes`.
template <class Parallelism, bool Processes>
class RanksInStep {
 public:
  explicit RanksInStep(Parallelism& parallelism) : parallelism_(parallelism) {}

  int rank() const { return static_cast<int>(parallelism_.rank()); }
  /// Throws `ConfigError`, on every rank, where they would not meet: `mine` must be the same text on all.
  void require_same(const std::string& mine) {
    const auto all = parallelism_.gather(mine, fit);
    for (std::size_t r = 1; r < all.size(); ++r)
      if (all[r] != all[0])
        throw ConfigError("treadle::Trainer::fit: rank 0 has " + all[0] + " where rank " + std::to_string(r) + " has " +
                          all[r] + "; give fit the same options on all ranks.");
    parallelism_.forget_failures(fit);
  }
  /// The windows of an epoch, where this rank has `mine`: the most of all ranks, or -1 if a rank does not know (-1).
  std::int64_t plan(std::int64_t mine) {
    const bool unknown = parallelism_.agree(mine < 0 ? 1.0 : 0.0, fit) > 0;
    const auto most = static_cast<std::int64_t>(parallelism_.agree(static_cast<double>(mine < 0 ? 0 : mine), fit));
    return windows_ = unknown ? -1 : most;
  }
  /// Where the job begins, if this rank's loader was told to begin at `mine`: every rank at the same batch, but for
  /// those that have none left in that epoch, whose loaders stand before the next one; they have a batch of -1 here.
  std::optional<Begin> agree_on(std::optional<Begin> mine) {
    std::vector<std::optional<Begin>> all;
    for (const std::string& told : parallelism_.gather(
             mine ? std::to_string(mine->epoch) + ' ' + std::to_string(mine->batch) : std::string(), fit)) {
      all.emplace_back();
      if (!told.empty()) all.back() = Begin{std::stoll(told), std::stoll(told.substr(told.find(' ') + 1))};
    }
    const auto first = *std::ranges::min_element(all, {}, [](const auto& one) { return one ? one->epoch : -1; });
    for (std::size_t r = 0; r < all.size(); ++r) {
      const bool over = first && all[r] && all[r]->epoch == first->epoch + 1 && all[r]->batch == 0;
      const bool same = first ? all[r] && all[r]->epoch == first->epoch && all[r]->batch == first->batch : !all[r];
      if (!over && !same)
        throw ConfigError("treadle::Trainer::fit: the loader of rank " + std::to_string(r) +
                          " was told to begin at another batch than those of other ranks; seek the same position on "
                          "all ranks, or on none.");
      if (over && r == static_cast<std::size_t>(rank())) mine = Begin{first->epoch, -1};
    }
    return mine;
  }
  /// Makes the windows of an epoch those that an earlier `plan` gave.
  void replan(std::int64_t windows) { windows_ = windows; }
  /// Before a window's first batch: tells the others, where nobody knows how many will come.
  void window_begins() {
    if (windows_ < 0) parallelism_.agree(1.0, window);
  }
  /// Whether another rank makes a window beyond the `made` of this one, which has no more batches.
  bool others_go_on(std::int64_t made) { return windows_ < 0 ? parallelism_.agree(0.0, window) > 0 : made < windows_; }
  /// Whether a window that has begun counts, even if this rank is to drop it.
  bool must_close() const { return windows_ < 0; }
  /// Why all stop now, if a rank wishes to.
  std::optional<StopReason> agree(std::optional<StopReason> wish) {
    const double reason = parallelism_.agree(wish ? 1.0 + static_cast<double>(*wish) : 0.0, "a step's end");
    if (reason == 0) return std::nullopt;
    return static_cast<StopReason>(static_cast<int>(reason) - 1);
  }
  /// In a handler: tells the others, who may wait for this rank, of what failed here.
  void leave_word() { parallelism_.leave_word(); }
  /// Before an evaluation: all are at one, and of one model.
  void begin_evaluation() {
    parallelism_.agree(0.0, evaluation);
    parallelism_.share_buffers();
  }
  /// Whether a rank had a batch to evaluate.
  bool any_evaluated(bool mine) { return parallelism_.agree(mine ? 1.0 : 0.0, evaluation) > 0; }
  /// The totals of all ranks over an evaluation.
  observe::Totals gather_evaluation(const observe::Totals& mine) { return gather(mine, evaluation); }
  /// The totals of all ranks since the last log point.
  observe::Totals gather(const observe::Totals& mine, const char* what = "a log point") {
    observe::Totals all;
    for (const std::string& packed : parallelism_.gather(mine.pack(), what)) all.add(observe::Totals::unpack(packed));
    return all;
  }

 private:
  // What ranks meet for, by name.
  static constexpr const char* fit = "the start of fit";
  static constexpr const char* window = "the start of a window";
  static constexpr const char* evaluation = "evaluate";

  Parallelism& parallelism_;
  std::int64_t windows_ = 0;
};

/// One process: there is nobody to ask.
template <class Parallelism>
class RanksInStep<Parallelism, false> {
 public:
  explicit RanksInStep(Parallelism&) {}
  int rank() const { return 0; }
  void require_same(const std::string&) const {}
  std::int64_t plan(std::int64_t mine) const { return mine; }
  std::optional<Begin> agree_on(std::optional<Begin> mine) const { return mine; }
  void replan(std::int64_t) const {}
  void window_begins() const {}
  bool others_go_on(std::int64_t) const { return false; }
  bool must_close() const { return false; }
  std::optional<StopReason> agree(std::optional<StopReason> wish) const { return wish; }
  void leave_word() const {}
  void begin_evaluation() const {}
  bool any_evaluated(bool mine) const { return mine; }
  const observe::Totals& gather_evaluation(const observe::Totals& mine) const { return mine; }
  const observe::Totals& gather(const observe::Totals& mine) const { return mine; }
};

template <class Trainer>
using RanksOf = RanksInStep<typename Trainer::Parallelism::State, Trainer::Parallelism::processes>;

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
