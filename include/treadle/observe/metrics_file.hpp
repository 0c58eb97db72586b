// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/observe/csv_table.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/metrics_row.hpp"
#include "treadle/observe/output_file.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {

struct MetricsFileOptions {
  bool append = false;  ///< go on after the rows of an existing file instead of replacing it
};

/// Writes a row at each log point and one at the end of each epoch, as CSV (`.csv`) or JSON lines (`.jsonl`) by
/// extension.
///
/// Columns: `event` ("log" or "epoch"), `epoch` (from 1), `step`, `seconds` since fit began, rates, and the metrics by
/// name: means since the last log point, or over the epoch; those of the evaluation are `test_<name>`. A metric that
/// appears late gets a new last column: the CSV file is then replaced in one piece by one in which every row has it.
/// Each row is flushed. NaN and infinities are `nan`, `inf`, `-inf` in CSV and `null` in JSON, which cannot write them;
/// control characters of a name are written as in JSON. An earlier file stays until the first row replaces it. A second
/// `fit` of the same trainer goes on in the file.
///
/// Throws `ConfigError` for another extension and, when `fit` begins, for a file that cannot be written or continued.
/// If writing fails later (a full disk, say), it warns once, training goes on, and so do the rows once there is room.
class MetricsFile {
 public:
  explicit MetricsFile(std::filesystem::path path, MetricsFileOptions options = {})
      : path_(std::move(path)), append_(options.append), csv_(path_.extension() == ".csv") {
    if (!csv_ && path_.extension() != ".jsonl")
      throw ConfigError("observe::MetricsFile: '" + path_.string() +
                        "' must end in .csv or .jsonl; the extension chooses the format.");
  }

  void on_fit_begin(const RunInfo&) {
    last_ = {};
    told_ = Clock::now();
    if (begun_) return;
    treadle::detail::require_writable(who, path_);
    if (csv_ && !treadle::detail::is_replaceable(path_))
      throw ConfigError(std::string(who) + ": '" + path_.string() +
                        "' is not a regular file, and a CSV file may have to be rewritten; use a .jsonl file there.");
    if (append_) continue_file();
    begun_ = true;
  }

  void on_log(const LogEvent& event) {
    Row row = start("log", event.epoch, event.step, event.seconds);
    last_ = event;
    told_ = Clock::now();
    steps(row);
    row.number("steps_per_second", event.steps_per_second);
    row.number("rows_per_second", event.rows_per_second);
    row.number("data_wait", event.data_wait);
    if (event.loss_scale) row.number("loss_scale", *event.loss_scale);
    row.metrics("", event.metrics);
    write(row);
  }

  void on_epoch(const EpochEvent& event) {
    // One clock for all rows: the one of the log points, and what has passed since the last of them.
    const double passed = std::chrono::duration<double>(Clock::now() - told_).count();
    Row row = start("epoch", event.epoch, event.step, last_.seconds + passed);
    if (last_.step > 0) steps(row);  // an epoch's last step is a log point
    row.number("rows_per_second", event.rows_per_second);
    row.number("data_wait", event.data_wait);
    row.metrics("", event.train);
    if (event.test) row.metrics("test_", *event.test);
    write(row);
  }

 private:
  using Row = treadle::detail::MetricsRow;
  using Clock = std::chrono::steady_clock;
  static constexpr std::string_view who = "observe::MetricsFile";

  static Row start(std::string_view event, std::int64_t epoch, std::int64_t step, double seconds) {
    Row row(event);
    row.number("epoch", static_cast<double>(epoch + 1));
    row.number("step", static_cast<double>(step));
    row.number("seconds", seconds);
    return row;
  }

  /// What a log point says of the steps up to it.
  void steps(Row& row) const {
    row.number("learning_rate", last_.learning_rate);
    row.number("skipped", static_cast<double>(last_.skipped));
  }

  std::string read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  /// Prepares an existing file for more rows: a last line that a crash cut short is dropped.
  void continue_file() {
    if (!treadle::detail::is_replaceable(path_)) return;
    std::string content = read();
    const std::size_t size = content.size();
    content.erase(content.rfind('\n') + 1);  // npos + 1 is 0: no whole line at all
    if (csv_ && !content.empty()) {
      columns_ = treadle::detail::csv_columns(content);
      if (columns_.empty() || columns_.front() != "event")
        throw ConfigError(
            std::string(who) + ": '" + path_.string() +
            "' was not written by MetricsFile, or is damaged, and cannot be continued; name another file, "
            "or leave append out to replace it.");
    }
    if (content.size() != size && !treadle::detail::replace_file(path_, content))
      throw ConfigError(std::string(who) + ": the incomplete last line of '" + path_.string() +
                        "' cannot be removed; name another file.");
  }

  void write(const Row& row) {
    if (!file_.is_open() && !open()) return fail("writing failed");
    std::vector<std::string> columns = columns_;
    std::string text;
    if (csv_) {
      columns = columns_with(row);
      if (columns_.empty()) text = treadle::detail::csv_header(columns) + '\n';
    }
    text += (csv_ ? row.csv(columns) : row.json()) + '\n';
    file_ << text << std::flush;
    if (!file_) return drop_half_row();
    size_ += text.size();
    columns_ = std::move(columns);
  }

  /// Opens the file for its first row, or again after a failure; only the first row replaces what it held.
  bool open() {
    file_.open(path_, std::ios::binary | std::ios::out | (append_ || opened_ ? std::ios::app : std::ios::trunc));
    if (!file_.is_open()) return false;
    std::error_code none;
    const auto size = std::filesystem::file_size(path_, none);
    size_ = none ? 0 : size;
    return opened_ = true;
  }

  /// The columns of the file, with those that `row` adds; without them if the file cannot be widened now.
  std::vector<std::string> columns_with(const Row& row) {
    std::vector<std::string> columns = columns_;
    for (const auto& cell : row.cells())
      if (std::ranges::find(columns, cell.column) == columns.end()) columns.push_back(cell.column);
    if (columns_.empty() || columns.size() == columns_.size()) return columns;
    const auto wide = treadle::detail::csv_widen(read(), columns, columns_.size());
    if (!treadle::detail::replace_file(path_, wide)) {
      fail("the columns of new metrics could not be added");
      return columns_;
    }
    columns_ = columns;
    file_.close();
    open();
    return columns;
  }

  /// After a failure the file ends with its last whole row, so that the next one can follow.
  void drop_half_row() {
    file_.close();
    file_.clear();
    std::error_code ignored;
    if (treadle::detail::is_replaceable(path_)) std::filesystem::resize_file(path_, size_, ignored);
    fail("writing failed");
  }

  void fail(std::string_view what) {
    if (!std::exchange(warned_, true))
      warn(std::string(who) + ": " + std::string(what) + " in '" + path_.string() +
           "'; training goes on, and rows or columns of the file may be missing.");
  }

  std::filesystem::path path_;
  bool append_;
  bool csv_;
  bool warned_ = false;
  bool begun_ = false;
  bool opened_ = false;
  std::ofstream file_;
  std::uintmax_t size_ = 0;  ///< up to the end of the last whole row
  std::vector<std::string> columns_;
  LogEvent last_{};
  Clock::time_point told_{};  ///< when `last_` came
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
