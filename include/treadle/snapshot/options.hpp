// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// Whether `fit` goes on from the latest valid snapshot in the folder, if there is one.
enum class Resume { No, Auto };

/// Options of `Snapshots`.
struct SnapshotOptions {
  std::filesystem::path directory{};  ///< of this run's snapshots; made where it is missing
  Resume resume = Resume::No;
  std::int64_t every_steps = 0;      ///< steps between snapshots; 0: none within an epoch
  std::int64_t every_epochs = 1;     ///< epochs between snapshots; 0: none at an epoch's end
  bool at_end = true;                ///< one more where `fit` returns, whatever the reason
  std::int64_t keep_last = 2;        ///< the newest ones; at least 1
  std::int64_t keep_every = 0;       ///< besides, those whose step is a multiple of this; 0: none
  std::int64_t keep_best = 0;        ///< besides, those with the best `best_metric` of the last whole epoch; 0: none
  std::string best_metric = "loss";  ///< of the evaluation (of training, without one)
  bool maximize = false;             ///< whether larger is better
  bool asynchronous = true;          ///< written by a thread while training goes on
  bool handle_signals = false;       ///< SIGTERM, SIGINT and SIGUSR1 save and end `fit`; a second one leaves at once
  std::chrono::milliseconds signal_budget{20000};  ///< from a signal to the end of `fit`
  std::chrono::milliseconds peer_timeout{60000};   ///< longest wait of rank 0 for the files of other ranks

  /// Throws `ConfigError` if a value is out of range.
  void check() const {
    if (directory.empty())
      throw ConfigError("treadle::Snapshots: no directory was named; set SnapshotOptions::directory, one a run.");
    if (every_steps < 0 || every_epochs < 0 || keep_every < 0 || keep_best < 0)
      throw ConfigError(
          "treadle::Snapshots: every_steps, every_epochs, keep_every and keep_best must not be negative; 0 is never.");
    if (keep_last < 1)
      throw ConfigError("treadle::Snapshots: keep_last must be at least 1, so that there is one to go on from.");
    if (signal_budget.count() < 1000 || signal_budget.count() > 30000)
      throw ConfigError("treadle::Snapshots: signal_budget must lie between 1 and 30 s.");
    if (peer_timeout.count() <= 0) throw ConfigError("treadle::Snapshots: peer_timeout must be positive.");
  }
};

}  // namespace v0_1
}  // namespace treadle
