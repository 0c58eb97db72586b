// SPDX-License-Identifier: Apache-2.0
// A CSV file whose columns may grow. No torch here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/observe/escape.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

inline std::string csv_header(const std::vector<std::string>& columns) {
  std::string line;
  for (const auto& column : columns) (line += line.empty() ? "" : ",") += csv_field(column);
  return line;
}

/// The columns that the first line of `content` names; none if a row has another number of fields.
inline std::vector<std::string> csv_columns(std::string_view content) {
  std::vector<std::string> columns;
  while (!content.empty()) {
    const std::size_t end = std::min(content.find('\n'), content.size());
    const auto fields = csv_split(content.substr(0, end));
    if (!fields || (!columns.empty() && fields->size() != columns.size())) return {};
    if (columns.empty()) columns = *fields;
    content.remove_prefix(std::min(end + 1, content.size()));
  }
  return columns;
}

/// `content` with the header `columns` instead of its own of `before` columns, and an empty field for each new column.
inline std::string csv_widen(std::string_view content, const std::vector<std::string>& columns, std::size_t before) {
  const std::string filling(columns.size() - before, ',');
  std::string wide = csv_header(columns) + '\n';
  content.remove_prefix(std::min(content.find('\n'), content.size() - 1) + 1);
  while (!content.empty()) {
    const std::size_t end = std::min(content.find('\n'), content.size());
    wide.append(content.substr(0, end)).append(filling).append("\n");
    content.remove_prefix(std::min(end + 1, content.size()));
  }
  return wide;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
