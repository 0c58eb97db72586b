// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/axis.hpp"

namespace treadle {
inline namespace v0_1 {
namespace accumulation {

/// One loader batch is one micro-batch is one step.
///
/// This is the axis's no-op policy and the worked example of `accumulation/concept.hpp`.
struct NoAccumulation {
  using policy_axis = axis::Accumulation;
  static constexpr bool windows = false;
  static constexpr bool slices = false;
  static constexpr bool drops_tail = false;

  bool operator==(const NoAccumulation&) const = default;
  void check() const {}

  class State {
   public:
    explicit State(const NoAccumulation&) {}
    template <class Batch, class MicroBatch>
    void feed(const Batch& batch, bool /*ends*/, MicroBatch&& micro_batch) {
      micro_batch(batch, true);
    }
    bool open() const { return false; }
    void reset() const {}
    long batches_per_step() const { return 1; }
  };
};

}  // namespace accumulation
}  // namespace v0_1
}  // namespace treadle
