// SPDX-License-Identifier: Apache-2.0
// A curve of any length in bounded memory, and the ticks of an axis. No torch here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Points in the order of x. From `limit` points on, neighbors are merged into their mean, so that at least half as
/// many stay.
class Series {
 public:
  struct Point {
    double x = 0;
    double y = 0;
    bool gap = false;  ///< whether a value that is not finite is, or was merged into, this point
  };
  explicit Series(std::size_t limit = 600) : limit_(std::max<std::size_t>(limit, 2) / 2 * 2) {}

  void add(double x, double y) {
    const Point point{x, y, !std::isfinite(y)};
    pending_ = taken_ == 0 ? point : merged(pending_, point, static_cast<double>(taken_));
    if (++taken_ < stride_) return;
    points_.push_back(pending_);
    taken_ = 0;
    if (points_.size() < limit_) return;
    for (std::size_t i = 0; i < limit_ / 2; ++i) points_[i] = merged(points_[2 * i], points_[2 * i + 1], 1);
    points_.resize(limit_ / 2);
    stride_ *= 2;
  }

  /// All points; the last one may be the mean over fewer values than the others.
  std::vector<Point> points() const {
    auto all = points_;
    if (taken_ > 0) all.push_back(pending_);
    return all;
  }

 private:
  // A value that is not finite must not swallow the neighbor that it is merged with; the gap is remembered beside it.
  static Point merged(const Point& mean, const Point& next, double weight) {
    const double y = !std::isfinite(mean.y)   ? next.y
                     : !std::isfinite(next.y) ? mean.y
                                              : mean.y + (next.y - mean.y) / (weight + 1);
    return {next.x, y, mean.gap || next.gap};
  }

  std::size_t limit_;
  std::size_t stride_ = 1;
  std::size_t taken_ = 0;
  Point pending_{};
  std::vector<Point> points_;
};

/// A range of an axis that begins and ends at a tick; ticks are 1, 2 or 5 times a power of ten apart.
struct Axis {
  double low = 0;
  double high = 1;
  double tick = 1;
  int decimals = 0;

  /// Around [low, high] with about `wanted` ticks, no closer than `least`.
  static Axis over(double low, double high, int wanted, double least = 0) {
    if (!(low <= high)) return {};
    if (low == high) {
      const double margin = low == 0 ? 0.5 : std::fabs(low) / 10;
      low -= margin;
      high += margin;
    }
    const double rough = std::max((high - low) / wanted, least);
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    const double share = rough / power;
    Axis axis;
    axis.tick = power * (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10);
    axis.low = std::floor(low / axis.tick + 1e-9) * axis.tick;
    axis.high = std::ceil(high / axis.tick - 1e-9) * axis.tick;
    axis.decimals = std::clamp(static_cast<int>(-std::floor(std::log10(axis.tick) + 1e-9)), 0, 9);
    return axis;
  }
  int ticks() const { return static_cast<int>(std::floor((high - low) / tick + 1e-9)) + 1; }
  double at(int index) const { return low + index * tick; }
  double share(double value) const { return (value - low) / (high - low); }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
