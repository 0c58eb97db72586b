// SPDX-License-Identifier: Apache-2.0
// Numbers as text, independent of the program's locale: a decimal comma would corrupt a CSV file. No torch here.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The shortest text that reads back as exactly `value`: "0.1", "1e-05", "nan", "inf".
inline std::string exact_number(double value) {
  if (std::isnan(value)) return "nan";  // to_chars would also write "-nan"
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value);
  return {text, result.ptr};
}

/// `value` with a fixed number of decimals.
inline std::string fixed_number(double value, int decimals) {
  if (!std::isfinite(value) || std::fabs(value) >= 1e15) return exact_number(value);
  char text[64];
  const auto result = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, decimals);
  return {text, result.ptr};
}

/// A metric for people: four decimals, or three digits and an exponent where four decimals would hide the value.
inline std::string metric_number(double value) {
  const double size = std::fabs(value);
  if (!std::isfinite(value) || (size < 1e5 && (size >= 1e-3 || size == 0))) return fixed_number(value, 4);
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific, 2);
  return {text, result.ptr};
}

/// A rate in three digits: "7.52", "84.2", "950", "10.8k", "3.25M".
inline std::string short_number(double value) {
  if (!std::isfinite(value)) return exact_number(value);
  std::string_view unit;
  for (const std::string_view next : {"k", "M", "G", "T"}) {
    if (std::fabs(value) < 999.5) break;
    value /= 1000;
    unit = next;
  }
  const double size = std::fabs(value);
  return fixed_number(value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0).append(unit);
}

/// A time in seconds: "8.2 s" below a minute, then "2:05" and "1:02:05".
inline std::string duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds > 1e9) return "?";
  if (seconds < 59.95) return fixed_number(std::max(seconds, 0.0), 1) + " s";
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  const auto two = [](std::int64_t n) { return (n < 10 ? "0" : "") + std::to_string(n); };
  if (whole < 3600) return std::to_string(whole / 60) + ":" + two(whole % 60);
  return std::to_string(whole / 3600) + ":" + two(whole / 60 % 60) + ":" + two(whole % 60);
}

/// Columns that UTF-8 `text` takes on a terminal, at one a code point.
inline std::size_t text_width(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

/// The first `width` columns of UTF-8 `text`.
inline std::string_view cut_text(std::string_view text, std::size_t width) {
  std::size_t end = 0;
  for (std::size_t column = 0; end < text.size(); ++end) {
    if ((static_cast<unsigned char>(text[end]) & 0xC0U) != 0x80U && ++column > width) break;
  }
  return text.substr(0, end);
}

/// Lines of equally many cells in columns flush right, the first one flush left if asked, with a rule below the first
/// line; no line break at the end.
inline std::string aligned(const std::vector<std::vector<std::string>>& cells, bool first_left) {
  std::vector<std::size_t> widths(cells[0].size());
  for (const auto& row : cells)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], text_width(row[c]));
  std::string out;
  for (std::size_t r = 0; r < cells.size(); ++r) {
    if (r > 0) out += '\n';
    for (std::size_t c = 0; c < widths.size(); ++c) {
      const std::string fill(widths[c] - text_width(cells[r][c]), ' ');
      out += c > 0 ? "  " : "";
      out += c == 0 && first_left ? cells[r][c] + fill : fill + cells[r][c];
    }
    if (r > 0) continue;
    out += '\n';
    for (std::size_t c = 0; c < widths.size(); ++c) out.append(c == 0 ? 0 : 2, ' ').append(widths[c], '-');
  }
  return out;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
