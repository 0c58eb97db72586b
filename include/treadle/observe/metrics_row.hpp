// SPDX-License-Identifier: Apache-2.0
// One row of a metrics file. No torch here.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/metrics.hpp"
#include "treadle/observe/escape.hpp"
#include "treadle/observe/text.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Cells by column, each column once, in the order in which they were added.
class MetricsRow {
 public:
  struct Cell {
    std::string column;  ///< on one line, as it stands in a CSV file's header
    std::string name;    ///< as the user spelled it
    std::string csv;
    std::string json;
  };

  explicit MetricsRow(std::string_view event) {
    cells_.push_back({"event", "event", csv_field(event), json_string(event)});
  }

  /// One of Treadle's own columns, which must be in `reserved`.
  void number(std::string_view column, double value) {
    const std::string text = exact_number(value);
    cells_.push_back({one_line(column), std::string(column), text, std::isfinite(value) ? text : "null"});
  }

  /// The user's metrics. One that is called like another column gets an underscore at its end.
  void metrics(std::string_view prefix, const Metrics& metrics) {
    for (const auto& [name, value] : metrics) {
      std::string column = std::string(prefix) + name;
      while (std::ranges::count(reserved, column) > 0 || find(one_line(column)) != nullptr) column += '_';
      number(column, value);
    }
  }

  /// The cell in `column`, or null.
  const Cell* find(std::string_view column) const {
    const auto it = std::ranges::find(cells_, column, &Cell::column);
    return it == cells_.end() ? nullptr : &*it;
  }
  const std::vector<Cell>& cells() const { return cells_; }

  std::string json() const {
    std::string line;
    for (const Cell& cell : cells_)
      line.append(line.empty() ? "{" : ", ").append(json_string(cell.name)).append(": ").append(cell.json);
    return line + '}';
  }
  std::string csv(const std::vector<std::string>& columns) const {
    std::string line;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (i > 0) line += ',';
      if (const Cell* cell = find(columns[i])) line += cell->csv;
    }
    return line;
  }

 private:
  static constexpr std::array<std::string_view, 10> reserved{
      "event",           "epoch",     "step",      "seconds", "learning_rate", "skipped", "steps_per_second",
      "rows_per_second", "data_wait", "loss_scale"};

  std::vector<Cell> cells_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
