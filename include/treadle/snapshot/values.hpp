// SPDX-License-Identifier: Apache-2.0
// Host values as JSON, and back without losing a bit.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/fit_progress.hpp"
#include "treadle/optim/schedule.hpp"
#include "treadle/snapshot/json.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Calls `visit(name, field)` for each field of a schedule.
template <class S, class Visitor>
void visit_schedule(S& schedule, Visitor&& visit) {
  visit("kind", schedule.kind);
  visit("steps", schedule.steps);
  visit("warmup", schedule.warmup);
  visit("floor", schedule.floor);
  visit("power", schedule.power);
  visit("every", schedule.every);
  visit("gamma", schedule.gamma);
  visit("rise", schedule.rise);
  visit("initial_divisor", schedule.initial_divisor);
  visit("final_divisor", schedule.final_divisor);
  visit("table", schedule.table);
  visit("parts", schedule.parts);
}

/// JSON has no infinity and no NaN, so that these are strings.
template <class T>
nlohmann::json to_json(const T& value) {
  if constexpr (std::floating_point<T>) {
    if (std::isfinite(value)) return value;
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  } else if constexpr (std::integral<T> || std::convertible_to<T, std::string>) {
    return value;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<std::int64_t>(value);
  } else if constexpr (std::same_as<T, Schedule>) {
    auto object = nlohmann::json::object();
    visit_schedule(value, [&](const char* name, const auto& field) { object[name] = to_json(field); });
    return object;
  } else if constexpr (std::same_as<T, Metrics> || std::same_as<T, observe::Totals>) {
    auto list = nlohmann::json::array();
    for (const auto& entry : value) {
      if constexpr (std::same_as<T, Metrics>)
        list.push_back({entry.first, to_json(entry.second)});
      else
        list.push_back({entry.name, to_json(entry.sum), to_json(entry.count)});
    }
    return list;
  } else {
    auto list = nlohmann::json::array();
    for (const auto& element : value) list.push_back(to_json(element));
    return list;
  }
}

/// Reads `value` from what `to_json` gave; false where it is something else.
template <class T>
bool from_json(const nlohmann::json& json, T& value) {
  if constexpr (std::same_as<T, bool>) {
    if (!json.is_boolean()) return false;
    value = json.get<bool>();
  } else if constexpr (std::floating_point<T>) {
    if (json == "nan")
      value = std::numeric_limits<T>::quiet_NaN();
    else if (json == "inf" || json == "-inf")
      value = json == "inf" ? std::numeric_limits<T>::infinity() : -std::numeric_limits<T>::infinity();
    else if (json.is_number())
      value = json.get<T>();
    else
      return false;
  } else if constexpr (std::integral<T>) {
    if (!json.is_number_integer()) return false;
    if (json.is_number_unsigned() && json.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) return false;
    const auto number = json.get<std::int64_t>();
    if (!std::in_range<T>(number)) return false;
    value = static_cast<T>(number);
  } else if constexpr (std::same_as<T, std::string>) {
    if (!json.is_string()) return false;
    value = json.get<std::string>();
  } else if constexpr (std::is_enum_v<T>) {
    std::int64_t number = 0;
    if (!from_json(json, number) || number < 0 || number > 64) return false;
    value = static_cast<T>(number);
  } else if constexpr (std::same_as<T, Schedule>) {
    bool whole = json.is_object();
    if (whole)
      visit_schedule(value, [&](const char* name, auto& field) {
        whole = whole && json.contains(name) && from_json(json[name], field);
      });
    return whole;
  } else if constexpr (std::same_as<T, Metrics> || std::same_as<T, observe::Totals>) {
    constexpr std::size_t width = std::same_as<T, Metrics> ? 2 : 3;
    if (!json.is_array()) return false;
    T read;
    for (const auto& entry : json) {
      double numbers[2] = {0, 0};
      if (!entry.is_array() || entry.size() != width || !entry[0].is_string()) return false;
      for (std::size_t i = 1; i < width; ++i)
        if (!from_json(entry[i], numbers[i - 1])) return false;
      if constexpr (std::same_as<T, Metrics>)
        read.set(entry[0].get<std::string>(), numbers[0]);
      else
        read.add(entry[0].get<std::string>(), numbers[0], numbers[1]);
    }
    value = std::move(read);
  } else {
    if (!json.is_array()) return false;
    T read;
    for (const auto& element : json)
      if (!from_json(element, read.emplace_back())) return false;
    value = std::move(read);
  }
  return true;
}

/// Gathers values by name.
class ValueWriter {
 public:
  template <class T>
  void operator()(const std::string& name, const T& value) {
    object_[name] = to_json(value);
  }
  nlohmann::json take() { return std::move(object_); }

 private:
  nlohmann::json object_ = nlohmann::json::object();
};

/// Overwrites values by what was gathered; throws `SnapshotError` for one that is missing or of another type.
class ValueReader {
 public:
  ValueReader(const nlohmann::json& object, std::string source) : object_(object), source_(std::move(source)) {}
  template <class T>
  void operator()(const std::string& name, T& value) const {
    if (!object_.is_object() || !object_.contains(name) || !from_json(object_[name], value))
      throw SnapshotError("'" + source_ + "' has no value '" + name +
                          "' of the right type; it was saved by a trainer with other policies, or by another version.");
  }

 private:
  const nlohmann::json& object_;
  std::string source_;
};

/// Calls `visit(name, value)` for what a fit that goes on has to know, tensors apart.
template <class Visitor>
void for_each_value(FitProgress& fit, Visitor&& visit) {
  visit("place", fit.place);
  visit("epoch", fit.epoch);
  visit("epochs", fit.result.epochs);
  visit("steps", fit.result.steps);
  visit("skipped", fit.result.skipped);
  visit("step_in_epoch", fit.step_in_epoch);
  visit("batches_in_epoch", fit.batches_in_epoch);
  visit("steps_since_log", fit.steps_since_log);
  visit("rows_since_log", fit.rows_since_log);
  visit("rows_in_epoch", fit.rows_in_epoch);
  visit("skipped_before", fit.skipped_before);
  visit("epoch_totals", fit.epoch_totals);
  visit("early_stop_best", fit.early_stopping.best);
  visit("early_stop_epochs", fit.early_stopping.epochs_without);
  visit("early_stop_judged", fit.early_stopping.judged);
}

inline nlohmann::json to_json(const observe::EpochEvent& event) {
  return {{"epoch", event.epoch},          {"step", event.step},
          {"train", to_json(event.train)}, {"test", event.test ? to_json(*event.test) : nlohmann::json()},
          {"seconds", event.seconds},      {"rows_per_second", event.rows_per_second},
          {"data_wait", event.data_wait}};
}
inline bool from_json(const nlohmann::json& json, observe::EpochEvent& event) {
  if (!json.is_object()) return false;
  const auto read = [&](const char* name, auto& value) { return json.contains(name) && from_json(json[name], value); };
  if (!json.contains("test")) return false;
  if (!json["test"].is_null() && !from_json(json["test"], event.test.emplace())) return false;
  return read("epoch", event.epoch) && read("step", event.step) && read("train", event.train) &&
         read("seconds", event.seconds) && read("rows_per_second", event.rows_per_second) &&
         read("data_wait", event.data_wait);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
