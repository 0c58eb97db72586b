// SPDX-License-Identifier: Apache-2.0
// The one context that an objective sees: `step`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "treadle/checkpointing/no_checkpointing.hpp"
#include "treadle/error.hpp"
#include "treadle/records.hpp"
#include "treadle/runtime/sum_dtype.hpp"

namespace treadle {
inline namespace v0_1 {

/// What an objective may do besides computing its loss: record values and name the blocks to checkpoint.
template <class Checkpointing>
class StepContext {
 public:
  StepContext(Checkpointing& checkpointing, NameTable& names) : checkpoint(checkpointing), names_(names) {}
  StepContext(const StepContext&) = delete;
  StepContext& operator=(const StepContext&) = delete;

  /// Records `sum` over `count` things under `name`: reported is the total of the sums over the total of the counts,
  /// over window, epoch and ranks. `sum` is a scalar tensor, which stays on the device, or a number. Throws
  /// `ConfigError` for the names "loss" and "grad_norm", `DataError` for a tensor of several elements. Does nothing in
  /// a block that is recomputed, which has recorded it before.
  void record(std::string_view name, const at::Tensor& sum, std::int64_t count) {
    if (is_repeating()) return;
    records_.add(names_.intern(name), scalar(name, sum), static_cast<double>(count));
  }
  /// As above with a scalar count tensor on the device.
  void record(std::string_view name, const at::Tensor& sum, const at::Tensor& count) {
    if (is_repeating()) return;
    records_.add(names_.intern(name), scalar(name, sum), 0.0, scalar(name, count));
  }
  void record(std::string_view name, double sum, std::int64_t count) {
    if (is_repeating()) return;
    records_.add(names_.intern(name), at::full({}, sum, at::kDouble), static_cast<double>(count));
  }

  /// `step.checkpoint(block, x...)` is `block(x...)`, with its activations kept or recomputed as the policy says;
  /// `step.checkpoint.cheap(name, f, x...)` marks a region that is cheap to recompute.
  Checkpointing& checkpoint;

  /// Whether this is a training step (not `evaluate`).
  bool training() const { return training_; }

  Records& records() { return records_; }
  void set_training(bool training) { training_ = training; }
  /// Forgets an open window.
  void reset() {
    records_.restart();
    checkpoint.reset();
  }

 private:
  bool is_repeating() const {
    if constexpr (requires { checkpoint.is_repeating(); })
      return checkpoint.is_repeating();
    else
      return false;
  }
  static at::Tensor scalar(std::string_view name, const at::Tensor& value) {
    if (value.numel() != 1)
      throw DataError("treadle: step.record(\"" + std::string(name) + "\") was given a tensor of " +
                      std::to_string(value.numel()) + " elements; record a scalar, such as its sum().");
    at::Tensor plain(value.tensor_data());  // without its graph
    // A parameter, or a view of one, would change under the record; what was computed for it alone is taken as it is.
    if (value.use_count() > 1 || plain.storage().use_count() > 1) plain = plain.clone();
    if (plain.dim() != 0) plain = plain.reshape({});
    const auto wide = detail::sum_dtype(plain.scalar_type());
    return plain.scalar_type() == wide ? plain : plain.to(wide);
  }

  NameTable& names_;
  Records records_;
  bool training_ = true;
};

/// Stands for the context where there is no step: blocks and regions are plain calls, and nothing is recorded.
struct PlainStep {
  checkpointing::NoCheckpointing::State checkpoint{checkpointing::NoCheckpointing{}};
  template <class Value, class Count>
  void record(std::string_view /*name*/, const Value& /*sum*/, const Count& /*count*/) const {}
  bool training() const { return false; }
};

}  // namespace v0_1
}  // namespace treadle
