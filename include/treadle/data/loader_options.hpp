// SPDX-License-Identifier: Apache-2.0
// What a loader is told, and where it stands. No torch here.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <string>

#include "treadle/data/sharding.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct LoaderOptions {
  std::int64_t batch_size = 32;        ///< rows of a batch, on each rank
  bool shuffle = false;                ///< a new order each epoch
  std::uint64_t seed = 0;              ///< with the epoch it decides the order, on every machine; the same on all ranks
  bool drop_last = false;              ///< leave out the last batch of an epoch if it is shorter, on any rank
  int workers = 0;                     ///< threads that make batches ahead; 0: the caller makes each when it asks
  int prefetch = 0;                    ///< most batches in the making or ready; 0: two for each worker
  bool pin_memory = false;             ///< stack samples in page-locked memory, where there is a CUDA device
  int rank = 0;                        ///< whose part of the rows this is, from 0
  int world_size = 1;                  ///< ranks among which the rows are dealt out
  RaggedEnds ends = RaggedEnds::Join;  ///< of an epoch whose rows are no multiple of the ranks

  /// Throws `ConfigError` for numbers that cannot be, in the name of `who`.
  void check(const std::string& who) const {
    constexpr int most_workers = 1024;
    if (batch_size < 1)
      throw ConfigError(who + ": batch_size must be at least 1, and is " + std::to_string(batch_size) + ".");
    if (workers < 0 || workers > most_workers)
      throw ConfigError(who + ": workers must be 0 to " + std::to_string(most_workers) + ", and is " +
                        std::to_string(workers) + "; 4 for each CPU core are many.");
    if (prefetch < 0) throw ConfigError(who + ": prefetch must not be negative; 0 means two batches for each worker.");
  }
  /// Most batches that exist at once beside the one in use.
  int depth() const { return workers == 0 ? 0 : prefetch == 0 ? 2 * workers : std::max(prefetch, 1); }
};

/// What to change where batches come too slowly, as the end of a sentence.
inline std::string loading_advice(const LoaderOptions& options) {
  if (options.workers == 0)
    return "give the loader workers (LoaderOptions::workers; treadle::data::bench(loader) finds how many), or store "
           "the data "
           "in a form that takes less work";
  return "more than its " + std::to_string(options.workers) +
         " workers may help (treadle::data::bench(loader) finds how many); if not, store the data in a form that takes "
         "less "
         "work, do less to each sample, or do it to whole batches on the device with treadle::data::map_batches";
}

/// `options` for this process's part of the rows, in a job that `world` describes.
inline LoaderOptions sharded(LoaderOptions options, const World& world = World::from_environment()) {
  options.rank = world.rank;
  options.world_size = world.world_size;
  return options;
}

/// The whole state of a loader: which batch of which epoch comes next, on each rank.
///
/// It never stands behind an epoch's last batch: that is batch 0 of the next epoch.
struct Position {
  std::int64_t epoch = 0;
  std::int64_t batch = 0;
  friend bool operator==(const Position&, const Position&) = default;
};

/// A loader that can say where it stands and go on from there, in this process or in a later one.
///
/// `position()` names the batch after the last one that was given; `seek(position)` makes the next pass begin there,
/// and a following `set_epoch` of the same epoch leaves it there. A loader over a map-style data set reads nothing to
/// get there. What else decides the batches (data, options, sampler) must be the same.
///
/// One with `sought()`, which gives the position of a `seek` that no pass has followed yet, tells `fit` where to begin.
/// One that does not know its size has iterators with `is_last()`: any other is asked for a batch ahead where a policy
/// has to know the last one, and its position is then a batch further.
template <class L>
concept resumable = requires(L& loader, const L& seen, const Position& position) {
  { seen.position() } -> std::same_as<Position>;
  loader.seek(position);
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
