// SPDX-License-Identifier: Apache-2.0
// What one window has counted, and the one scalar that turns its gradients into true ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "treadle/loss.hpp"
#include "treadle/step_result.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A one-element fp32 device tensor that holds a host number and is refilled only when that number changes.
class HostScalar {
 public:
  explicit HostScalar(at::Device device) : tensor_(at::full({}, 1.0, at::device(device).dtype(at::kFloat))) {}
  const at::Tensor& hold(double value) { return *hold_optional(value); }
  /// As `hold`, in the form in which a backward pass takes its first gradient, which saves a copy.
  [[gnu::always_inline]] const std::optional<at::Tensor>& hold_optional(double value) {
    if (value != value_) [[unlikely]]
      refill(value);
    return tensor_;
  }

 private:
  [[gnu::cold]] void refill(double value) {
    tensor_->fill_(value);
    value_ = value;
  }

  std::optional<at::Tensor> tensor_;
  double value_ = 1.0;
};

/// The sums of one window. What is back-propagated is sum_i / c0 for each micro-batch, with one host number c0 for the
/// whole run, so that gradients of ragged micro-batches simply add; `divisor()` is what they must be divided by at the
/// end.
///
/// With `Windows` false a window is one micro-batch, c0 is its own count, and the divisor is 1 and elided.
template <bool Windows>
class Window {
 public:
  explicit Window(at::Device device) : seed_(device), ratio_(device), divisor_(at::empty_like(seed_.hold(1.0))) {}

  /// Number by which every micro-batch's sum is divided before it is back-propagated; 0 before the first micro-batch.
  double c0() const { return c0_; }
  void set_c0(double c0) { c0_ = c0; }

  std::int64_t micro_batches() const { return micro_batches_; }

  /// Numbers a micro-batch without rows, which counts nothing.
  void add_nothing() {
    ++micro_batches_;
    if (keep_losses_) losses_.push_back(at::zeros_like(divisor_));
  }
  /// Counts one micro-batch, whose `loss` still carries its graph, and returns the factor on the host that belongs on
  /// it.
  template <class Agree>
  [[gnu::always_inline]] double add(const Loss& loss, std::int64_t rows, Agree&& agree) {
    ++micro_batches_;
    if constexpr (!Windows) {
      if (!loss.device_count.defined() && loss.count > 0) [[likely]] {
        host_count_ = static_cast<double>(loss.count);
        const double factor = loss.is_mean ? 1.0 : 1.0 / host_count_;
        collect(loss.value, factor);
        return factor;
      }
    }
    if (c0_ == 0) {
      const auto nominal = static_cast<double>(loss.count > 0 ? loss.count : rows);
      c0_ = agree(nominal > 0 ? nominal : 1.0);
    }
    if (loss.device_count.defined())
      device_count_ = device_count_.defined() ? at::add(device_count_, loss.device_count) : loss.device_count;
    else
      host_count_ += static_cast<double>(loss.count);
    const double factor = loss.is_mean ? static_cast<double>(loss.count) / c0_ : 1.0 / c0_;
    collect(loss.value, factor);
    return factor;
  }

  /// The gradient that a backward pass starts from: `factor`, times the loss scale if there is one.
  const std::optional<at::Tensor>& seed(double factor, const at::Tensor* loss_scale) {
    if (!loss_scale) return seed_.hold_optional(factor);
    if (factor == 1.0)
      scaled_seed_ = *loss_scale;
    else
      scaled_seed_ = at::mul(*loss_scale, seed_.hold(factor));
    return scaled_seed_;
  }

  /// What the reduced gradients must be divided by, or null where it is 1: (count / c0) x loss scale.
  const at::Tensor* divisor(const at::Tensor* loss_scale) {
    if (device_count_.defined()) [[unlikely]] {
      at::mul_out(divisor_, total_count(), at::full({}, 1.0 / c0_, divisor_.options()));
      if (loss_scale) divisor_.mul_(*loss_scale);
      return &divisor_;
    }
    if constexpr (!Windows) return loss_scale;
    const double ratio = c0_ == 0 ? 0.0 : host_count_ / c0_;
    if (ratio == 1.0 || ratio == 0.0) return loss_scale;  // a count of 0 is skipped by `empty()`
    if (!loss_scale) return &ratio_.hold(ratio);
    at::mul_out(divisor_, *loss_scale, ratio_.hold(ratio));
    return &divisor_;
  }

  /// Whether nothing was counted, where the host knows it.
  bool empty() const { return !device_count_.defined() && host_count_ == 0; }
  /// Whether part of the count lives on the device.
  bool counts_on_device() const { return device_count_.defined(); }
  /// The whole count on the device: fp32 scalar.
  at::Tensor total_count() const {
    auto count = device_count_.to(at::kFloat).reshape({});
    return host_count_ != 0 ? at::add(count, host_count_) : count;
  }

  /// Each micro-batch's own loss value, unscaled, without a graph.
  const std::vector<at::Tensor>& losses() const { return losses_; }
  void keep_losses(bool keep) { keep_losses_ = keep; }

  /// Ends the window and writes loss and counts: the mean over everything counted, without a graph.
  void close(StepResult& result) {
    result.micro_batches = micro_batches_;
    result.count = host_count_;
    if (sum_.defined()) [[likely]]
      result.loss = mean(result);
    reset();
  }

  void reset() {
    micro_batches_ = 0;
    host_count_ = 0;
    if (device_count_.defined()) [[unlikely]]
      device_count_.reset();
    if (sum_.defined()) [[unlikely]]
      sum_.reset();
    if (!losses_.empty()) losses_.clear();
  }

 private:
  // tensor_data() leaves the graph behind without a dispatched detach.
  [[gnu::always_inline]] void collect(const at::Tensor& value, double factor) {
    at::Tensor plain(value.tensor_data());
    if (plain.dim() != 0) [[unlikely]]
      plain = plain.reshape({});
    if (keep_losses_) losses_.push_back(plain);
    if (factor != 1.0) [[unlikely]]
      plain = at::mul(plain, factor);
    if (sum_.defined()) [[unlikely]]
      sum_ = at::add(sum_, plain);
    else
      std::construct_at(&sum_, std::move(plain));  // over an undefined tensor, which owns nothing
  }
  at::Tensor mean(StepResult& result) {
    if (device_count_.defined()) [[unlikely]] {
      result.device_count = total_count();
      return at::div(at::mul(sum_, c0_), result.device_count.clamp_min(1));
    }
    if constexpr (!Windows) return std::move(sum_);
    const double ratio = host_count_ / c0_;
    return ratio == 1.0 || ratio == 0.0 ? std::move(sum_) : at::mul(sum_, 1.0 / ratio);
  }

  HostScalar seed_;
  std::optional<at::Tensor> scaled_seed_;
  HostScalar ratio_;
  at::Tensor divisor_;
  double c0_ = 0;
  double host_count_ = 0;
  std::int64_t micro_batches_ = 0;
  at::Tensor device_count_;
  at::Tensor sum_;
  std::vector<at::Tensor> losses_;
  bool keep_losses_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
