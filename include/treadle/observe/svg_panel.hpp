// SPDX-License-Identifier: Apache-2.0
// One metric's panel of a curve picture. No torch here.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/observe/escape.hpp"
#include "treadle/observe/series.hpp"
#include "treadle/observe/text.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Train and test values of one metric over the steps.
struct Panel {
  std::string name;
  Series train{};
  Series test{};
};

/// Colors and type of the picture, for a light and for a dark page.
inline constexpr std::string_view svg_style =
    "<style>\n"
    "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#57606a}\n"
    ".title{font-size:14px;font-weight:600;fill:#1f2328}\n"
    ".page{fill:#ffffff}.grid{stroke:#e4e8ec}.axis{stroke:#8c959f}\n"
    ".line{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}\n"
    ".train{stroke:#3572d6}.test{stroke:#d4691e}.dot{fill:#d4691e}\n"
    ".end-train,.end-test{font-weight:600}.end-train{fill:#2459b3}.end-test{fill:#b4540f}\n"
    "@media (prefers-color-scheme:dark){\n"
    "text{fill:#9aa4af}.title{fill:#e6edf3}.page{fill:#0d1117}.grid{stroke:#262c34}.axis{stroke:#6e7781}\n"
    ".train{stroke:#6cb0ff}.test{stroke:#f2a45c}.dot{fill:#f2a45c}\n"
    ".end-train{fill:#8cc2ff}.end-test{fill:#f6b87e}}\n"
    "</style>\n";

/// Draws a panel whose upper left corner is at (x, y).
class SvgPanel {
 public:
  static constexpr double width = 420;
  static constexpr double height = 270;

  SvgPanel(const Panel& panel, double x, double y) : train_(panel.train.points()), test_(panel.test.points()) {
    left_ = x + 58;
    right_ = x + width - 66;  // room for the last value
    top_ = y + 46;
    bottom_ = y + height - 44;
    x_axis_ = axis_of(&Series::Point::x);
    y_axis_ = axis_of(&Series::Point::y);
    text(left_, y + 26, "class=\"title\"", xml_text(panel.name));
    legend(y + 26);
    axes();
    line(train_, "train");
    line(test_, "test");
    dots();
  }

  const std::string& svg() const { return out_; }

 private:
  using Points = std::vector<Series::Point>;

  Axis axis_of(double Series::Point::*member) const {
    double low = std::numeric_limits<double>::infinity();
    double high = -low;
    for (const Points* points : {&train_, &test_}) {
      for (const auto& point : *points) {
        if (!std::isfinite(point.y)) continue;
        low = std::min(low, point.*member);
        high = std::max(high, point.*member);
      }
    }
    if (member == &Series::Point::y) return Axis::over(low, high, 5);
    Axis axis = Axis::over(std::min(low, 0.0), high, 5);
    if (high > axis.low) axis.high = high;  // the curve reaches the right edge, where its last value stands
    return axis;
  }

  static std::string px(double value) { return fixed_number(value, 1); }
  double across(double x) const { return left_ + x_axis_.share(x) * (right_ - left_); }
  double down(double y) const { return bottom_ - y_axis_.share(y) * (bottom_ - top_); }

  void text(double x, double y, std::string_view attributes, const std::string& content) {
    out_.append("<text x=\"").append(px(x)).append("\" y=\"").append(px(y)).append("\" ").append(attributes);
    out_.append(">").append(content).append("</text>\n");
  }
  void segment(double x1, double y1, double x2, double y2, std::string_view style) {
    out_.append("<line x1=\"").append(px(x1)).append("\" y1=\"").append(px(y1)).append("\" x2=\"").append(px(x2));
    out_.append("\" y2=\"").append(px(y2)).append("\" class=\"").append(style).append("\"/>\n");
  }
  void dot(double x, double y) {
    out_.append("<circle cx=\"").append(px(x)).append("\" cy=\"").append(px(y)).append("\" r=\"3\" class=\"dot\"/>\n");
  }

  void legend(double y) {
    double x = right_;
    if (!test_.empty()) {
      text(x, y, "text-anchor=\"end\"", "test");
      segment(x - 52, y - 4, x - 30, y - 4, "line test");
      dot(x - 41, y - 4);
      x -= 68;
    }
    if (train_.empty()) return;
    text(x, y, "text-anchor=\"end\"", "train");
    segment(x - 55, y - 4, x - 33, y - 4, "line train");
  }

  void axes() {
    for (int i = 0; i < y_axis_.ticks(); ++i) {
      const double y = down(y_axis_.at(i));
      segment(left_, y, right_, y, i == 0 ? "axis" : "grid");
      text(left_ - 8, y + 4, "text-anchor=\"end\"", tick(y_axis_, i));
    }
    for (int i = 0; i < x_axis_.ticks(); ++i) {
      const double x = across(x_axis_.at(i));
      segment(x, bottom_, x, bottom_ + 4, "axis");
      text(x, bottom_ + 18, "text-anchor=\"middle\"", tick(x_axis_, i));
    }
    text((left_ + right_) / 2, bottom_ + 36, "text-anchor=\"middle\"", "step");
  }
  static std::string tick(const Axis& axis, int index) {
    const double value = std::fabs(axis.at(index)) < axis.tick / 2 ? 0.0 : axis.at(index);
    if (std::fabs(axis.high) >= 1e4 || std::fabs(axis.low) >= 1e4) return value == 0 ? "0" : short_number(value);
    return axis.tick < 1e-6 ? metric_number(value) : fixed_number(value, axis.decimals);
  }

  void line(const Points& points, std::string_view style) {
    std::string path;
    bool drawing = false;  // a value that is not finite breaks the line
    for (const auto& point : points) {
      const bool finite = std::isfinite(point.y);
      if (finite) path.append(drawing ? "L" : "M").append(px(across(point.x))).append(" ").append(px(down(point.y)));
      drawing = finite;
    }
    out_.append("<path class=\"line ").append(style).append("\" d=\"").append(path).append("\"/>\n");
  }

  void dots() {
    if (test_.size() <= 60)
      for (const auto& point : test_)
        if (std::isfinite(point.y)) dot(across(point.x), down(point.y));
    const Points& last = test_.empty() ? train_ : test_;
    if (last.empty() || !std::isfinite(last.back().y)) return;
    text(across(last.back().x) + 9, down(last.back().y) + 4,
         test_.empty() ? "class=\"end-train\"" : "class=\"end-test\"", metric_number(last.back().y));
  }

  Points train_;
  Points test_;
  double left_ = 0, right_ = 0, top_ = 0, bottom_ = 0;
  Axis x_axis_{}, y_axis_{};
  std::string out_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
