// SPDX-License-Identifier: Apache-2.0
// How long a device had nothing to do because the next batch was not there.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Adds up the time that a device waits while something is fetched. On a CPU that is the time of the call; on CUDA it
/// is measured by events on the device, because the host runs ahead: as long as work is left there, nothing is lost.
class WaitMeter {
 public:
  explicit WaitMeter(at::Device device) : device_(device) {}

  /// Returns `next()`, whose time counts.
  template <class F>
  auto operator()(F&& next) {
    if (device_.is_cuda()) {
      while (marks_.size() >= most_marks && marks_[1].query()) add_first();
      mark();
      auto value = next();
      mark();
      return value;
    }
    const auto asked = std::chrono::steady_clock::now();
    auto value = next();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - asked).count();
    return value;
  }

  /// Seconds since the last call. Waits for the device: for log points.
  double take() {
    while (marks_.size() >= 2) {
      marks_[1].synchronize();  // sync: log point
      add_first();
    }
    return std::exchange(seconds_, 0.0);
  }

 private:
  /// Between log points that are far apart, what the device has passed is added up; more marks than these there are
  /// only where it lags so far behind.
  static constexpr std::size_t most_marks = 128;

  void mark() {
    if (spare_.empty()) spare_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with a clock
    marks_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    marks_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  void add_first() {
    seconds_ += marks_[0].elapsedTime(marks_[1]) / 1000;
    for (int i = 0; i < 2; ++i) {
      spare_.push_back(std::move(marks_.front()));
      marks_.pop_front();
    }
  }

  at::Device device_;
  double seconds_ = 0;
  std::deque<c10::Event> marks_;   // in pairs
  std::vector<c10::Event> spare_;  // to be used again
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
