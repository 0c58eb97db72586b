// SPDX-License-Identifier: Apache-2.0
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
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct TensorLoaderOptions {
  std::int64_t batch_size = 32;  ///< rows of a batch
  bool shuffle = false;          ///< a new order each epoch
  std::uint64_t seed = 0;        ///< with the epoch it decides the order, on every machine
  bool drop_last = false;        ///< leave out the last batch of an epoch if it is shorter
};

/// Batches of tensors that are in memory, on a CPU or a CUDA device: an input range that gives an epoch each time it is
/// gone through, and that may be left early.
///
/// The order is a pure function of (seed, epoch). The first pass is epoch 0, each further one the next; `set_epoch`
/// chooses. No default random generator is touched. Without `shuffle` batches are views of the data. `B` is any batch
/// type whose tensors have the rows as their first dimension. Iterators need the loader to stay where it is.
///
/// Throws `ConfigError` for a batch size below 1, `DataError` for tensors of different lengths or devices.
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
      const std::int64_t rows = std::min(loader_->options_.batch_size, loader_->rows_ - begin);
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

  /// Batches of an epoch.
  std::int64_t size() const {
    return options_.drop_last ? rows_ / options_.batch_size : (rows_ + options_.batch_size - 1) / options_.batch_size;
  }
  /// Rows of the data.
  std::int64_t rows() const { return rows_; }
  /// Makes `epoch` the one that the next `begin` gives.
  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }

  /// Row numbers in the order of `epoch`, int64 `[rows]` on the device of the data; undefined without `shuffle`.
  at::Tensor order(std::int64_t epoch) const {
    if (!options_.shuffle) return {};
    auto rows = permutation(rows_, options_.seed, epoch);
    return at::from_blob(rows.data(), {rows_}, at::kLong).clone().to(device_);
  }

 private:
  B data_;
  TensorLoaderOptions options_;
  std::int64_t rows_ = 0;
  at::Device device_ = at::kCPU;
  std::int64_t epoch_ = 0;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
