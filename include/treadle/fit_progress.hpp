// SPDX-License-Identifier: Apache-2.0
// How far a fit has come: what it adds up between steps, and what a snapshot keeps of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "treadle/fit_options.hpp"
#include "treadle/metrics.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/meter.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Whether a metric still improves.
class EarlyStopping {
 public:
  double best = std::numeric_limits<double>::infinity();  ///< sign turned where larger is better
  std::int64_t epochs_without = 0;
  bool judged = false;

  /// Takes in an epoch's metrics, and returns whether it is time to stop.
  bool ends(const EarlyStop& rule, const Metrics& metrics) {
    // An epoch that counted nothing, all of its steps skipped say, judges nothing; a name that never comes is a
    // mistake.
    if (metrics.empty() || (judged && !metrics.find(rule.metric))) return false;
    judged = true;
    const double value = metrics[rule.metric] * (rule.maximize ? -1 : 1);
    if (!std::isfinite(value) || !(value < best - rule.min_delta)) return ++epochs_without >= rule.patience;
    best = value;
    epochs_without = 0;
    return false;
  }
};

/// Whether steps of an epoch are being made, all of its batches have been trained on, or none has yet.
enum class Place { BetweenEpochs, InEpoch, EpochOver };

/// In place of `Snapshots` where none are kept.
struct NoSnapshots {
  static constexpr bool saves = false;
};

/// Where a fit stands after a step. Numbers of a fit that goes on from a snapshot are those of the whole run.
struct FitProgress {
  FitResult result;
  Place place = Place::BetweenEpochs;
  std::int64_t epoch = 0;  ///< under way, from 0
  std::int64_t step_in_epoch = 0;
  std::int64_t batches_in_epoch = 0;  ///< of this rank
  std::int64_t steps_since_log = 0;
  std::int64_t rows_since_log = 0;
  std::int64_t rows_in_epoch = 0;   ///< until the last log point
  std::int64_t skipped_before = 0;  ///< the trainer's skipped steps when the run began
  observe::Meter meter;             ///< since the last log point
  observe::Totals epoch_totals;     ///< until the last log point, of all ranks
  EarlyStopping early_stopping;

  /// After an epoch's end.
  void next_epoch() {
    ++result.epochs;
    ++epoch;
    place = Place::BetweenEpochs;
    step_in_epoch = batches_in_epoch = rows_in_epoch = 0;
    epoch_totals = {};
  }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
