// SPDX-License-Identifier: Apache-2.0
// The order in which an epoch goes through a data set: a pure function of (seed, epoch), the same on every rank. No
// torch here.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "treadle/data/permutation.hpp"
#include "treadle/error.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// What a sampler is asked for.
struct EpochRequest {
  std::int64_t rows = 0;       ///< of the data set
  std::int64_t job_batch = 1;  ///< rows of a batch of all ranks together
  bool shuffle = false;        ///< what the loader's options say
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
};

/// Decides which rows an epoch has, and in what order.
///
/// `draws(rows)`: how many; `order(request)`: their numbers, as many as that, or none for all rows as they lie. Both
/// are pure functions. A run of `job_batch` rows is one batch of all ranks, dealt out among them. A sampler that gives
/// a row more than once says so with `static constexpr bool repeats = true`: then each draw of it has random numbers of
/// its own.
template <class S>
concept sampler = requires(const S& s, std::int64_t rows, const EpochRequest& request) {
  { s.draws(rows) } -> std::convertible_to<std::int64_t>;
  { s.order(request) } -> std::convertible_to<std::vector<std::int64_t>>;
};

/// Every row once: as they lie, or shuffled where the loader's options say so.
struct EveryRow {
  std::int64_t draws(std::int64_t rows) const { return rows; }
  std::vector<std::int64_t> order(const EpochRequest& r) const {
    return r.shuffle ? permutation(r.rows, r.seed, r.epoch) : std::vector<std::int64_t>{};
  }
};

/// Rows drawn at random with replacement, each as often as its weight says; always random, whatever `shuffle` says.
///
/// Throws `ConfigError` for weights that are negative, not finite, all 0, or not one for each row.
class Weighted {
 public:
  static constexpr bool repeats = true;

  /// `weights`: one for each row, in any unit. `draws`: rows of an epoch; 0: as many as the data set has.
  explicit Weighted(std::vector<double> weights, std::int64_t draws = 0) : sums_(std::move(weights)), draws_(draws) {
    double sum = 0;
    for (double& weight : sums_) {
      if (!(weight >= 0) || !std::isfinite(weight))
        throw ConfigError("data::Weighted: a weight is " + std::to_string(weight) +
                          "; weights must be finite and not negative.");
      weight = sum += weight;
    }
    if (!(sum > 0) || !std::isfinite(sum))
      throw ConfigError("data::Weighted: the weights must have a finite sum above 0.");
    if (draws < 0) throw ConfigError("data::Weighted: draws must not be negative; 0 means as many as there are rows.");
  }

  std::int64_t draws(std::int64_t rows) const { return draws_ == 0 ? rows : draws_; }
  std::vector<std::int64_t> order(const EpochRequest& r) const {
    if (static_cast<std::int64_t>(sums_.size()) != r.rows)
      throw ConfigError("data::Weighted: there are " + std::to_string(sums_.size()) + " weights for " +
                        std::to_string(r.rows) + " rows; each row needs one.");
    std::vector<std::int64_t> rows(static_cast<std::size_t>(draws(r.rows)));
    KeyedGenerator generator(r.seed, static_cast<std::uint64_t>(r.epoch));
    const double below = std::nextafter(sums_.back(), 0.0);  // what is drawn may be rounded up to the sum itself
    for (auto& row : rows)  // the first sum above what was drawn: a weight of 0 has none
      row = std::ranges::upper_bound(sums_, std::min(generator.uniform(0, sums_.back()), below)) - sums_.begin();
    return rows;
  }

 private:
  std::vector<double> sums_;
  std::int64_t draws_;
};

/// Every row once, in batches of similar length, so that little is lost to padding.
///
/// With `shuffle`, rows are shuffled, runs of `pool` batches of them sorted by length, and the batches shuffled;
/// without it, all rows are sorted, the longest first. Ranks share a batch's lengths evenly. Throws `ConfigError`
/// unless there is a length for each row.
class LengthBuckets {
 public:
  /// `lengths`: of each row, in any unit. `pool`: batches among which rows of similar length are looked for; more give
  /// more even lengths, fewer more randomness.
  explicit LengthBuckets(std::vector<std::int64_t> lengths, std::int64_t pool = 100)
      : lengths_(std::move(lengths)), pool_(pool) {
    if (pool < 1) throw ConfigError("data::LengthBuckets: pool must be at least 1 batch.");
  }

  std::int64_t draws(std::int64_t rows) const { return rows; }
  std::vector<std::int64_t> order(const EpochRequest& r) const {
    if (static_cast<std::int64_t>(lengths_.size()) != r.rows)
      throw ConfigError("data::LengthBuckets: there are " + std::to_string(lengths_.size()) + " lengths for " +
                        std::to_string(r.rows) + " rows; each row needs one.");
    const auto longer = [&](std::int64_t a, std::int64_t b) {
      return lengths_[static_cast<std::size_t>(a)] > lengths_[static_cast<std::size_t>(b)];
    };
    if (!r.shuffle) {
      std::vector<std::int64_t> rows(lengths_.size());
      std::iota(rows.begin(), rows.end(), std::int64_t{0});
      std::ranges::stable_sort(rows, longer);
      return rows;
    }
    auto rows = permutation(r.rows, r.seed, r.epoch);
    // The rows of the last, short batch are left as the shuffle put them: it must stay the last.
    const std::int64_t batches = r.rows / r.job_batch;
    for (std::int64_t begin = 0; begin < batches; begin += std::min(pool_, batches - begin)) {
      const std::int64_t end = begin + std::min(pool_, batches - begin);
      std::stable_sort(rows.begin() + begin * r.job_batch, rows.begin() + end * r.job_batch, longer);
    }
    std::vector<std::int64_t> turns = permutation(batches, ~r.seed, r.epoch);
    std::vector<std::int64_t> order;
    order.reserve(rows.size());
    for (const auto turn : turns)
      order.insert(order.end(), rows.begin() + turn * r.job_batch, rows.begin() + (turn + 1) * r.job_batch);
    order.insert(order.end(), rows.begin() + batches * r.job_batch, rows.end());
    return order;
  }

 private:
  std::vector<std::int64_t> lengths_;
  std::int64_t pool_;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
