// SPDX-License-Identifier: Apache-2.0
// What a comparison of policies found, as numbers and as a table. No torch here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "treadle/observe/text.hpp"

namespace treadle {
inline namespace v0_1 {

/// One combination of policies in a `Comparison`.
struct ComparisonRow {
  std::string name;            ///< as `describe` has it
  std::vector<double> losses;  ///< of the first steps
  std::int64_t checked = 0;    ///< how many of them were compared with the first combination's
  double difference = 0;       ///< the largest relative difference among those
  double tolerance = 0;        ///< what was allowed
  bool agrees = true;
  double seconds_per_step = 0;  ///< median over blocks
  double rows_per_second = 0;
  double time_ratio = 1;  ///< time for the same rows against the first combination: median over pairs of blocks
  std::optional<std::int64_t> peak_bytes{};      ///< of tensors on the trainer's device, weights and state included
  std::optional<std::int64_t> reserved_bytes{};  ///< taken from a CUDA device by the caching allocator
  double memory_ratio = 1;                       ///< peak against the first combination's
};

/// What `compare` found, the first combination being the baseline.
struct Comparison {
  std::vector<ComparisonRow> rows;

  /// Whether all losses agreed with the first combination's.
  bool agree() const {
    return std::ranges::all_of(rows, [](const ComparisonRow& row) { return row.agrees; });
  }
  /// An aligned table, one line a combination.
  std::string text() const;
};

namespace detail {

inline std::string mebibytes(const std::optional<std::int64_t>& bytes) {
  return bytes ? fixed_number(static_cast<double>(*bytes) / (1 << 20), *bytes < (100 << 20) ? 2 : 0) : "-";
}

inline std::string loss_verdict(const ComparisonRow& row, bool baseline) {
  if (baseline) return "baseline";
  const std::string steps = std::to_string(row.checked) + (row.checked == 1 ? " step" : " steps");
  return (row.agrees ? "agree" : "DIFFER") + std::string(" (") + metric_number(row.difference) + ", " + steps + ")";
}

}  // namespace detail

inline std::string Comparison::text() const {
  std::vector<std::vector<std::string>> cells{
      {"policies", "losses", "ms/step", "rows/s", "time ratio", "peak MiB", "reserved MiB", "memory ratio"}};
  for (const auto& row : rows)
    cells.push_back({row.name, detail::loss_verdict(row, &row == rows.data()),
                     detail::fixed_number(1e3 * row.seconds_per_step, 3), detail::short_number(row.rows_per_second),
                     detail::fixed_number(row.time_ratio, 3), detail::mebibytes(row.peak_bytes),
                     detail::mebibytes(row.reserved_bytes),
                     row.peak_bytes ? detail::fixed_number(row.memory_ratio, 3) : "-"});
  return detail::aligned(cells, /*first_left=*/true);
}

}  // namespace v0_1
}  // namespace treadle
