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
    ".end-train,.end-test,.bad-text{font-weight:600}.end-train{fill:#2459b3}.end-test{fill:#b4540f}\n"
    ".bad{fill:none;stroke:#cf222e;stroke-width:5;stroke-linecap:round}.bad-text{fill:#cf222e}\n"
    "@media (prefers-color-scheme:dark){\n"
    "text{fill:#9aa4af}.title{fill:#e6edf3}.page{fill:#0d1117}.grid{stroke:#262c34}.axis{stroke:#6e7781}\n"
    ".train{stroke:#6cb0ff}.test{stroke:#f2a45c}.dot{fill:#f2a45c}\n"
    ".end-train{fill:#8cc2ff}.end-test{fill:#f6b87e}.bad{stroke:#ff7b72}.bad-text{fill:#ff7b72}}\n"
    "</style>\n";

/// Draws a panel whose upper left corner is at (x, y) and whose curve ends at step `last` or later.
class SvgPanel {
 public:
  static constexpr double width = 420;
  static constexpr double height = 270;

  SvgPanel(const Panel& panel, double x, double y, double last = 0)
      : train_(panel.train.points()), test_(panel.test.points()) {
    x_axis_ = steps(last);
    y_axis_ = values();
    std::size_t longest = 0;
    for (int i = 0; i < y_axis_.ticks(); ++i) longest = std::max(longest, tick(y_axis_, i).size());
    const std::string end = end_text();
    left_ = x + std::max(58.0, 24 + digit_width * static_cast<double>(longest));
    right_ = x + width - std::max(66.0, 17 + bold_width * static_cast<double>(end.size()));
    top_ = y + 46;
    bottom_ = y + height - 44;
    const double legend_begins = legend(x + width - 20, y + 26);
    title(panel.name, x + 20, legend_begins - 12, y + 26);
    axes();
    line(train_, "train");
    line(test_, "test");
    dots();
    gaps(x + width - 20);
    if (const Series::Point* point = end_point())
      text(across(point->x) + 9, std::isfinite(point->y) ? down(point->y) + 4 : bottom_ - 4,
           !std::isfinite(point->y) ? "class=\"bad-text\""
           : test_.empty()          ? "class=\"end-train\""
                                    : "class=\"end-test\"",
           end);
  }

  const std::string& svg() const { return out_; }

 private:
  using Points = std::vector<Series::Point>;

  static constexpr const char* not_finite = "not finite";
  // Widths of a character in px, generous, because the reader's font is not known.
  static constexpr double digit_width = 7.7;
  static constexpr double bold_width = 8.4;
  static constexpr double title_width = 8.8;

  /// From 0 to the last step, whether it has a value or not: there the curve reaches the right edge.
  Axis steps(double last) const {
    for (const Points* points : {&train_, &test_})
      if (!points->empty()) last = std::max(last, points->back().x);
    Axis axis = Axis::over(0, std::max(last, 1.0), 5, /*least=*/1);
    axis.high = std::max(last, 1.0);
    return axis;
  }
  Axis values() const {
    double low = std::numeric_limits<double>::infinity();
    double high = -low;
    for (const Points* points : {&train_, &test_}) {
      for (const auto& point : *points) {
        if (!std::isfinite(point.y)) continue;
        low = std::min(low, point.y);
        high = std::max(high, point.y);
      }
    }
    return Axis::over(low, high, 5);
  }

  const Series::Point* end_point() const {
    const Points& points = test_.empty() ? train_ : test_;
    return points.empty() ? nullptr : &points.back();
  }
  std::string end_text() const {
    const Series::Point* point = end_point();
    return point == nullptr ? "" : std::isfinite(point->y) ? metric_number(point->y) : not_finite;
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

  /// Ends at `x`; returns where it begins.
  double legend(double x, double y) {
    if (!test_.empty()) {
      text(x, y, "text-anchor=\"end\"", "test");
      segment(x - 52, y - 4, x - 30, y - 4, "line test");
      dot(x - 41, y - 4);
      x -= 68;
    }
    if (train_.empty()) return x;
    text(x, y, "text-anchor=\"end\"", "train");
    segment(x - 55, y - 4, x - 33, y - 4, "line train");
    return x - 55;
  }

  /// A name that does not fit loses its middle; the whole of it is shown where the pointer rests.
  void title(const std::string& name, double begin, double end, double y) {
    const auto room = static_cast<std::size_t>((end - begin) / title_width);
    const std::size_t length = text_width(name);
    if (length <= room) return text(begin, y, "class=\"title\"", xml_text(name));
    const std::size_t tail = room / 2;
    const auto rest = std::string_view(name).substr(cut_text(name, length - tail).size());
    text(begin, y, "class=\"title\"",
         "<title>" + xml_text(name) + "</title>" + xml_text(cut_text(name, room - tail - 1)) + "\u2026" +
             xml_text(rest));
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
    const double size = std::max(std::fabs(axis.high), std::fabs(axis.low));
    if (size >= 1e4 && axis.tick >= size / 100) return value == 0 ? "0" : short_number(value);
    return axis.tick < 1e-6 ? metric_number(value) : fixed_number(value, axis.decimals);
  }

  void line(const Points& points, std::string_view style) {
    std::string path;
    for (std::size_t i = 0; i < points.size(); ++i) {  // a value that is not finite breaks the line
      if (!std::isfinite(points[i].y)) continue;
      const bool begins = i == 0 || !std::isfinite(points[i - 1].y);
      const bool ends = i + 1 == points.size() || !std::isfinite(points[i + 1].y);
      path.append(begins ? "M" : "L").append(px(across(points[i].x))).append(" ").append(px(down(points[i].y)));
      if (begins && ends) path.append("h0");  // a point alone is a dot
    }
    out_.append("<path class=\"line ").append(style).append("\" d=\"").append(path).append("\"/>\n");
  }

  /// On the axis of steps, where a value was not finite; `right` is where the explanation ends.
  void gaps(double right) {
    std::string path;
    for (const Points* points : {&train_, &test_}) {
      for (std::size_t i = 0; i < points->size(); ++i) {
        if (!(*points)[i].gap) continue;
        const bool begins = i == 0 || !(*points)[i - 1].gap;
        path.append(begins ? "M" : "L").append(px(across((*points)[i].x))).append(" ").append(px(bottom_));
        if (begins) path.append("h0");
      }
    }
    if (path.empty()) return;
    out_.append("<path class=\"bad\" d=\"").append(path).append("\"/>\n");
    if (end_text() == not_finite) return;  // which explains it
    text(right, bottom_ + 36, "class=\"bad-text\" text-anchor=\"end\"", not_finite);
  }

  void dots() {
    if (test_.size() > 60) return;
    for (const auto& point : test_)
      if (std::isfinite(point.y)) dot(across(point.x), down(point.y));
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
