// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same with every compiler and library, keyed so that threads share no generator: the
// standard's distributions and std::shuffle are neither. No torch here.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// SplitMix64 keyed by (seed, stream) or by (seed, epoch, sample): 64 uniform bits a call, the same everywhere.
class KeyedGenerator {
 public:
  /// Neighboring seeds and streams give unrelated numbers.
  constexpr KeyedGenerator(std::uint64_t seed, std::uint64_t stream)
      : state_(mix(seed + step) ^ mix(mix(stream + 2 * step))) {}
  /// What belongs to one sample in one epoch, whoever draws it.
  constexpr KeyedGenerator(std::uint64_t seed, std::int64_t epoch, std::int64_t sample)
      : KeyedGenerator(KeyedGenerator(seed, static_cast<std::uint64_t>(epoch))(), static_cast<std::uint64_t>(sample)) {}

  constexpr std::uint64_t operator()() { return mix(state_ += step); }

  /// Uniform in [0, bound); `bound` must not be 0.
  constexpr std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t biased = (0 - bound) % bound;  // 2^64 modulo bound: the lowest numbers would come up too often
    std::uint64_t bits = (*this)();
    while (bits < biased) bits = (*this)();
    return bits % bound;
  }
  /// Uniform in [low, high), of 2^53 values.
  constexpr double uniform(double low = 0, double high = 1) {
    return low + (high - low) * (static_cast<double>((*this)() >> 11) * 0x1p-53);
  }
  /// Whether something of this probability happens.
  constexpr bool happens(double probability) { return uniform() < probability; }
  /// Normal, with mean 0 and deviation 1; its last bits are those of the C library's logarithm and cosine.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
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

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
