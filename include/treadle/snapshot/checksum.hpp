// SPDX-License-Identifier: Apache-2.0
// XXH3, 64 bits: what tells damaged files from good ones, at the speed of memory. No torch here.
#pragma once

#if !__has_include(<xxhash.h>)
#error \
    "treadle: snapshots need xxhash.h: install the Debian package libxxhash-dev, or set TREADLE_XXHASH_INCLUDE_DIR to the folder that holds xxhash.h, and link treadle::snapshot."
#endif
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL  // the header alone: nothing has to be linked
#endif
#include <xxhash.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The XXH3-64 sum of bytes that come in pieces; the same number that `xxhsum -H3` prints.
class Checksum {
 public:
  Checksum() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    reset();
  }
  void reset() { XXH3_64bits_reset(state_.get()); }
  void add(const void* bytes, std::size_t size) { XXH3_64bits_update(state_.get(), bytes, size); }
  /// Of everything that was added since the last reset.
  std::uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;  // XXH3 wants it on 64 bytes, which its own allocation sees to
};

/// The XXH3-64 sum of bytes in memory.
inline std::uint64_t checksum(std::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

/// A sum as 16 hexadecimal digits, as `xxhsum` writes it: JSON's numbers do not hold 64 bits everywhere.
inline std::string checksum_text(std::uint64_t sum) {
  static constexpr std::string_view hex = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 0; i < 16; ++i) text[15 - i] = hex[(sum >> (4 * i)) & 0xF];
  return text;
}

/// The sum that `checksum_text` wrote, or nothing for any other text.
inline std::optional<std::uint64_t> checksum_from(std::string_view text) {
  std::uint64_t sum = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), sum, 16);
  if (result.ec != std::errc() || checksum_text(sum) != text) return std::nullopt;
  return sum;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
