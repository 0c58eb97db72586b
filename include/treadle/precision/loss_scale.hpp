// SPDX-License-Identifier: Apache-2.0
// The dynamic loss scale as a plain state machine: what the device operations of `Fp16` must agree with. No torch here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// The dynamic loss scale's transition rule (that of PyTorch's GradScaler), on host numbers.
struct LossScale {
  double scale = 65536.0;
  std::int32_t good_steps = 0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int32_t growth_interval = 2000;
  double minimum_scale = 0.0;

  /// One step: backs off at once on a non-finite gradient, grows after `growth_interval` good steps in a row, and never
  /// grows out of fp32's range nor falls below `minimum_scale`.
  constexpr void update(bool found_inf) {
    if (found_inf) {
      scale = static_cast<double>(static_cast<float>(scale) * static_cast<float>(backoff_factor));
      good_steps = 0;
    } else if (++good_steps == growth_interval) {
      const float grown = static_cast<float>(scale) * static_cast<float>(growth_factor);
      if (grown <= 3.402823466e38F) scale = static_cast<double>(grown);
      good_steps = 0;
    }
    scale = std::max(scale, minimum_scale);
  }
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
