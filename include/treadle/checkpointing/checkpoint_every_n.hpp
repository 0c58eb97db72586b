// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "treadle/axis.hpp"
#include "treadle/checkpointing/segments.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// As `CheckpointEveryBlock`, with `n` blocks in a row as one checkpoint: fewer inputs are kept, and more activations
/// at once while a segment is recomputed.
///
/// What is computed between two blocks of a segment stays as it is. By default n is the square root of the number of
/// blocks, rounded up, which the first forward pass finds out: until it has ended, each block is a checkpoint.
struct CheckpointEveryN {
  using policy_axis = axis::Checkpointing;
  static constexpr bool recomputes = true;
  static constexpr bool offloads = false;

  std::int64_t n = 0;  ///< blocks a checkpoint; 0: the square root of their number

  bool operator==(const CheckpointEveryN&) const = default;
  void check() const {
    if (n < 0)
      throw ConfigError("checkpointing::CheckpointEveryN: n is " + std::to_string(n) +
                        ", which is no number of blocks; use 1 or more, or 0 for the square root of their number.");
  }

  class State : public detail::Segments {
   public:
    State() : State(CheckpointEveryN{}) {}
    explicit State(const CheckpointEveryN& policy) : Segments("checkpointing::CheckpointEveryN", policy.n) {}
  };
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
