// SPDX-License-Identifier: Apache-2.0
// What one window has counted, and the one scalar that turns its gradients into true ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <cstdint>
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
  const at::Tensor& hold(double value) {
    if (value != value_) [[unlikely]] {
      tensor_.fill_(value);
      value_ = value;
    }
    return tensor_;
  }

 private:
  at::Tensor tensor_;
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
  explicit Window(at::Device device)
      : seed_(device),
        scaled_seed_(at::empty_like(seed_.hold(1.0))),
        ratio_(device),
        divisor_(at::empty_like(scaled_seed_)) {}

  /// Number by which every micro-batch's sum is divided before it is back-propagated; 0 before the first micro-batch.
  double c0() const { return c0_; }
  void set_c0(double c0) { c0_ = c0; }

  std::int64_t micro_batches() const { return micro_batches_; }

  /// Counts one micro-batch, whose `loss` still carries its graph, and returns the factor on the host that belongs on
  /// it.
  template <class Agree>
  double add(const Loss& loss, std::int64_t rows, Agree&& agree) {
    const auto nominal = static_cast<double>(loss.count > 0 ? loss.count : rows);
    if constexpr (Windows) {
      if (c0_ == 0) c0_ = agree(nominal > 0 ? nominal : 1.0);
    } else {
      c0_ = loss.device_count.defined() && c0_ != 0 ? c0_ : (nominal > 0 ? nominal : 1.0);
    }
    ++micro_batches_;
    if (loss.device_count.defined()) [[unlikely]]
      device_count_ = device_count_.defined() ? at::add(device_count_, loss.device_count) : loss.device_count;
    else
      host_count_ += static_cast<double>(loss.count);
    const double factor = loss.is_mean ? static_cast<double>(loss.count) / c0_ : 1.0 / c0_;
    collect(loss.value, factor);
    return factor;
  }

  /// The gradient that the backward pass of `root` starts from: `factor`, times the loss scale if there is one.
  at::Tensor seed(double factor, const at::Tensor& root) {
    if (root.scalar_type() == at::kFloat) [[likely]]
      return seed_.hold(factor);
    return at::full({}, factor, root.options().requires_grad(false));  // fp64, whose factor fp32 would round
  }
  at::Tensor seed(double factor, const at::Tensor& root, const at::Tensor& loss_scale) {
    if (root.scalar_type() != at::kFloat) [[unlikely]]
      return at::mul(loss_scale.to(root.scalar_type()), factor);
    if (factor == 1.0) return loss_scale;
    at::mul_out(scaled_seed_, loss_scale, seed_.hold(factor));
    return scaled_seed_;
  }

  /// What the reduced gradients must be divided by, or null where it is 1: (count / c0) x loss scale.
  const at::Tensor* divisor(const at::Tensor* loss_scale) {
    if (device_count_.defined()) [[unlikely]] {
      at::mul_out(divisor_, total_count(), at::full({}, 1.0 / c0_, divisor_.options()));
      if (loss_scale) divisor_.mul_(*loss_scale);
      return &divisor_;
    }
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
  double host_count() const { return host_count_; }

  /// Each micro-batch's own loss value, unscaled, without a graph.
  const std::vector<at::Tensor>& losses() const { return losses_; }
  void keep_losses(bool keep) { keep_losses_ = keep; }

  /// Writes loss and counts: the mean over everything that the window counted, without a graph.
  void report(StepResult& result) const {
    result.micro_batches = micro_batches_;
    result.count = host_count_;
    if (!sum_.defined()) [[unlikely]]
      return;
    if (device_count_.defined()) [[unlikely]] {
      result.device_count = total_count();
      result.loss = at::mul(sum_, c0_) / result.device_count.clamp_min(1);
      return;
    }
    const double ratio = host_count_ / c0_;
    result.loss = ratio == 1.0 || ratio == 0.0 ? sum_ : at::mul(sum_, 1.0 / ratio);
  }

  void reset() {
    micro_batches_ = 0;
    host_count_ = 0;
    device_count_.reset();
    sum_.reset();
    losses_.clear();
  }

 private:
  // tensor_data() leaves the graph behind without a dispatched detach.
  void collect(const at::Tensor& value, double factor) {
    at::Tensor plain(value.tensor_data());
    if (keep_losses_) losses_.push_back(plain);
    at::Tensor part = factor == 1.0 ? std::move(plain) : at::mul(plain, factor);
    sum_ = sum_.defined() ? at::add(sum_, part) : std::move(part);
  }

  HostScalar seed_;
  at::Tensor scaled_seed_;
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
