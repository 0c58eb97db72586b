// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "treadle/data/random.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Puts `items` into an order that `generator` alone decides.
template <class T>
void shuffle(std::vector<T>& items, KeyedGenerator& generator) {
  for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[generator.below(i)]);
}

/// The numbers 0 to `size` - 1 in an order that depends on (`size`, `seed`, `epoch`) alone.
inline std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  KeyedGenerator generator(seed, static_cast<std::uint64_t>(epoch));
  shuffle(order, generator);
  return order;
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
