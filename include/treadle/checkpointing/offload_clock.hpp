// SPDX-License-Identifier: Apache-2.0
// What the link to the host carries, and how long a forward pass would take without it: together the default budget.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "treadle/checkpointing/streams.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A point in the work of a stream, whose distance from another one can be told.
inline c10::Event timed_event(const c10::Stream& stream) {
  c10::Event event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(stream);
  return event;
}
/// A stretch of the work of a stream.
struct TimedSpan {
  c10::Event began;
  c10::Event ended;
  bool is_over() const { return began.query() && ended.query(); }
  double seconds() const { return began.elapsedTime(ended) / 1e3; }
};

/// The forward passes of one thread.
struct PassSample {
  std::int64_t offered = 0;  // bytes that could have gone to the host: passes of short batches have fewer
  double seconds = 0;        // in which the device did not wait for the link
};
/// The shortest of the largest passes; none is thrown off by a shorter batch in between.
class PassTimes {
 public:
  void add(const PassSample& sample) {
    if (sample.offered <= 0 || sample.seconds <= 0) return;
    if (static_cast<double>(sample.offered) > 1.05 * static_cast<double>(largest_)) {
      largest_ = sample.offered;
      shortest_ = sample.seconds;
      samples_ = 1;
    } else if (static_cast<double>(sample.offered) >= 0.95 * static_cast<double>(largest_)) {
      shortest_ = std::min(shortest_, sample.seconds);
      ++samples_;
    }
  }
  int samples() const { return samples_; }
  /// 0 while there is none.
  double shortest() const { return shortest_; }

 private:
  std::int64_t largest_ = 0;
  double shortest_ = 0;
  int samples_ = 0;
};

/// Times forward passes of one thread on its device, and never waits for one.
class ForwardClock {
 public:
  /// Whether the pass that begins is timed. The first one is not: it allocates its pinned memory.
  bool start(at::Device device) {
    began_.reset();
    if (running_) {
      if (!running_->span.is_over() || !std::ranges::all_of(running_->stalls, &TimedSpan::is_over)) return false;
      double seconds = running_->span.seconds();
      for (const auto& stall : running_->stalls) seconds -= stall.seconds();
      times_.add({running_->offered, seconds});
      seconds_ = times_.shortest();
      running_.reset();
    }
    if (++passes_ == 1 || times_.samples() >= enough || passes_ > most) return false;
    began_ = timed_event(stream_here(device));
    return true;
  }
  /// At the end of a pass that `start()` times; `whole` if nothing was thrown in it.
  void stop(bool whole, at::Device device, std::int64_t offered, std::vector<TimedSpan> stalls) {
    if (!began_ || !whole) return began_.reset();
    running_.emplace(Running{{std::move(*began_), timed_event(stream_here(device))}, std::move(stalls), offered});
    began_.reset();
  }
  double seconds() const { return seconds_; }

 private:
  static constexpr int enough = 6;
  static constexpr int most = 48;
  struct Running {
    TimedSpan span;
    std::vector<TimedSpan> stalls;
    std::int64_t offered;
  };
  std::optional<c10::Event> began_;
  std::optional<Running> running_;
  PassTimes times_;
  int passes_ = 0;
  std::atomic<double> seconds_ = 0;
};

/// Bytes a second from `device` to pinned memory. Waits for the device.
inline double measure_link(at::Device device) {
  constexpr std::int64_t bytes = std::int64_t{64} << 20;
  const auto from = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  auto to = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  const auto stream = stream_here(device);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    auto began = timed_event(stream);
    to.copy_(from, /*non_blocking=*/true);
    const TimedSpan copy{std::move(began), timed_event(stream)};
    copy.ended.synchronize();
    best = std::max(best, static_cast<double>(bytes) / copy.seconds());
  }
  return best;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
