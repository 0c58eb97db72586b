// SPDX-License-Identifier: Apache-2.0
// How long a device had nothing to do because the next batch was not there.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstddef>
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
    for (std::size_t i = 0; i + 1 < used_; i += 2) {
      marks_[i + 1].synchronize();  // sync: log point
      seconds_ += marks_[i].elapsedTime(marks_[i + 1]) / 1000;
    }
    used_ = 0;
    return std::exchange(seconds_, 0.0);
  }

 private:
  void mark() {
    if (used_ == marks_.size()) marks_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with a clock
    marks_[used_++].record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  at::Device device_;
  double seconds_ = 0;
  std::vector<c10::Event> marks_;  // in pairs, used again after each log point
  std::size_t used_ = 0;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
