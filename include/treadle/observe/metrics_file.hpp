// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
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
/// Each row is flushed. NaN and infinities are `nan`, `inf`, `-inf` in CSV and `null` in JSON, which cannot write them.
/// A second `fit` of the same trainer goes on in the file.
///
/// Throws `ConfigError` for another extension and, when `fit` begins, for a file that cannot be written or continued.
/// If writing fails later (a full disk, say), it warns once and training goes on.
class MetricsFile {
 public:
  explicit MetricsFile(std::filesystem::path path, MetricsFileOptions options = {})
      : path_(std::move(path)), append_(options.append), csv_(path_.extension() == ".csv") {
    if (!csv_ && path_.extension() != ".jsonl")
      throw ConfigError("observe::MetricsFile: '" + path_.string() +
                        "' must end in .csv or .jsonl; the extension chooses the format.");
  }

  void on_fit_begin(const RunInfo&) {
    seconds_ = 0;
    if (file_.is_open()) return;
    treadle::detail::require_writable(who, path_);
    if (csv_ && !treadle::detail::is_replaceable(path_))
      throw ConfigError(std::string(who) + ": '" + path_.string() +
                        "' is not a regular file, and a CSV file may have to be rewritten; use a .jsonl file there.");
    if (append_) continue_file();
    open(append_ ? std::ios::app : std::ios::trunc);
    if (!file_.is_open()) treadle::detail::refuse_output(who, path_, errno);
  }

  void on_log(const LogEvent& event) {
    Row row = start("log", event.epoch, event.step, event.seconds);
    row.number("learning_rate", event.learning_rate);
    row.number("skipped", static_cast<double>(event.skipped));
    row.number("steps_per_second", event.steps_per_second);
    row.number("rows_per_second", event.rows_per_second);
    row.number("data_wait", event.data_wait);
    if (event.loss_scale) row.number("loss_scale", *event.loss_scale);
    row.metrics("", event.metrics);
    write(row);
  }

  void on_epoch(const EpochEvent& event) {
    seconds_ += event.seconds;
    Row row = start("epoch", event.epoch, event.step, seconds_);
    row.number("rows_per_second", event.rows_per_second);
    row.number("data_wait", event.data_wait);
    row.metrics("", event.train);
    if (event.test) row.metrics("test_", *event.test);
    write(row);
  }

 private:
  using Row = treadle::detail::MetricsRow;
  static constexpr std::string_view who = "observe::MetricsFile";

  static Row start(std::string_view event, std::int64_t epoch, std::int64_t step, double seconds) {
    Row row(event);
    row.number("epoch", static_cast<double>(epoch + 1));
    row.number("step", static_cast<double>(step));
    row.number("seconds", seconds);
    return row;
  }

  void open(std::ios::openmode mode) {
    errno = 0;
    file_.open(path_, std::ios::binary | std::ios::out | mode);
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
    if (csv_) add_columns(row);
    file_ << (csv_ ? row.csv(columns_) : row.json()) << '\n' << std::flush;
    if (!file_) fail("writing failed");
  }

  void add_columns(const Row& row) {
    std::vector<std::string> columns = columns_;
    for (const auto& cell : row.cells())
      if (std::ranges::find(columns, cell.column) == columns.end()) columns.push_back(cell.column);
    if (columns.size() == columns_.size() || frozen_) return;
    file_.flush();
    if (columns_.empty()) {
      file_ << treadle::detail::csv_header(columns) << '\n';
    } else if (treadle::detail::replace_file(path_, treadle::detail::csv_widen(read(), columns, columns_.size()))) {
      file_.close();
      open(std::ios::app);
    } else {
      frozen_ = true;  // keep the columns that the file has, rather than a file that no reader takes
      return fail("the columns of new metrics could not be added");
    }
    columns_ = std::move(columns);
  }

  void fail(std::string_view what) {
    if (!std::exchange(warned_, true))
      warn(std::string(who) + ": " + std::string(what) + " in '" + path_.string() +
           "'; training goes on, and rows of the file may be missing or incomplete.");
  }

  std::filesystem::path path_;
  bool append_;
  bool csv_;
  bool warned_ = false;
  bool frozen_ = false;
  std::ofstream file_;
  std::vector<std::string> columns_;
  double seconds_ = 0;
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
