// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "treadle/data/byte_source.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct CsvOptions {
  char delimiter = ',';
  bool header = false;              ///< whether the first line holds the columns' names
  std::optional<double> missing{};  ///< what an empty field counts as; without it, an empty field is a fault
  std::int64_t most_bytes = treadle::detail::most_unpacked;  ///< that a gzip file may unpack to
};

/// Numbers in rows and columns.
struct Table {
  std::vector<std::string> names;  ///< of the columns; empty without a header
  at::Tensor values;               ///< double `[rows, columns]`

  /// The column of that name, double `[rows]`. Throws `DataError` where there is none.
  at::Tensor column(std::string_view name) const { return values.select(1, index(name)); }
  /// All columns but that one, double `[rows, columns - 1]`.
  at::Tensor without(std::string_view name) const {
    const std::int64_t i = index(name);
    return at::cat({values.narrow(1, 0, i), values.narrow(1, i + 1, values.size(1) - i - 1)}, 1);
  }

 private:
  std::int64_t index(std::string_view name) const {
    const auto found = std::ranges::find(names, name);
    if (found == names.end())
      throw DataError("data::Table: there is no column '" + std::string(name) +
                      "'; names are those of the file's first line, read with header = true.");
    return found - names.begin();
  }
};

/// A file of numbers, plain or gzip: a row a line, fields between delimiters, spaces around them passed over, no
/// quotes. Lines end with a line feed, with or without a carriage return before it; empty lines at the end are passed
/// over.
///
/// Throws `DataError` that names the file, the line and the column, both from 1: fields that are no number, lines that
/// are longer or shorter than the first, a header that is none. While it reads it takes about twice the memory of what
/// it gives.
inline Table read_csv(const std::filesystem::path& path, const CsvOptions& options = {}) {
  constexpr std::size_t longest_line = std::size_t{1} << 24;
  treadle::detail::ByteSource source(path, options.most_bytes);
  Table table;
  std::vector<double> numbers;
  std::size_t columns = 0;
  std::int64_t line_number = 0;
  std::int64_t empty_lines = 0;
  const auto where = [&](std::size_t column) {
    return " in line " + std::to_string(line_number) + ", column " + std::to_string(column + 1);
  };
  const auto shown = [](std::string_view text) {  // what is in a file need not be text
    std::string safe;
    for (const char c : text.substr(0, 40)) safe += c >= ' ' && c <= '~' ? c : '?';
    return "'" + safe + (text.size() > 40 ? "..." : "") + "'";
  };
  const auto number = [&](std::string_view field) -> std::optional<double> {
    if (field.empty()) return options.missing;
    if (field.front() == '+') field.remove_prefix(1);
    double value = 0;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error != std::errc() || end != field.data() + field.size()) return std::nullopt;
    return value;
  };
  const auto is_space = [&](char c) { return (c == ' ' || c == '\t') && c != options.delimiter; };
  const auto take_line = [&](std::string_view line) {
    ++line_number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (std::ranges::all_of(line, is_space)) {
      ++empty_lines;
      return;
    }
    if (empty_lines > 0) source.fail("has an empty line before line " + std::to_string(line_number));
    const bool names = options.header && table.names.empty();
    bool all_numbers = true;
    std::size_t column = 0;
    for (std::size_t begin = 0; begin <= line.size(); ++column) {
      const std::size_t end = std::min(line.find(options.delimiter, begin), line.size());
      std::string_view field = line.substr(begin, end - begin);
      begin = end + 1;
      while (!field.empty() && is_space(field.front())) field.remove_prefix(1);
      while (!field.empty() && is_space(field.back())) field.remove_suffix(1);
      const auto value = number(field);
      if (names) {
        all_numbers = all_numbers && value;
        table.names.emplace_back(field);
        continue;
      }
      if (!value)
        source.fail("has " +
                    (field.empty() ? "nothing" : shown(field) + ", which is no number (within a double's range),") +
                    where(column) +
                    (field.empty()      ? "; say in CsvOptions::missing what that counts as"
                     : line_number == 1 ? "; if the first line holds names, set CsvOptions::header"
                                        : ""));
      numbers.push_back(*value);
    }
    if (names && all_numbers) source.fail("holds only numbers in its first line, and CsvOptions::header says names");
    if (columns != 0 && column != columns)
      source.fail("has " + std::to_string(column) + " fields in line " + std::to_string(line_number) + " and " +
                  std::to_string(columns) + " in the lines before; each row needs the same number");
    columns = column;
  };

  std::string rest;
  for (;;) {
    const std::size_t have = rest.size();
    rest.resize(have + (std::size_t{1} << 16));
    const std::size_t got = source.read(reinterpret_cast<unsigned char*>(rest.data()) + have, rest.size() - have);
    rest.resize(have + got);
    std::size_t begin = 0;
    for (std::size_t end = rest.find('\n', have); end != std::string::npos; end = rest.find('\n', begin)) {
      take_line(std::string_view(rest).substr(begin, end - begin));
      begin = end + 1;
    }
    rest.erase(0, begin);
    if (got == 0) break;
    if (rest.size() > longest_line)
      source.fail("has a line of more than 16 MB" + where(0) + ": it is no file of numbers");
  }
  if (!rest.empty()) take_line(rest);
  if (numbers.empty()) source.fail("holds no row of numbers");
  const auto width = static_cast<std::int64_t>(columns);
  table.values = at::empty({static_cast<std::int64_t>(numbers.size()) / width, width}, at::kDouble);
  std::memcpy(table.values.mutable_data_ptr<double>(), numbers.data(), numbers.size() * sizeof(double));
  return table;
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
