// SPDX-License-Identifier: Apache-2.0
// Shuffling that gives the same order with every compiler and library: the standard's distributions and std::shuffle do
// not. No torch here.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// SplitMix64 keyed by (seed, stream): 64 uniform bits a call, the same everywhere.
class KeyedGenerator {
 public:
  /// Neighboring seeds and streams give unrelated numbers.
  constexpr KeyedGenerator(std::uint64_t seed, std::uint64_t stream)
      : state_(mix(seed + step) ^ mix(mix(stream + 2 * step))) {}

  constexpr std::uint64_t operator()() { return mix(state_ += step); }

  /// Uniform in [0, bound); `bound` must not be 0.
  constexpr std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t biased = (0 - bound) % bound;  // 2^64 modulo bound: the lowest numbers would come up too often
    std::uint64_t bits = (*this)();
    while (bits < biased) bits = (*this)();
    return bits % bound;
  }

 private:
  static constexpr std::uint64_t step = 0x9E3779B97F4A7C15;
  static constexpr std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

/// The numbers 0 to `size` - 1 in an order that depends on (`size`, `seed`, `epoch`) alone.
inline std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  KeyedGenerator generator(seed, static_cast<std::uint64_t>(epoch));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator.below(i)]);
  return order;
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
