// SPDX-License-Identifier: Apache-2.0
// Named host numbers in the order in which they were first seen. No torch here.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// Metrics by name: "loss" and whatever the objective recorded.
class Metrics {
 public:
  void set(std::string_view name, double value) {
    for (auto& [known, current] : values_) {
      if (known == name) {
        current = value;
        return;
      }
    }
    values_.emplace_back(std::string(name), value);
  }
  std::optional<double> find(std::string_view name) const {
    for (const auto& [known, value] : values_)
      if (known == name) return value;
    return std::nullopt;
  }
  /// The value called `name`; throws `ConfigError` listing the names there are.
  double operator[](std::string_view name) const {
    if (const auto value = find(name)) return *value;
    std::string known;
    for (const auto& [other, value] : values_) known += (known.empty() ? "" : ", ") + other;
    throw ConfigError("treadle: there is no metric '" + std::string(name) + "'; there is " +
                      (known.empty() ? std::string("none") : known) +
                      ". Record it with step.record(name, sum, count) in the objective.");
  }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }
  bool empty() const { return values_.empty(); }
  std::size_t size() const { return values_.size(); }

 private:
  std::vector<std::pair<std::string, double>> values_;
};

}  // namespace v0_1
}  // namespace treadle
