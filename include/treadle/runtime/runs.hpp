// SPDX-License-Identifier: Apache-2.0
// Lists of tensors that ATen's multi-tensor operations accept: one device and one dtype a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <numeric>
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

/// Calls `f(begin, end)` for each run of equal device and dtype in an ordered list.
template <class F>
void for_each_run(const std::vector<at::Tensor>& tensors, F&& f) {
  for (std::size_t begin = 0; begin < tensors.size();) {
    std::size_t end = begin + 1;
    while (end < tensors.size() && same_place(tensors[begin], tensors[end])) ++end;
    f(begin, end);
    begin = end;
  }
}

inline at::TensorList slice(const std::vector<at::Tensor>& tensors, std::size_t begin, std::size_t end) {
  return at::TensorList(tensors).slice(begin, end - begin);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
