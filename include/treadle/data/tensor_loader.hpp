// SPDX-License-Identifier: Apache-2.0
// Batches of tensors in memory; over several ranks, each rank's part of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/data/dataset.hpp"
#include "treadle/data/loader.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Tensors in memory, on a CPU or a CUDA device, as a data set that gives whole batches.
///
/// `B` is any batch type whose tensors have the rows as their first dimension. Neighboring rows are given as views of
/// the data. Throws `DataError` for tensors of different lengths or devices.
template <class B = Batch>
class Tensors {
 public:
  explicit Tensors(B data) : data_(std::move(data)) {
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
        throw DataError("data::Tensors: the tensors have different numbers of rows (" + std::to_string(rows_) +
                        " and " + (rows < 0 ? "none" : std::to_string(rows)) + "); all need the same first dimension.");
      if (tensor.device() != device_)
        throw DataError("data::Tensors: the tensors lie on " + device_.str() + " and on " + tensor.device().str() +
                        "; put all on one device.");
    });
    if (first) throw DataError("data::Tensors: the data hold no tensor.");
  }

  std::int64_t size() const { return rows_; }
  at::Device device() const { return device_; }
  B get_batch(const Rows& rows) const {
    return each([&](const at::Tensor& tensor) {
      return rows.consecutive() ? tensor.narrow(0, rows[0], rows.size()) : tensor.index_select(0, rows.tensor());
    });
  }
  /// One row, without its first dimension, as a view.
  B get(std::int64_t i) const {
    return each([&](const at::Tensor& tensor) { return tensor.select(0, i); });
  }

 private:
  template <class F>
  B each(const F& f) const {
    B some = data_;
    treadle::for_each_tensor(some, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = f(tensor);
    });
    return some;
  }

  B data_;
  std::int64_t rows_ = 0;
  at::Device device_ = at::kCPU;
};

/// A `Loader` of tensors in memory. Without `shuffle`, on one rank, batches are views of the data.
template <class B = Batch>
class TensorLoader : public Loader<Tensors<B>> {
 public:
  explicit TensorLoader(B data, LoaderOptions options = {})
      : Loader<Tensors<B>>(Tensors<B>(std::move(data)), options) {}
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
