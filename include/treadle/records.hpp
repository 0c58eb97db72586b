// SPDX-License-Identifier: Apache-2.0
// Values that an objective records: sums and counts by name, left on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "treadle/error.hpp"
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

/// The values recorded in one window, each name once, in the order of their first appearance.
///
/// A handle: copies share the values, which nobody changes once the window is closed. Recording into a block that
/// nobody else holds any more allocates nothing.
class Records {
 public:
  /// Adds to `name`, whose characters must outlive the records.
  void add(std::string_view name, at::Tensor sum, double count, const at::Tensor& device_count = {}) {
    if (!block_) block_ = std::make_shared<Block>();
    Record& record = find_or_add(name);
    record.sum = record.sum.defined() ? at::add(record.sum, sum) : std::move(sum);
    record.count += count;
    if (device_count.defined())
      record.device_count = record.device_count.defined() ? at::add(record.device_count, device_count) : device_count;
  }

  const Record* begin() const { return block_ ? block_->begin() : nullptr; }
  const Record* end() const { return block_ ? block_->end() : nullptr; }
  bool empty() const { return begin() == end(); }
  std::size_t size() const { return static_cast<std::size_t>(end() - begin()); }

  /// Starts a new window; copies keep what they have.
  [[gnu::always_inline]] void restart() {
    if (!block_) return;
    if (block_.use_count() == 1)
      block_->clear();
    else
      block_.reset();
  }

  /// The record called `name`, or null.
  const Record* find(std::string_view name) const {
    for (const auto& record : *this)
      if (record.name == name) return &record;
    return nullptr;
  }

 private:
  using Block = c10::SmallVector<Record, 4>;

  Record& find_or_add(std::string_view name) {
    for (auto& record : *block_)
      if (record.name == name) return record;
    block_->push_back(Record{name, {}});
    return block_->back();
  }

  std::shared_ptr<Block> block_;
};

/// Keeps one copy of each name that was ever recorded, at a fixed address. Throws `ConfigError` for those under which
/// Treadle reports values of its own.
class NameTable {
 public:
  std::string_view intern(std::string_view name) {
    for (const auto& known : names_)
      if (known == name) return known;
    return add(name);
  }

 private:
  [[gnu::cold, gnu::noinline]] std::string_view add(std::string_view name) {
    if (name == "loss" || name == "grad_norm")
      throw ConfigError("treadle: step.record(\"" + std::string(name) +
                        "\") has a name that Treadle reports itself; record it under another one.");
    return names_.emplace_back(name);
  }

  std::deque<std::string> names_;
};

}  // namespace v0_1
}  // namespace treadle
