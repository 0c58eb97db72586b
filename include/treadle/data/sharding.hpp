// SPDX-License-Identifier: Apache-2.0
// Which rows of an epoch belong to which rank. No torch here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "treadle/error.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// What becomes of an epoch's last rows where their number is no multiple of the ranks'.
enum class RaggedEnds {
  Join,  ///< every row once: some ranks have one row fewer, and so perhaps one batch fewer
  Pad,   ///< equal numbers: the order goes on from its beginning, so that its first rows come twice
  Drop,  ///< equal numbers: the last rows of the order are left out
};

/// The part of a rank in an epoch of `rows` rows, dealt out like cards: positions `rank`, `rank` + `ranks`, ... of the
/// epoch's order. So batch k of all ranks together is a run of that order, whatever the number of ranks.
///
/// Throws `ConfigError` for a rank that the job does not have.
class Shard {
 public:
  Shard() = default;
  Shard(std::int64_t rows, std::int64_t rank, std::int64_t ranks, RaggedEnds ends)
      : rows_(rows), rank_(rank), ranks_(ranks) {
    if (ranks < 1 || rank < 0 || rank >= ranks)
      throw ConfigError("data::Shard: rank " + std::to_string(rank) + " of a world_size of " + std::to_string(ranks) +
                        " cannot be: ranks count from 0 to world_size - 1; sharded(options, world) sets both.");
    const std::int64_t fewest = rows / ranks;
    const std::int64_t left = rows % ranks;
    size_ = fewest;
    if (ends == RaggedEnds::Join && rank < left) ++size_;
    if (ends == RaggedEnds::Pad && left > 0) ++size_;
    fewest_ = ends == RaggedEnds::Pad ? size_ : fewest;
  }

  /// Rows of this rank.
  std::int64_t size() const { return size_; }
  /// Where row `i` of this rank stands in the epoch's order.
  std::int64_t position(std::int64_t i) const { return (rank_ + i * ranks_) % std::max<std::int64_t>(rows_, 1); }
  /// Batches of `batch_size` rows on this rank; with `full`, on all ranks those that no rank has fewer rows of.
  std::int64_t batches(std::int64_t batch_size, bool full) const {
    return full ? fewest_ / batch_size : size_ / batch_size + (size_ % batch_size == 0 ? 0 : 1);
  }

 private:
  std::int64_t rows_ = 0;
  std::int64_t rank_ = 0;
  std::int64_t ranks_ = 1;
  std::int64_t size_ = 0;
  std::int64_t fewest_ = 0;  // rows of the rank that has fewest
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
