// SPDX-License-Identifier: Apache-2.0
// What Treadle throws. Every message is one sentence: what is wrong, where, what to do instead.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {
/// The first line of what an exception says; LibTorch appends a list of frames to it.
inline std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}
}  // namespace detail

/// Base of every exception that Treadle itself throws; ATen's own errors pass through as `c10::Error`.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A policy, rule, model or option that cannot work.
///
/// Most are thrown before a trainer exists. What only a run can show (a loss without a gradient, a metric that was
/// never recorded) is thrown in the middle of it: the open window is dropped, and the steps before it stay made.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A batch, loader or data set that cannot be used; the trainer stays usable.
class DataError : public Error {
 public:
  using Error::Error;
};

/// Saved state that is missing, damaged or foreign.
class SnapshotError : public Error {
 public:
  using Error::Error;
};

/// A rank, launcher or process group that failed.
class DistributedError : public Error {
 public:
  using Error::Error;
};

/// Training stopped by `nonfinite::Stop`; the weights are those from before the bad step.
class NonFiniteError : public Error {
 public:
  NonFiniteError(const std::string& what, std::int64_t step, std::int64_t micro_batch)
      : Error(what), step_(step), micro_batch_(micro_batch) {}
  /// Index of the bad step, counted from 0 over the trainer's life.
  std::int64_t step() const noexcept { return step_; }
  /// Index of the first micro-batch with a non-finite loss in that step, or -1 if only gradients were bad.
  std::int64_t micro_batch() const noexcept { return micro_batch_; }

 private:
  std::int64_t step_;
  std::int64_t micro_batch_;
};

}  // namespace v0_1
}  // namespace treadle
