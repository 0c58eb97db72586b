// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/terminal.hpp"
#include "treadle/observe/text.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {

struct ProgressBarOptions {
  std::optional<bool> live{};      ///< redraw a line in place; default: if standard output is a terminal
  double updates_per_second = 10;  ///< redraws at most, must be positive
};

/// Shows epoch, steps, loss, metrics, rates and remaining time in one line that is redrawn in place, then one line an
/// epoch.
///
/// Where standard output is not a terminal only the line an epoch is written. Between log points it counts steps and
/// reads no tensor, so that it never waits for the device. An unknown number of steps is shown as a count alone.
class ProgressBar {
 public:
  explicit ProgressBar(ProgressBarOptions options = {}) : options_(options) {
    if (!(options.updates_per_second > 0))
      throw ConfigError("observe::ProgressBar: updates_per_second must be positive.");
  }
  ProgressBar(ProgressBar&& other) noexcept : options_(other.options_), state_(std::exchange(other.state_, State{})) {}
  ProgressBar& operator=(ProgressBar&&) = delete;
  ~ProgressBar() {
    try {
      erase();       // left over if fit ended by an exception
    } catch (...) {  // a sink that fails must not end the program from a destructor
    }
  }

  void on_fit_begin(const RunInfo& info) {
    state_ = State{.info = info, .live = options_.live.value_or(treadle::detail::output_is_terminal())};
    state_.started = state_.last_step = Clock::now();
    state_.utf8 = treadle::detail::terminal_is_utf8();
    draw(Clock::now());
  }

  void on_step(const StepEvent& event) {
    if (!state_.live) return;
    const auto now = Clock::now();
    if (event.epoch != state_.epoch) {
      state_.epoch = event.epoch;
      state_.epoch_began_at = event.step - 1;
    }
    state_.step = event.step;
    state_.last_step = now;
    const bool last = event.step - state_.epoch_began_at == state_.info.steps_per_epoch;
    if (last || now - state_.drawn >= std::chrono::duration<double>(1 / options_.updates_per_second)) draw(now);
  }

  void on_log(const LogEvent& event) {
    if (!state_.live) return;
    state_.log = event;
    if (Clock::now() - state_.drawn >= std::chrono::duration<double>(1 / options_.updates_per_second))
      draw(Clock::now());
  }

  void on_epoch(const EpochEvent& event) {
    std::string line = epoch_text(event.epoch);
    append(line, event.train, "");
    if (event.test) append(line.append("  |"), *event.test, "test ");
    line += "  |  " + treadle::detail::duration_text(event.seconds) + "  " +
            treadle::detail::short_number(event.rows_per_second) + " train rows/s";
    say(line);
    state_.shown = false;  // the line took the bar's place
    const auto now = Clock::now();
    state_.between_epochs = std::chrono::duration<double>(now - state_.last_step).count();
    ++state_.epochs_done;
    state_.epoch = event.epoch + 1;
    state_.epoch_began_at = state_.step = event.step;
    const bool more = state_.info.epochs == 0 || state_.epoch < state_.info.epochs;
    if (more && (state_.info.total_steps == 0 || state_.step < state_.info.total_steps)) draw(now);
  }

  void on_fit_end(const FitResult&) { erase(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct State {
    RunInfo info{};
    bool live = false;
    bool utf8 = false;
    bool shown = false;  ///< a bar stands on the terminal
    std::int64_t epoch = 0;
    std::int64_t step = 0;            ///< in this fit
    std::int64_t epoch_began_at = 0;  ///< step count at the start of the epoch
    std::int64_t epochs_done = 0;
    double between_epochs = 0;  ///< seconds from an epoch's last step to its end
    Clock::time_point started{}, last_step{}, drawn{};
    LogEvent log{};
  };

  void erase() {
    if (std::exchange(state_.shown, false)) write_text(Severity::Progress, "");
  }

  void draw(Clock::time_point now) {
    if (!state_.live) return;
    state_.drawn = now;
    state_.shown = true;
    write_text(Severity::Progress, compose(now));
  }

  std::string epoch_text(std::int64_t epoch) const {
    const std::string total = state_.info.epochs > 0 ? std::to_string(state_.info.epochs) : "";
    std::string number = std::to_string(epoch + 1);
    if (number.size() < total.size()) number.insert(0, total.size() - number.size(), ' ');
    return "epoch " + number + (total.empty() ? "" : "/" + total);
  }

  static void append(std::string& line, const Metrics& metrics, std::string_view prefix) {
    for (const auto& [name, value] : metrics)
      line.append("  ").append(prefix).append(name).append(" ").append(treadle::detail::metric_number(value));
  }

  /// The line, without what does not fit: parts are dropped from the back of the list of importance.
  std::string compose(Clock::time_point now) const {
    const std::int64_t done = state_.step - state_.epoch_began_at;
    const std::int64_t total = state_.info.steps_per_epoch;
    const bool known = total > 0 && done <= total;
    const double seconds = std::chrono::duration<double>(now - state_.started).count();
    const double stepping = seconds - static_cast<double>(state_.epochs_done) * state_.between_epochs;
    const double rate = state_.log.steps_per_second > 0 ? state_.log.steps_per_second
                        : stepping > 0                  ? static_cast<double>(state_.step) / stepping
                                                        : 0;
    struct Part {
      int rank;  ///< 0 is the last to go
      std::string text;
    };
    std::string count = std::to_string(done);
    if (known) count.insert(0, std::to_string(total).size() - count.size(), ' ');
    std::vector<Part> parts{{0, epoch_text(state_.epoch)},
                            {0, count + (known ? "/" + std::to_string(total) : " steps")}};
    for (const auto& [name, value] : state_.log.metrics)
      parts.push_back({name == "loss" ? 1 : 4, name + " " + treadle::detail::metric_number(value)});
    if (state_.log.skipped > 0) parts.push_back({3, std::to_string(state_.log.skipped) + " skipped"});
    if (rate > 0) parts.push_back({3, treadle::detail::short_number(rate) + " steps/s"});
    if (state_.log.rows_per_second > 0)
      parts.push_back({5, treadle::detail::short_number(state_.log.rows_per_second) + " rows/s"});
    if (auto time = time_text(seconds, rate, known && done == total); !time.empty())
      parts.push_back({2, std::move(time)});

    const auto columns = static_cast<std::size_t>(std::max(treadle::detail::terminal_columns() - 1, 10));
    const auto width = [&] {
      std::size_t sum = 0;
      for (const Part& part : parts) sum += treadle::detail::text_width(part.text) + 2;
      return sum - 2;
    };
    for (int rank = 5; rank > 0 && width() > columns; --rank)
      std::erase_if(parts, [&](const Part& part) { return part.rank == rank; });
    const std::size_t room = std::min<std::size_t>(columns - std::min(width(), columns), 42);
    if (known && room >= 12)
      parts.insert(parts.begin() + 1, {0, bar(static_cast<double>(done) / static_cast<double>(total), room - 2)});
    std::string line;
    for (const Part& part : parts) line += (line.empty() ? "" : "  ") + part.text;
    return std::string(treadle::detail::cut_text(line, columns));
  }

  /// What remains of the whole run where that is known, else what has passed.
  std::string time_text(double seconds, double rate, bool epoch_is_full) const {
    if (epoch_is_full && state_.info.evaluates) return "evaluating";
    if (state_.info.total_steps < state_.step || state_.info.total_steps == 0)
      return treadle::detail::duration_text(seconds);
    if (!(rate > 0)) return "";
    const auto epochs_left = static_cast<double>(std::max<std::int64_t>(state_.info.epochs - state_.epochs_done, 0));
    return treadle::detail::duration_text(static_cast<double>(state_.info.total_steps - state_.step) / rate +
                                          epochs_left * state_.between_epochs) +
           " left";
  }

  std::string bar(double share, std::size_t width) const {
    const auto halves = static_cast<std::size_t>(std::clamp(share, 0.0, 1.0) * static_cast<double>(2 * width));
    std::string text;
    for (std::size_t i = 0; i < width; ++i) {
      const std::size_t filled = halves > 2 * i ? halves - 2 * i : 0;
      if (state_.utf8)
        text += filled >= 2 ? "━" : filled == 1 ? "╸" : "─";
      else
        text += filled >= 2 ? '=' : filled == 1 ? '>' : '.';
    }
    return text;
  }

  ProgressBarOptions options_;
  State state_{};
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
