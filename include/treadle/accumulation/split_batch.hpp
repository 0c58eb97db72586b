// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace accumulation {

/// One step for every loader batch, which is run as `micro_batches` slices of its rows, so that less memory is needed.
///
/// Slices differ by at most one row; a batch of fewer rows makes fewer slices. The batch type must have `slice_rows`.
struct SplitBatch {
  using policy_axis = axis::Accumulation;
  static constexpr bool windows = true;
  static constexpr bool slices = true;
  static constexpr bool drops_tail = false;

  std::int64_t micro_batches = 2;  ///< slices of a loader batch

  bool operator==(const SplitBatch&) const = default;
  void check() const {
    if (micro_batches < 1)
      throw ConfigError(
          "accumulation::SplitBatch: micro_batches must be at least 1; it is the number of slices of a "
          "loader batch.");
  }

  class State;
};

class SplitBatch::State {
 public:
  explicit State(const SplitBatch& policy) : policy_(policy) {}
  template <class Batch, class MicroBatch>
  void feed(const Batch& batch, bool /*ends*/, MicroBatch&& micro_batch) {
    const std::int64_t total = treadle::rows(batch);
    const std::int64_t parts = std::clamp<std::int64_t>(total, 1, policy_.micro_batches);
    for (std::int64_t i = 0; i < parts; ++i)
      micro_batch(treadle::slice_rows(batch, total * i / parts, total * (i + 1) / parts), i + 1 == parts);
  }
  bool open() const { return false; }
  void reset() const {}
  std::int64_t batches_per_step() const { return 1; }

 private:
  SplitBatch policy_;
};

}  // namespace accumulation
}  // namespace v0_1
}  // namespace treadle
