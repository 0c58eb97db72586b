// SPDX-License-Identifier: Apache-2.0
// Patterns over parameter names. No torch here.
#pragma once

#include <string_view>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// Whether `name` matches `pattern`, where `*` stands for any run of characters and `?` for one.
constexpr bool glob_match(std::string_view pattern, std::string_view name) {
  std::size_t p = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n]) && pattern[p] != '*') {
      ++p;
      ++n;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace v0_1
}  // namespace treadle
