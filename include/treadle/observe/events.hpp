// SPDX-License-Identifier: Apache-2.0
// What observers are told. All but `StepEvent` hold host numbers only. Epochs are numbered from 0; steps are counted,
// so that the first step of a fit is told as 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/metrics.hpp"
#include "treadle/step_result.hpp"

namespace treadle {
inline namespace v0_1 {

/// Why `fit` returned.
enum class StopReason { Finished, MaxSteps, MaxTime, EarlyStop, Requested, Signal };

/// In words, for tables and files.
constexpr std::string_view to_string(StopReason reason) {
  switch (reason) {
    case StopReason::Finished:
      return "finished";
    case StopReason::MaxSteps:
      return "step limit reached";
    case StopReason::MaxTime:
      return "time limit reached";
    case StopReason::EarlyStop:
      return "no further improvement";
    case StopReason::Requested:
      return "stop requested";
    case StopReason::Signal:
      return "ended by a signal";
  }
  return "unknown";
}

namespace observe {

/// Before the first step of `fit`.
struct RunInfo {
  std::int64_t epochs = 0;           ///< 0: until another limit
  std::int64_t steps_per_epoch = 0;  ///< 0: unknown
  std::int64_t total_steps = 0;      ///< 0: unknown; of the whole run, where it goes on from a snapshot
  std::int64_t steps_before = 0;     ///< made before, where it does
  std::int64_t parameters = 0;       ///< elements that are trained
  std::string device{};              ///< "cpu", "cuda:0"
  bool evaluates = false;            ///< whether a test loader was given
};

/// After each step; the result's tensors are on the device, and reading one waits for it.
struct StepEvent {
  const StepResult& result;
  std::int64_t epoch = 0;          ///< from 0
  std::int64_t step_in_epoch = 0;  ///< steps made in this epoch, this one included
  std::int64_t step = 0;           ///< steps made in this fit, this one included; `result.index` counts from 0
};

/// At each log point: means since the last one.
struct LogEvent {
  std::int64_t epoch = 0;              ///< from 0
  std::int64_t step_in_epoch = 0;      ///< steps made in this epoch
  std::int64_t step = 0;               ///< steps made in this fit
  std::int64_t skipped = 0;            ///< steps skipped in this fit
  Metrics metrics{};                   ///< "loss", recorded values, "grad_norm" where it is measured
  double learning_rate = 0;            ///< of the first group
  std::optional<double> loss_scale{};  ///< with precision::Fp16
  double seconds = 0;                  ///< since fit began
  double steps_per_second = 0;         ///< since the last log point, or since the epoch began
  double rows_per_second = 0;          ///< likewise
  double data_wait = 0;                ///< share of the time since the last log point spent waiting for the loader
};

/// At the end of each epoch, after its evaluation.
struct EpochEvent {
  std::int64_t epoch = 0;         ///< from 0
  std::int64_t step = 0;          ///< steps made in this fit
  Metrics train{};                ///< means over the epoch
  std::optional<Metrics> test{};  ///< of the evaluation, where there was one; of the average where one is kept
  double seconds = 0;             ///< of this epoch, its evaluation included
  double rows_per_second = 0;     ///< of its training alone
  double data_wait = 0;           ///< share of the training time spent waiting for the loader
};

}  // namespace observe

/// What `fit` did.
struct FitResult {
  StopReason stop_reason = StopReason::Finished;
  std::int64_t epochs = 0;                     ///< complete epochs
  std::int64_t steps = 0;                      ///< steps made, skipped ones included
  std::int64_t skipped = 0;                    ///< steps that changed nothing
  int signal = 0;                              ///< number of the signal that ended it, or 0
  double seconds = 0;                          ///< of the whole fit
  std::vector<observe::EpochEvent> history{};  ///< one entry an epoch

  /// Metrics of the last evaluation; empty if there was none.
  Metrics test() const {
    for (auto it = history.rbegin(); it != history.rend(); ++it)
      if (it->test) return *it->test;
    return {};
  }
};

}  // namespace v0_1
}  // namespace treadle
