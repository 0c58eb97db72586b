// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "treadle/error.hpp"
#include "treadle/runtime/determinism.hpp"

namespace treadle {
inline namespace v0_1 {

/// What no policy says.
struct TrainerOptions {
  std::optional<Determinism> determinism{};  ///< applied before anything else
  double nominal_count = 0;                  ///< c0, see docs/accumulation.md; 0 takes the first micro-batch's count

  /// Throws `ConfigError` if a value is out of range.
  void check() const {
    if (nominal_count != 0 && !(nominal_count >= 1e-15 && nominal_count <= 1e15))
      throw ConfigError(
          "treadle::TrainerOptions: nominal_count must be 0 or lie between 1e-15 and 1e15; it is how much a window "
          "usually counts, such as its rows.");
  }
};

}  // namespace v0_1
}  // namespace treadle
