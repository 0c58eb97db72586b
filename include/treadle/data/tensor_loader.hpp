// SPDX-License-Identifier: Apache-2.0
// Batches of tensors in memory; over several ranks, each rank's part of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/permutation.hpp"
#include "treadle/data/sharding.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct TensorLoaderOptions {
  std::int64_t batch_size = 32;        ///< rows of a batch, on each rank
  bool shuffle = false;                ///< a new order each epoch
  std::uint64_t seed = 0;              ///< with the epoch it decides the order, on every machine; the same on all ranks
  bool drop_last = false;              ///< leave out the last batch of an epoch if it is shorter, on any rank
  int rank = 0;                        ///< whose part of the rows this is, from 0
  int world_size = 1;                  ///< ranks among which the rows are dealt out
  RaggedEnds ends = RaggedEnds::Join;  ///< of an epoch whose rows are no multiple of the ranks
};

/// `options` for this process's part of the rows, in a job that `world` describes.
inline TensorLoaderOptions sharded(TensorLoaderOptions options, const World& world = World::from_environment()) {
  options.rank = world.rank;
  options.world_size = world.world_size;
  return options;
}

/// Batches of tensors that are in memory, on a CPU or a CUDA device: an input range that gives an epoch each time it is
/// gone through, and that may be left early.
///
/// The order is a pure function of (seed, epoch). The first pass is epoch 0, each further one the next; `set_epoch`
/// chooses. No default random generator is touched. Without `shuffle`, on one rank, batches are views of the data. `B`
/// is any batch type whose tensors have the rows as their first dimension. Iterators need the loader to stay where it
/// is.
///
/// Over several ranks all go through the same order and rank r takes its rows r, r + world_size and so on: batch k of a
/// rank is its part of batch k of the job, the same rows as on one rank with a batch size of batch_size * world_size.
///
/// Throws `ConfigError` for a batch size below 1 and for an impossible rank, `DataError` for tensors of different
/// lengths or devices.
template <class B = Batch>
class TensorLoader {
 public:
  explicit TensorLoader(B data, TensorLoaderOptions options = {}) : data_(std::move(data)), options_(options) {
    if (options_.batch_size < 1)
      throw ConfigError("data::TensorLoader: batch_size must be at least 1, and is " +
                        std::to_string(options_.batch_size) + ".");
    bool first = true;
    treadle::for_each_tensor(data_, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const std::int64_t rows = tensor.dim() == 0 ? -1 : tensor.size(0);
      if (first) {
        rows_ = rows;
        device_ = tensor.device();
      }
      first = false;
      if (rows != rows_ || rows < 0)
        throw DataError("data::TensorLoader: the tensors have different numbers of rows (" + std::to_string(rows_) +
                        " and " + (rows < 0 ? "none" : std::to_string(rows)) + "); all need the same first dimension.");
      if (tensor.device() != device_)
        throw DataError("data::TensorLoader: the tensors lie on " + device_.str() + " and on " + tensor.device().str() +
                        "; put all on one device.");
    });
    if (first) throw DataError("data::TensorLoader: the data hold no tensor.");
    shard_ = Shard(rows_, options_.rank, options_.world_size, options_.ends);
  }

  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using iterator_category = std::input_iterator_tag;
    using value_type = B;
    using difference_type = std::ptrdiff_t;
    using reference = const B&;
    using pointer = const B*;

    Iterator() = default;
    reference operator*() const { return batch_; }
    pointer operator->() const { return &batch_; }
    Iterator& operator++() {
      ++index_;
      fetch();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) {
      return it.loader_ == nullptr || it.index_ >= it.loader_->size();
    }

   private:
    friend class TensorLoader;
    Iterator(const TensorLoader& loader, at::Tensor order) : loader_(&loader), order_(std::move(order)) { fetch(); }

    void fetch() {
      if (*this == std::default_sentinel) return;
      const std::int64_t begin = index_ * loader_->options_.batch_size;
      const std::int64_t rows = std::min(loader_->options_.batch_size, loader_->shard_.size() - begin);
      batch_ = loader_->data_;
      const at::Tensor chosen = order_.defined() ? order_.narrow(0, begin, rows) : at::Tensor();
      treadle::for_each_tensor(batch_, [&](at::Tensor& tensor) {
        if (tensor.defined())
          tensor = chosen.defined() ? tensor.index_select(0, chosen) : tensor.narrow(0, begin, rows);
      });
    }

    const TensorLoader* loader_ = nullptr;
    at::Tensor order_;
    std::int64_t index_ = 0;
    B batch_{};
  };

  /// Begins the next epoch.
  Iterator begin() { return Iterator(*this, order(epoch_++)); }
  std::default_sentinel_t end() const { return {}; }

  /// Batches of an epoch on this rank.
  std::int64_t size() const { return shard_.batches(options_.batch_size, options_.drop_last); }
  /// Rows of the data, those of all ranks.
  std::int64_t rows() const { return rows_; }
  /// Rows of this rank.
  std::int64_t own_rows() const { return shard_.size(); }
  /// Makes `epoch` the one that the next `begin` gives.
  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }

  /// This rank's row numbers in the order of `epoch`, int64 `[own_rows]` on the device of the data; undefined where
  /// that is all rows as they lie.
  at::Tensor order(std::int64_t epoch) const {
    if (!options_.shuffle && options_.world_size == 1) return {};
    std::vector<std::int64_t> rows;
    if (options_.shuffle) rows = permutation(rows_, options_.seed, epoch);
    if (options_.world_size > 1) {
      std::vector<std::int64_t> own(static_cast<std::size_t>(shard_.size()));
      for (std::size_t i = 0; i < own.size(); ++i) {
        const std::int64_t position = shard_.position(static_cast<std::int64_t>(i));
        own[i] = options_.shuffle ? rows[static_cast<std::size_t>(position)] : position;
      }
      rows = std::move(own);
    }
    return at::from_blob(rows.data(), {shard_.size()}, at::kLong).clone().to(device_);
  }

 private:
  B data_;
  TensorLoaderOptions options_;
  std::int64_t rows_ = 0;
  Shard shard_;
  at::Device device_ = at::kCPU;
  std::int64_t epoch_ = 0;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
