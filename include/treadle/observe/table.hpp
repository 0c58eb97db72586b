// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/observe/events.hpp"
#include "treadle/observe/text.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {

struct TableOptions {
  std::size_t rows = 30;    ///< most epochs shown, at least 2; of a longer run the first and the last ones
  double data_wait = 0.05;  ///< share of the training time above which waiting for the loader is reported
};

/// Writes a table of the epochs when `fit` ends, then why it ended and each metric of the last evaluation on a line of
/// its own (`test accuracy: 0.9163`). An epoch's time includes its evaluation, the rate is that of its training.
class Table {
 public:
  explicit Table(TableOptions options = {}) : options_(options) {
    options_.rows = std::max<std::size_t>(options_.rows, 2);
  }

  void on_fit_end(const FitResult& result) { say(text(result)); }

  /// What `on_fit_end` writes.
  std::string text(const FitResult& result) const {
    const auto& history = result.history;
    const auto slow = [&](const EpochEvent& e) { return e.data_wait > options_.data_wait; };
    const bool waited = std::ranges::any_of(history, slow);
    std::string out = history.empty() ? std::string() : grid(history, waited);
    out += std::string(to_string(result.stop_reason)) + ": " + count(result.epochs, "epoch") + ", " +
           count(result.steps, "step") + " in " + treadle::detail::duration_text(result.seconds);
    if (result.skipped > 0) out += "; " + count(result.skipped, "step") + " skipped because of inf or NaN";
    if (waited) {
      const auto worst = std::ranges::max_element(history, {}, &EpochEvent::data_wait);
      out +=
          "\nThe steps waited for the loader up to " + percent(worst->data_wait) +
          " of the training time: keep the data in memory (treadle::data::TensorLoader), on the device if it fits, or "
          "do less work a batch in the loader.";
    }
    for (const auto& [name, value] : result.test())
      out += "\ntest " + name + ": " + treadle::detail::metric_number(value);
    return out;
  }

 private:
  static std::string count(std::int64_t n, std::string_view what) {
    return std::to_string(n) + " " + std::string(what) + (n == 1 ? "" : "s");
  }
  static std::string percent(double share) { return treadle::detail::fixed_number(100 * share, 0) + " %"; }

  /// Names of metrics in the order of their first appearance.
  template <class MetricsOf>
  static std::vector<std::string> names(const std::vector<EpochEvent>& history, MetricsOf&& metrics_of) {
    std::vector<std::string> found;
    for (const auto& event : history)
      if (const Metrics* metrics = metrics_of(event))
        for (const auto& [name, value] : *metrics)
          if (std::ranges::find(found, name) == found.end()) found.push_back(name);
    return found;
  }

  std::string grid(const std::vector<EpochEvent>& history, bool waited) const {
    const auto train = [](const EpochEvent& e) { return &e.train; };
    const auto test = [](const EpochEvent& e) { return e.test ? &*e.test : nullptr; };
    const auto train_names = names(history, train);
    const auto test_names = names(history, test);
    std::vector<std::vector<std::string>> cells(1, {"epoch"});
    for (const auto& name : train_names) cells[0].push_back("train " + name);
    for (const auto& name : test_names) cells[0].push_back("test " + name);
    cells[0].insert(cells[0].end(), {"epoch time", "train rows/s"});
    if (waited) cells[0].push_back("data wait");

    for (std::size_t i = 0; i < history.size(); ++i) {
      if (history.size() > options_.rows && i == options_.rows / 2) {
        i = history.size() - (options_.rows - options_.rows / 2);
        cells.emplace_back(cells[0].size(), "...");
      }
      const EpochEvent& event = history[i];
      std::vector<std::string> row{std::to_string(event.epoch + 1)};
      const auto put = [&](const Metrics* metrics, const std::vector<std::string>& wanted) {
        for (const auto& name : wanted) {
          const auto value = metrics ? metrics->find(name) : std::nullopt;
          row.push_back(value ? treadle::detail::metric_number(*value) : "-");
        }
      };
      put(train(event), train_names);
      put(test(event), test_names);
      row.push_back(treadle::detail::duration_text(event.seconds));
      row.push_back(treadle::detail::short_number(event.rows_per_second));
      if (waited) row.push_back(percent(event.data_wait));
      cells.push_back(std::move(row));
    }
    return treadle::detail::aligned(cells, /*first_left=*/false) + '\n';
  }

  TableOptions options_;
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
