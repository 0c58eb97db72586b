// SPDX-License-Identifier: Apache-2.0
// Buffers are state: a skipped step must not leave the statistics of its bad batch behind.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "treadle/runtime/flat_layout.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Saves all buffers of a model and puts them back where a device flag says so, at one operation a dtype each way.
///
/// To that end the buffers are moved, once, into one storage a dtype, of which they become views.
class BufferGuard {
 public:
  explicit BufferGuard(const BufferList& buffers) {
    const at::NoGradGuard no_grad;
    std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
    for (const auto& buffer : buffers)
      if (buffer.tensor.layout() == at::kStrided && buffer.tensor.numel() > 0)
        by_dtype[buffer.tensor.scalar_type()].push_back(buffer.tensor);
    for (auto& [dtype, tensors] : by_dtype) {
      if (!pooled(tensors) && share_memory(tensors))
        for (const auto& tensor : tensors) guard(tensor);  // moving them would part what belongs together
      else
        pool(tensors);
    }
  }

  void save() {
    for (std::size_t i = 0; i < live_.size(); ++i) saved_[i].copy_(live_[i]);
  }
  /// Puts back what `save` saw if `found_inf` (one element) is not 0. Selects, since 0 x NaN is NaN.
  void restore(const at::Tensor& found_inf) {
    if (live_.empty()) return;
    const auto bad = found_inf.ne(0);
    for (std::size_t i = 0; i < live_.size(); ++i) live_[i].copy_(at::where(bad, saved_[i], live_[i]));
  }
  void restore() {
    for (std::size_t i = 0; i < live_.size(); ++i) live_[i].copy_(saved_[i]);
  }

 private:
  void pool(std::vector<at::Tensor>& tensors) {
    std::int64_t total = 0;
    for (const auto& tensor : tensors) total += flat_room(tensor.numel());
    auto flat = pooled(tensors) ? at::empty({0}, tensors.front().options()).set_(tensors.front().storage(), 0, {total})
                                : gathered(tensors, total);
    guard(flat);
  }
  void guard(const at::Tensor& tensor) {
    live_.push_back(tensor);
    saved_.push_back(at::empty_like(tensor));
  }
  static bool share_memory(const std::vector<at::Tensor>& tensors) {
    std::set<const void*> storages;
    return std::ranges::any_of(
        tensors, [&](const auto& tensor) { return !storages.insert(tensor.storage().unsafeGetStorageImpl()).second; });
  }
  // Another trainer of the same model may have done it: moving the buffers again would take them away from it.
  static bool pooled(const std::vector<at::Tensor>& tensors) {
    std::int64_t offset = 0;
    for (const auto& tensor : tensors) {
      if (!tensor.is_alias_of(tensors.front()) || tensor.storage_offset() != offset || !tensor.is_contiguous())
        return false;
      offset += flat_room(tensor.numel());
    }
    return tensors.front().storage().nbytes() == static_cast<std::size_t>(offset) * tensors.front().element_size();
  }
  static at::Tensor gathered(std::vector<at::Tensor>& tensors, std::int64_t total) {
    auto flat = at::zeros({total}, tensors.front().options());
    std::int64_t offset = 0;
    for (auto& tensor : tensors) {
      auto view = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
      view.copy_(tensor);
      tensor.set_data(view);
      offset += flat_room(tensor.numel());
    }
    return flat;
  }

  std::vector<at::Tensor> live_;
  std::vector<at::Tensor> saved_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
