// SPDX-License-Identifier: Apache-2.0
// In which dtype sums are taken, so that they hold what was added.
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Whether a dtype is too narrow to add up or average in: a long sum is rounded away, a loss scale does not fit.
constexpr bool is_narrow(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

/// The dtype for sums of `dtype`: bool would be or-ed, small integers overflow, narrow floats stop at 256 or 2048.
inline at::ScalarType sum_dtype(at::ScalarType dtype) {
  if (at::isIntegralType(dtype, /*includeBool=*/true)) return at::kLong;
  return is_narrow(dtype) ? at::kFloat : dtype;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
