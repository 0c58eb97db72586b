// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "treadle/axis.hpp"

namespace treadle {
inline namespace v0_1 {
namespace execution {

/// Runs every micro-batch and every update as it comes.
///
/// This is the axis's no-op policy and the worked example of `execution/concept.hpp`.
struct Eager {
  using policy_axis = axis::Execution;
  static constexpr bool captures = false;

  bool operator==(const Eager&) const = default;
  void check() const {}

  class State {
   public:
    explicit State(const Eager&) {}
    template <class Batch, class MicroBatch, class Update>
    [[gnu::always_inline]] void run(const Batch& batch, bool closes, MicroBatch&& micro_batch, Update&& update) {
      std::forward<MicroBatch>(micro_batch)(batch, closes);
      if (closes) std::forward<Update>(update)();
    }
    void reset() const {}
  };
};

}  // namespace execution
}  // namespace v0_1
}  // namespace treadle
