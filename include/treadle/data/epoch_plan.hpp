// SPDX-License-Identifier: Apache-2.0
// Which rows every batch of an epoch has, on one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "treadle/data/dataset.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/sampler.hpp"
#include "treadle/data/sharding.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A pure function of (rows, options, sampler, epoch); 8 bytes a row of this rank, none where the rows are taken as
/// they lie, and while it is made over several ranks 8 bytes more for each row of the data set.
class EpochPlan {
 public:
  template <data::sampler Sampler>
  EpochPlan(std::int64_t rows, const data::LoaderOptions& options, const Sampler& sampler, std::int64_t epoch)
      : shard_(shard(rows, options, sampler)),
        options_(options),
        epoch_(epoch),
        batches_(shard_.batches(options.batch_size, options.drop_last)) {
    if constexpr (requires { Sampler::repeats; }) repeats_ = Sampler::repeats;
    std::int64_t job_batch = 0;
    if (__builtin_mul_overflow(options.batch_size, std::int64_t{options.world_size}, &job_batch)) job_batch = INT64_MAX;
    std::vector<std::int64_t> order = sampler.order(
        {.rows = rows, .job_batch = job_batch, .shuffle = options.shuffle, .seed = options.seed, .epoch = epoch});
    const std::int64_t draws = sampler.draws(rows);
    if (!order.empty() && static_cast<std::int64_t>(order.size()) != draws)
      throw ConfigError("data::Loader: the sampler gave an order of " + std::to_string(order.size()) +
                        " rows for its " + std::to_string(draws) + " draws; both must be equal.");
    for (const std::int64_t row : order)
      if (row < 0 || row >= rows)
        throw ConfigError("data::Loader: the sampler gave row " + std::to_string(row) + " of a data set of " +
                          std::to_string(rows) + " rows; its numbers must be 0 to " + std::to_string(rows - 1) + ".");
    if (order.empty() && draws > 0 && draws != rows)
      throw ConfigError("data::Loader: the sampler gave no order for its " + std::to_string(draws) +
                        " draws; only all rows as they lie need none.");
    if (order.empty() && options.world_size == 1) return;
    if (options.world_size == 1) {
      auto* owner = new std::vector<std::int64_t>(std::move(order));
      there_ = numbers_ = at::from_blob(
          owner->data(), {draws}, [owner](void*) { delete owner; }, at::kLong);
      return;
    }
    numbers_ = at::empty({shard_.size()}, at::kLong);
    auto* own = numbers_.mutable_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < shard_.size(); ++i) {
      const std::int64_t position = shard_.position(i);
      own[i] = order.empty() ? position : order[static_cast<std::size_t>(position)];
    }
    there_ = numbers_;
  }

  template <data::sampler Sampler>
  static data::Shard shard(std::int64_t rows, const data::LoaderOptions& options, const Sampler& sampler) {
    return {sampler.draws(rows), options.rank, options.world_size, options.ends};
  }

  std::int64_t epoch() const { return epoch_; }
  std::int64_t batches() const { return batches_; }
  /// This rank's row numbers, int64 on the data set's device; undefined where that is all rows as they lie.
  const at::Tensor& order() const { return there_; }
  /// Brings the row numbers to where the data are, once an epoch.
  void move_to(at::Device device) {
    if (there_.defined() && !device.is_cpu()) there_ = numbers_.to(device);
  }

  /// The rows of batch `k`.
  data::Rows rows(std::int64_t k) const {
    const std::int64_t begin = k * options_.batch_size;
    const std::int64_t count = std::min(options_.batch_size, shard_.size() - begin);
    if (!numbers_.defined()) return {begin, count};
    return {numbers_.narrow(0, begin, count), there_.narrow(0, begin, count)};
  }

  /// The random numbers of row `i` of batch `k`, which is sample `sample`: of (seed, epoch, sample) alone, and of the
  /// place in the job's order too where samples come more than once. `use` tells users of them apart.
  data::KeyedGenerator generator(std::int64_t k, std::int64_t i, std::int64_t sample, std::uint64_t use = 0) const {
    data::KeyedGenerator own(options_.seed ^ use, epoch_, sample);
    if (!repeats_) return own;
    return {own(), static_cast<std::uint64_t>(shard_.position(k * options_.batch_size + i))};
  }

 private:
  data::Shard shard_;
  data::LoaderOptions options_;
  std::int64_t epoch_ = 0;
  std::int64_t batches_ = 0;
  bool repeats_ = false;
  at::Tensor numbers_;  // on the CPU
  at::Tensor there_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
