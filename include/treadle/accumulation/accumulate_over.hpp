// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "treadle/accumulation/tail.hpp"
#include "treadle/axis.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace accumulation {

/// One step for every `batches` loader batches, each of them one micro-batch.
///
/// The step's gradient is the mean over everything that the window counted (rows, tokens), so ragged batches weigh what
/// they hold; an epoch's last, shorter window is one too, unless `tail` drops it.
struct AccumulateOver {
  using policy_axis = axis::Accumulation;
  static constexpr bool windows = true;
  static constexpr bool slices = false;
  static constexpr bool drops_tail = true;

  std::int64_t batches = 1;  ///< loader batches in a step
  Tail tail = Tail::Step;    ///< what becomes of an epoch's last, shorter window

  bool operator==(const AccumulateOver&) const = default;
  void check() const {
    if (batches < 1)
      throw ConfigError(
          "accumulation::AccumulateOver: batches must be at least 1; it is the number of loader batches "
          "in a step.");
  }

  class State;
};

class AccumulateOver::State {
 public:
  explicit State(const AccumulateOver& policy) : policy_(policy) {}
  template <class Batch, class MicroBatch>
  void feed(const Batch& batch, bool ends, MicroBatch&& micro_batch) {
    const bool closes = ends || filled_ + 1 == policy_.batches;
    filled_ = closes ? 0 : filled_ + 1;
    micro_batch(batch, closes);
  }
  bool open() const { return filled_ != 0; }
  void reset() { filled_ = 0; }
  std::int64_t batches_per_step() const { return policy_.batches; }
  bool drop_tail() const { return policy_.tail == Tail::Drop; }

 private:
  AccumulateOver policy_;
  std::int64_t filled_ = 0;
};

}  // namespace accumulation
}  // namespace v0_1
}  // namespace treadle
