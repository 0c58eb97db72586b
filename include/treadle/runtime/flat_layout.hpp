// SPDX-License-Identifier: Apache-2.0
// How many tensors lie in one piece of memory.
#pragma once

#include <cstdint>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Elements on whose multiples tensors begin in a flat one, so that each stays aligned for vector loads.
inline constexpr std::int64_t flat_alignment = 64;

/// Elements that a tensor of `numel` takes up in a flat one.
constexpr std::int64_t flat_room(std::int64_t numel) {
  return (numel + flat_alignment - 1) / flat_alignment * flat_alignment;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
