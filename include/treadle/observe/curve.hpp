// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/observe/events.hpp"
#include "treadle/observe/output_file.hpp"
#include "treadle/observe/svg_panel.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {

struct CurveOptions {
  std::size_t panels = 4;  ///< most metrics shown, "loss" and then in the order in which they were recorded
};

/// Draws the metrics over the steps as a small SVG picture, a panel each: train at the log points, test after each
/// epoch. Values that are not finite are gaps, marked red on the axis of steps.
///
/// The file is replaced in one piece after each epoch and at the end, and suits light and dark pages; until then an
/// earlier picture stays. A second `fit` of the same trainer goes on to the right. Throws `ConfigError` for another
/// extension than .svg and, when `fit` begins, for a file that cannot be written; if writing fails later, it warns once
/// and training goes on.
class Curve {
 public:
  explicit Curve(std::filesystem::path path, CurveOptions options = {}) : path_(std::move(path)), options_(options) {
    if (path_.extension() != ".svg")
      throw ConfigError("observe::Curve: '" + path_.string() + "' must end in .svg, the only format it draws.");
  }

  void on_fit_begin(const RunInfo&) {
    treadle::detail::require_writable("observe::Curve", path_);
    before_ += steps_;
    steps_ = 0;
  }
  void on_log(const LogEvent& event) {
    logged_ = true;
    add(event.step, event.metrics, &treadle::detail::Panel::train);
  }
  void on_epoch(const EpochEvent& event) {
    steps_ = event.step;  // also where nothing was counted, as in an epoch whose steps were all skipped
    // An epoch too short for a log point is a point itself.
    if (!std::exchange(logged_, false)) add(event.step, event.train, &treadle::detail::Panel::train);
    if (event.test) add(event.step, *event.test, &treadle::detail::Panel::test);
    write();
  }
  void on_fit_end(const FitResult&) {
    if (before_ + steps_ > 0) write();  // nothing to show must not replace an earlier picture
  }

  /// The picture as SVG text.
  std::string svg() const {
    using treadle::detail::SvgPanel;
    const std::size_t count = std::min(panels_.size(), options_.panels);
    const std::size_t columns = std::clamp<std::size_t>(count, 1, 2);
    const auto size = [](double unit, std::size_t n) {
      return std::to_string(static_cast<std::int64_t>(unit) * static_cast<std::int64_t>(n));
    };
    const std::string width = size(SvgPanel::width, columns);
    const std::string height = size(SvgPanel::height, std::max<std::size_t>((count + 1) / 2, 1));
    std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + width + "\" height=\"" + height +
                      "\" viewBox=\"0 0 " + width + " " + height + "\" role=\"img\">\n<title>Training curve</title>\n";
    out.append(treadle::detail::svg_style);
    out.append("<rect class=\"page\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n");
    for (std::size_t i = 0; i < count; ++i)
      out += SvgPanel(panels_[i], SvgPanel::width * static_cast<double>(i % 2),
                      SvgPanel::height * static_cast<double>(i / 2), static_cast<double>(before_ + steps_))
                 .svg();
    return out + "</svg>\n";
  }

 private:
  void add(std::int64_t step, const Metrics& metrics, treadle::detail::Series treadle::detail::Panel::*series) {
    steps_ = step;
    for (const auto& [name, value] : metrics) {
      auto panel = std::ranges::find(panels_, name, &treadle::detail::Panel::name);
      if (panel == panels_.end()) panel = panels_.insert(panel, {.name = name});
      ((*panel).*series).add(static_cast<double>(before_ + step), value);
    }
  }

  void write() {
    if (treadle::detail::replace_file(path_, svg()) || std::exchange(warned_, true)) return;
    warn("observe::Curve: writing '" + path_.string() + "' failed; training goes on without the picture.");
  }

  std::filesystem::path path_;
  CurveOptions options_;
  std::vector<treadle::detail::Panel> panels_;
  std::int64_t before_ = 0;  ///< steps of earlier fits
  std::int64_t steps_ = 0;
  bool logged_ = false;
  bool warned_ = false;
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
