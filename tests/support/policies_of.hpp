// SPDX-License-Identifier: Apache-2.0
// What a recipe of the hand-written loop asks for, as Treadle's policies.
#pragma once

#include <cstdint>

#include "support/oracle.hpp"

namespace treadle_test {

template <oracle::Precision P>
auto precision_of(const oracle::Recipe& r) {
  if constexpr (P == oracle::Precision::Fp32)
    return td::precision::Fp32{};
  else if constexpr (P == oracle::Precision::Tf32)
    return td::precision::Tf32{};
  else if constexpr (P == oracle::Precision::Bf16)
    return td::precision::Bf16{};
  else if constexpr (P == oracle::Precision::Bf16Weights)
    return td::precision::Bf16Weights{};
  else
    return td::precision::Fp16{.initial_scale = r.scale, .growth_interval = r.growth_interval};
}
/// `over` loader batches a window, or slices of one.
template <oracle::Gathering G>
auto accumulation_of([[maybe_unused]] std::int64_t over, [[maybe_unused]] std::int64_t slices) {
  if constexpr (G == oracle::Gathering::None)
    return td::accumulation::NoAccumulation{};
  else if constexpr (G == oracle::Gathering::Over)
    return td::accumulation::AccumulateOver{.batches = over};
  else
    return td::accumulation::SplitBatch{.micro_batches = slices};
}

}  // namespace treadle_test
