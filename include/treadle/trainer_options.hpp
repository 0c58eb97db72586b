// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "treadle/runtime/determinism.hpp"

namespace treadle {
inline namespace v0_1 {

/// What no policy says.
struct TrainerOptions {
  std::optional<Determinism> determinism{};  ///< applied before anything else
  double nominal_count = 0;                  ///< c0, see docs/accumulation.md; 0 takes the first micro-batch's count
};

}  // namespace v0_1
}  // namespace treadle
