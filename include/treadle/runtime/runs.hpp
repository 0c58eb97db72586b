// SPDX-License-Identifier: Apache-2.0
// Lists of tensors that ATen's multi-tensor operations accept: one device and one dtype a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

inline bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

/// Indices of `tensors` such that equal device and dtype stand together, otherwise in the given order.
inline std::vector<std::size_t> order_by_place(const std::vector<at::Tensor>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto rank = [&](std::size_t i) {
    return static_cast<std::size_t>(
        std::ranges::find_if(tensors, [&](const at::Tensor& t) { return same_place(t, tensors[i]); }) -
        tensors.begin());
  };
  std::ranges::stable_sort(order, {}, rank);
  return order;
}

/// The runs (begin, end) of equal device and dtype in an ordered list.
inline std::vector<std::pair<std::size_t, std::size_t>> runs_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<std::size_t, std::size_t>> runs;
  for (std::size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    while (end < tensors.size() && same_place(tensors[begin], tensors[end])) ++end;
    runs.emplace_back(begin, end);
  }
  return runs;
}

inline at::TensorList slice(const std::vector<at::Tensor>& tensors, std::size_t begin, std::size_t end) {
  return {tensors.data() + begin, end - begin};
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
