// SPDX-License-Identifier: Apache-2.0
// Samples of a varying number of points.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "treadle/data/collate.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Clouds one after the other: cloud i has the rows `offsets[i]` to `offsets[i + 1]` of `points`.
struct PointBatch {
  at::Tensor points;   ///< `[all points, features]`
  at::Tensor offsets;  ///< int64 `[clouds + 1]`, from 0, never falling
  at::Tensor label;    ///< int64 `[clouds]`

  /// Clouds: they are the rows of a batch.
  std::int64_t rows() const { return label.defined() ? label.size(0) : 0; }
  /// Which cloud each point is of, int64 `[all points]`, on the device of the offsets.
  at::Tensor cloud_of_point() const {
    const at::Tensor lengths = offsets.narrow(0, 1, rows()).sub(offsets.narrow(0, 0, rows()));
    return at::arange(rows(), lengths.options()).repeat_interleave(lengths, 0, points.size(0));
  }
};

/// One cloud.
struct PointCloud {
  at::Tensor points;  ///< `[points, features]`
  std::int64_t label = 0;

  static PointBatch collate(std::span<const PointCloud> clouds, const Placement& place) {
    const at::Tensor& first = clouds.front().points;
    std::int64_t count = 0;
    for (std::size_t i = 0; i < clouds.size(); ++i) {
      const at::Tensor& points = clouds[i].points;
      if (!points.defined() || points.dim() != 2 || points.size(1) != first.size(1) ||
          points.scalar_type() != first.scalar_type())
        throw CollateError("its points have another type, or are no matrix with the features of the first cloud",
                           static_cast<std::int64_t>(i));
      count += points.size(0);
    }
    const auto rows = static_cast<std::int64_t>(clouds.size());
    PointBatch batch{.points = place.empty({count, first.size(1)}, first.scalar_type()),
                     .offsets = place.empty({rows + 1}, at::kLong),
                     .label = place.empty({rows}, at::kLong)};
    auto* offsets = batch.offsets.mutable_data_ptr<std::int64_t>();
    auto* labels = batch.label.mutable_data_ptr<std::int64_t>();
    *offsets = 0;
    for (const PointCloud& cloud : clouds) {
      batch.points.narrow(0, *offsets, cloud.points.size(0)).copy_(cloud.points);
      offsets[1] = *offsets + cloud.points.size(0);
      ++offsets;
      *labels++ = cloud.label;
    }
    return batch;
  }
};

/// Clouds in memory, as a map-style data set. Throws `DataError` where the three tensors do not fit together.
class PointClouds {
 public:
  explicit PointClouds(PointBatch clouds) : clouds_(std::move(clouds)) {
    const auto& [points, offsets, label] = clouds_;
    if (!points.defined() || !offsets.defined() || !label.defined() || points.dim() != 2 || offsets.dim() != 1 ||
        label.dim() != 1 || offsets.scalar_type() != at::kLong || label.scalar_type() != at::kLong ||
        !points.is_cpu() || !offsets.is_cpu() || !label.is_cpu())
      throw DataError(
          "data::PointClouds: points must be [points, features], offsets int64 [clouds + 1] and label int64 [clouds], "
          "all "
          "on the CPU.");
    if (offsets.size(0) != label.size(0) + 1)
      throw DataError("data::PointClouds: there are " + std::to_string(offsets.size(0)) + " offsets for " +
                      std::to_string(label.size(0)) + " labels; clouds need one offset more than there are.");
    clouds_.offsets = offsets.contiguous();
    clouds_.label = label.contiguous();
    if (at(0) != 0 || at(size()) != points.size(0))
      throw DataError("data::PointClouds: the offsets go from " + std::to_string(at(0)) + " to " +
                      std::to_string(at(size())) + "; they must go from 0 to the number of points, " +
                      std::to_string(points.size(0)) + ".");
    for (std::int64_t i = 0; i < size(); ++i)
      if (at(i + 1) < at(i))
        throw DataError("data::PointClouds: the offsets fall from " + std::to_string(at(i)) + " to " +
                        std::to_string(at(i + 1)) + " at cloud " + std::to_string(i) + "; they must never fall.");
  }

  std::int64_t size() const { return clouds_.label.size(0); }
  PointCloud get(std::int64_t i) const {
    return {clouds_.points.narrow(0, at(i), at(i + 1) - at(i)), clouds_.label.const_data_ptr<std::int64_t>()[i]};
  }
  /// Points of each cloud, for `LengthBuckets`.
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < size(); ++i) all.push_back(at(i + 1) - at(i));
    return all;
  }

 private:
  std::int64_t at(std::int64_t i) const { return clouds_.offsets.const_data_ptr<std::int64_t>()[i]; }

  PointBatch clouds_;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
