// SPDX-License-Identifier: Apache-2.0
// Running means on the device, read once a log point.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/metrics.hpp"
#include "treadle/step_result.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {

/// Sums and counts by name, on the host.
class Totals {
  struct Entry {
    std::string name;
    double sum = 0;
    double count = 0;
  };

 public:
  void add(std::string_view name, double sum, double count) {
    for (auto& entry : entries_) {
      if (entry.name != name) continue;
      entry.sum += sum;
      entry.count += count;
      return;
    }
    entries_.push_back({std::string(name), sum, count});
  }
  void add(const Totals& other) {
    for (const auto& entry : other.entries_) add(entry.name, entry.sum, entry.count);
  }
  /// Sum over count by name; a name that counted nothing is left out.
  Metrics means() const {
    Metrics metrics;
    for (const auto& entry : entries_)
      if (entry.count > 0) metrics.set(entry.name, entry.sum / entry.count);
    return metrics;
  }

  /// As bytes for another process of the same program, and back.
  std::string pack() const {
    std::string bytes;
    for (const auto& entry : entries_) {
      const double numbers[] = {static_cast<double>(entry.name.size()), entry.sum, entry.count};
      bytes.append(reinterpret_cast<const char*>(numbers), sizeof numbers).append(entry.name);
    }
    return bytes;
  }
  static Totals unpack(std::string_view bytes) {
    Totals totals;
    while (!bytes.empty()) {
      double numbers[3];
      std::memcpy(numbers, bytes.data(), sizeof numbers);
      const auto length = static_cast<std::size_t>(numbers[0]);
      totals.add(bytes.substr(sizeof numbers, length), numbers[1], numbers[2]);
      bytes.remove_prefix(sizeof numbers + length);
    }
    return totals;
  }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

/// Adds up losses and recorded values on the device, in fp64; a skipped step counts nothing.
class Meter {
  struct Entry {
    std::string name;
    at::Tensor sum;
    at::Tensor device_count;
    double count = 0;
    void add(const at::Tensor& value, double weight, double counted) {
      sum.add_(value, weight);
      count += counted;
    }
  };

 public:
  /// Adds a step's loss, norm and records.
  void add(const StepResult& result) {
    const at::Tensor keep = result.skipped.defined() ? result.skipped.eq(0) : at::Tensor();
    if (result.loss.defined()) {
      if (result.device_count.defined())
        add("loss", at::mul(result.loss, result.device_count), 0, result.device_count, keep);
      else if (keep.defined())
        add("loss", at::mul(result.loss, result.count), result.count, {}, keep);
      else
        entry("loss", result.loss).add(result.loss, result.count, result.count);
    }
    if (result.grad_norm.defined()) add("grad_norm", result.grad_norm, 1, {}, keep);
    add(result.records, keep);
  }
  void add(const Records& records, const at::Tensor& keep = {}) {
    for (const auto& record : records) add(record.name, record.sum, record.count, record.device_count, keep);
  }
  /// Adds `sum` over `count` plus `device_count`, unless `keep` is defined and 0.
  void add(std::string_view name, const at::Tensor& sum, double count, const at::Tensor& device_count,
           const at::Tensor& keep) {
    auto& e = entry(name, sum);
    if (!keep.defined()) {
      e.add(sum, 1.0, count);
      if (device_count.defined()) e.device_count.add_(device_count);
      return;
    }
    e.sum.add_(at::where(keep, sum.to(at::kDouble), 0.0));  // selects: a skipped step's values are often NaN
    auto counted =
        device_count.defined() ? device_count.to(at::kDouble).add(count) : at::full({}, count, e.sum.options());
    e.device_count.add_(at::where(keep, counted, 0.0));
  }

  /// Reads everything in one transfer and starts again from zero.
  Totals take() {
    Totals totals;
    if (entries_.empty()) return totals;
    std::vector<at::Tensor> values;
    for (const auto& e : entries_) {
      values.push_back(e.sum);
      values.push_back(e.device_count);
    }
    const auto host = at::stack(values).cpu();  // sync: the log point's one read
    const auto* numbers = host.data_ptr<double>();
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      auto& e = entries_[i];
      totals.add(e.name, numbers[2 * i], numbers[2 * i + 1] + e.count);
      e.sum.zero_();
      e.device_count.zero_();
      e.count = 0;
    }
    return totals;
  }
  /// What was added since, by name: its sum, its count on the device (both fp64 scalars), and that on the host.
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  Entry& entry(std::string_view name, const at::Tensor& like) {
    for (auto& e : entries_)
      if (e.name == name) return e;
    const auto options =
        at::device(entries_.empty() ? like.device() : entries_.front().sum.device()).dtype(at::kDouble);
    return entries_.emplace_back(Entry{std::string(name), at::zeros({}, options), at::zeros({}, options)});
  }

  std::vector<Entry> entries_;
};

}  // namespace observe
}  // namespace v0_1
}  // namespace treadle
