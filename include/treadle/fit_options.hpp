// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// Stop when a metric of the evaluation (of training, without one) has not improved for `patience` epochs.
struct EarlyStop {
  std::string metric = "loss";
  std::int64_t patience = 3;
  double min_delta = 0;   ///< an improvement smaller than this is none
  bool maximize = false;  ///< whether larger is better
};

/// Options of `Trainer::fit`; a limit of 0 sets none.
struct FitOptions {
  std::int64_t epochs = 1;          ///< 0: until another limit
  std::int64_t max_steps = 0;       ///< steps of this fit
  double max_seconds = 0;           ///< checked after each step
  std::int64_t log_every = 50;      ///< steps between log points, where device values are read
  std::int64_t evaluate_every = 1;  ///< epochs between evaluations; the last epoch always has one
  double warn_data_wait = 0.05;     ///< share of an epoch of a second or more that waiting for the loader may take
  std::optional<EarlyStop> early_stop{};
};

}  // namespace v0_1
}  // namespace treadle
