// SPDX-License-Identifier: Apache-2.0
// Values that an objective records: sums and counts by name, left on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// One recorded value: what it is called is `sum / count`.
struct Record {
  std::string_view name;      ///< lives as long as the trainer
  at::Tensor sum;             ///< scalar tensor on the device
  double count = 0;           ///< what the host counted
  at::Tensor device_count{};  ///< what was counted on the device; undefined if nothing was
};

/// The values recorded in one window, each name once, in the order of their first appearance. Copying it allocates
/// nothing for up to four names.
class Records {
 public:
  /// Adds to `name`, whose characters must outlive the records.
  void add(std::string_view name, at::Tensor sum, double count, const at::Tensor& device_count = {}) {
    Record& record = find_or_add(name);
    record.sum = record.sum.defined() ? at::add(record.sum, sum) : std::move(sum);
    record.count += count;
    if (device_count.defined())
      record.device_count = record.device_count.defined() ? at::add(record.device_count, device_count) : device_count;
  }

  auto begin() const { return records_.begin(); }
  auto end() const { return records_.end(); }
  bool empty() const { return records_.empty(); }
  std::size_t size() const { return records_.size(); }
  void clear() { records_.clear(); }

  /// The record called `name`, or null.
  const Record* find(std::string_view name) const {
    for (const auto& record : records_)
      if (record.name == name) return &record;
    return nullptr;
  }

 private:
  Record& find_or_add(std::string_view name) {
    for (auto& record : records_)
      if (record.name == name) return record;
    records_.push_back(Record{name, {}});
    return records_.back();
  }

  c10::SmallVector<Record, 4> records_;
};

/// Keeps one copy of each name that was ever recorded, at a fixed address.
class NameTable {
 public:
  std::string_view intern(std::string_view name) {
    for (const auto& known : names_)
      if (known == name) return known;
    return names_.emplace_back(name);
  }

 private:
  std::deque<std::string> names_;
};

}  // namespace v0_1
}  // namespace treadle
