// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "treadle/error.hpp"

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
  std::int64_t max_steps = 0;       ///< steps of this fit, those before a snapshot that it goes on from included
  double max_seconds = 0;           ///< of this process, checked after each step
  std::int64_t log_every = 50;      ///< steps between log points, where device values are read
  std::int64_t evaluate_every = 1;  ///< epochs between evaluations; the last epoch always has one
  double warn_data_wait = 0.05;     ///< share of an epoch of a second or more that waiting for the loader may take
  std::optional<EarlyStop> early_stop{};

  /// Throws `ConfigError` if a value is out of range.
  void check() const {
    if (epochs < 0 || max_steps < 0 || !(max_seconds >= 0))
      throw ConfigError(
          "treadle::Trainer::fit: epochs, max_steps and max_seconds must not be negative; 0 sets no limit.");
    if (epochs == 0 && max_steps == 0 && max_seconds == 0)
      throw ConfigError("treadle::Trainer::fit: there is no limit; set epochs, max_steps or max_seconds.");
    if (log_every < 1 || evaluate_every < 1)
      throw ConfigError("treadle::Trainer::fit: log_every and evaluate_every must be at least 1.");
    if (early_stop && early_stop->patience < 1)
      throw ConfigError("treadle::Trainer::fit: early_stop needs a patience of at least 1 epoch.");
    if (early_stop && !(early_stop->min_delta >= 0 && std::isfinite(early_stop->min_delta)))
      throw ConfigError("treadle::Trainer::fit: early_stop needs a min_delta that is finite and not negative.");
  }
};

}  // namespace v0_1
}  // namespace treadle
