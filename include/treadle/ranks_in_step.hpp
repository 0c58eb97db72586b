// SPDX-License-Identifier: Apache-2.0
// What `fit` and `evaluate` ask of the other ranks: nothing, where there is one process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "treadle/error.hpp"
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
    const auto all = parallelism_.gather(mine);
    for (std::size_t r = 1; r < all.size(); ++r)
      if (all[r] != all[0])
        throw ConfigError("treadle::Trainer::fit: rank 0 has " + all[0] + " where rank " + std::to_string(r) + " has " +
                          all[r] + "; give fit the same options on all ranks.");
  }
  /// The windows of an epoch, where this rank has `mine`: the most of all ranks, or -1 if a rank does not know (-1).
  std::int64_t plan(std::int64_t mine) {
    const bool unknown = parallelism_.agree(mine < 0 ? 1.0 : 0.0) > 0;
    const auto most = static_cast<std::int64_t>(parallelism_.agree(static_cast<double>(mine < 0 ? 0 : mine)));
    return windows_ = unknown ? -1 : most;
  }
  /// Before a window's first batch: tells the others, where nobody knows how many will come.
  void window_begins() {
    if (windows_ < 0) parallelism_.agree(1.0);
  }
  /// Whether another rank makes a window beyond the `made` of this one, which has no more batches.
  bool others_go_on(std::int64_t made) { return windows_ < 0 ? parallelism_.agree(0.0) > 0 : made < windows_; }
  /// Whether a window that has begun counts, even if this rank is to drop it.
  bool must_close() const { return windows_ < 0; }
  /// Why all stop now, if a rank wishes to.
  std::optional<StopReason> agree(std::optional<StopReason> wish) {
    const double reason = parallelism_.agree(wish ? 1.0 + static_cast<double>(*wish) : 0.0);
    if (reason == 0) return std::nullopt;
    return static_cast<StopReason>(static_cast<int>(reason) - 1);
  }
  /// The totals of all ranks.
  observe::Totals gather(const observe::Totals& mine) {
    observe::Totals all;
    for (const std::string& packed : parallelism_.gather(mine.pack())) all.add(observe::Totals::unpack(packed));
    return all;
  }

 private:
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
  void window_begins() const {}
  bool others_go_on(std::int64_t) const { return false; }
  bool must_close() const { return false; }
  std::optional<StopReason> agree(std::optional<StopReason> wish) const { return wish; }
  const observe::Totals& gather(const observe::Totals& mine) const { return mine; }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
