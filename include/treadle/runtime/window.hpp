// SPDX-License-Identifier: Apache-2.0
// What one window has counted, and the one scalar that turns its gradients into true ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "treadle/loss.hpp"
#include "treadle/runtime/sum_dtype.hpp"
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
/// end. Over several ranks c0 is the same number on all, and the reduction is a mean: the divisor knows the ranks.
///
/// With `Windows` false a window is one micro-batch, c0 is its own count, and the divisor is 1 and elided.
template <bool Windows>
class Window {
 public:
  /// `single`: whether a window is always one micro-batch on one rank, so that c0 may be its own count.
  explicit Window(at::Device device, std::int64_t ranks = 1, bool single = !Windows)
      : seed_(device),
        ratio_(device),
        divisor_(at::empty_like(seed_.hold(1.0))),
        on_host_(device.is_cpu()),
        ranks_(static_cast<double>(ranks)),
        single_(single) {}

  /// Number by which every micro-batch's sum is divided before it is back-propagated; 0 before the first micro-batch.
  double c0() const { return c0_; }
  void set_c0(double c0) { c0_ = c0; }

  /// Numbers a micro-batch without rows, which counts nothing. `agree` makes a number of all ranks out of each one's.
  template <class Agree>
  void add_nothing(Agree&& agree) {
    ++micro_batches_;
    if (Windows && c0_ == 0) settle_c0(0, agree);
    if (keep_losses_) losses_.push_back(at::zeros_like(divisor_));
  }
  /// Counts one micro-batch, whose `loss` still carries its graph, and returns the factor on the host that belongs on
  /// it. `rows()` is what to take for the count where the host does not know it.
  template <class Rows, class Agree>
  [[gnu::always_inline]] double add(const Loss& loss, Rows&& rows, Agree&& agree) {
    ++micro_batches_;
    if constexpr (!Windows) {
      if (!loss.device_count.defined() && loss.count > 0) [[likely]] {
        host_count_ = static_cast<double>(loss.count);
        const double factor = loss.is_mean ? 1.0 : 1.0 / host_count_;
        collect(loss.value, factor);
        return factor;
      }
    } else if (single_ && !loss.device_count.defined() && loss.count > 0) {
      c0_ = static_cast<double>(loss.count);
    }
    if (c0_ == 0) settle_c0(static_cast<double>(loss.count > 0 ? loss.count : rows()), agree);
    if (loss.device_count.defined())
      count_on_device(loss.device_count);
    else
      host_count_ += static_cast<double>(loss.count);
    const double factor = loss.is_mean ? static_cast<double>(loss.count) / c0_ : 1.0 / c0_;
    collect(loss.value, factor);
    return factor;
  }

  /// Whether each seed must be a tensor of its own: autograd gives a parameter of one element, if only views lie
  /// between it and the loss, the seed itself for a gradient, and then adds to it in place.
  void own_seeds(bool own) { own_seeds_ = own; }

  /// The gradient that a backward pass starts from: `factor`, times the loss scale if there is one.
  const std::optional<at::Tensor>& seed(double factor, const at::Tensor* loss_scale) {
    if (!loss_scale && !own_seeds_) [[likely]]
      return seed_.hold_optional(factor);
    if (!loss_scale)
      made_seed_ = seed_.hold(factor).clone();
    else if (factor != 1.0)
      made_seed_ = at::mul(*loss_scale, seed_.hold(factor));
    else if (own_seeds_)
      made_seed_ = loss_scale->clone();
    else if (!made_seed_ || !made_seed_->is_same(*loss_scale))
      made_seed_ = *loss_scale;
    return made_seed_;
  }

  /// What the reduced gradients must be divided by, or null where it is 1: (count / c0) x loss scale.
  const at::Tensor* divisor(const at::Tensor* loss_scale) {
    if (counts_on_device()) [[unlikely]] {
      at::mul_out(divisor_, total_count(), ratio_.hold(1.0 / (c0_ * ranks_)));
      if (loss_scale) divisor_.mul_(*loss_scale);
      return &divisor_;
    }
    if constexpr (!Windows) return loss_scale;
    const double ratio = c0_ == 0 ? 0.0 : host_total() / (c0_ * ranks_);
    if (ratio == 1.0 || ratio == 0.0) return loss_scale;  // a count of 0 is skipped by `empty()`
    if (!loss_scale) return &ratio_.hold(ratio);
    at::mul_out(divisor_, *loss_scale, ratio_.hold(ratio));
    return &divisor_;
  }

  /// Whether nothing was counted, on any rank, where the host knows it.
  bool empty() const { return !counts_on_device() && host_total() == 0; }
  /// Whether part of the count of all ranks lives on the device.
  bool counts_on_device() const { return totals_.defined() ? !on_host_ : device_count_.defined(); }
  /// The whole count of all ranks on the device: fp32 scalar.
  at::Tensor total_count() const { return totals_.defined() ? totals_[0].to(at::kFloat) : own_count(); }

  /// Each micro-batch's own loss value on this rank, unscaled, without a graph.
  const std::vector<at::Tensor>& losses() const { return losses_; }
  void keep_losses(bool keep) { keep_losses_ = keep; }
  /// How many ranks have a loss that is not finite: fp64 scalar; undefined for one rank.
  at::Tensor bad_ranks() const { return totals_.defined() ? totals_[1] : at::Tensor(); }

  /// What this rank tells the others of its window, for them to add up: fp64 `[3]` on the device, its count, whether a
  /// loss is not finite (0 unless losses are kept), and a place for a rank that fails to say so.
  at::Tensor share() const {
    auto share = at::zeros({3}, divisor_.options().dtype(at::kDouble));
    if (device_count_.defined())
      share[0].copy_(own_count());
    else
      share[0].fill_(host_count_);
    if (!losses_.empty()) share[1].copy_(at::isfinite(at::stack(losses_)).logical_not().any());
    return share;
  }
  /// Takes in the sum of all ranks' shares.
  void take_totals(at::Tensor totals) { totals_ = std::move(totals); }

  /// Ends the window and writes loss and counts of this rank: the mean over everything counted, without a graph.
  [[gnu::always_inline]] void close(StepResult& result) {
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
    if (totals_.defined()) [[unlikely]]
      totals_.reset();
    if (sum_.defined()) [[unlikely]]
      sum_.reset();
    if (!losses_.empty()) losses_.clear();
  }

 private:
  // All ranks come here at their first micro-batch, whatever it counts, and none does again.
  template <class Agree>
  [[gnu::cold, gnu::noinline]] void settle_c0(double nominal, Agree& agree) {
    c0_ = agree(nominal);
    if (!(c0_ > 0)) c0_ = 1.0;
  }
  void count_on_device(const at::Tensor& count) {
    const auto widened = count.to(sum_dtype(count.scalar_type()));
    device_count_ = device_count_.defined() ? at::add(device_count_, widened) : widened;
  }
  double host_total() const { return totals_.defined() ? totals_.const_data_ptr<double>()[0] : host_count_; }
  at::Tensor own_count() const {
    auto count = device_count_.to(at::kFloat).reshape({});
    return host_count_ != 0 ? at::add(count, host_count_) : count;
  }

  // tensor_data() leaves the graph behind without a dispatched detach.
  [[gnu::always_inline]] void collect(const at::Tensor& value, double factor) {
    at::Tensor plain(value.tensor_data());
    if (is_narrow(plain.scalar_type())) [[unlikely]]
      plain = plain.to(at::kFloat);
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
  [[gnu::always_inline]] at::Tensor mean(StepResult& result) {
    if (device_count_.defined()) [[unlikely]] {
      result.device_count = own_count();
      return at::where(result.device_count.gt(0), at::div(at::mul(sum_, c0_), result.device_count), 0.0);
    }
    if constexpr (!Windows) return std::move(sum_);
    const double ratio = host_count_ / c0_;
    return ratio == 1.0 || ratio == 0.0 ? std::move(sum_) : at::mul(sum_, 1.0 / ratio);
  }

  HostScalar seed_;
  std::optional<at::Tensor> made_seed_;
  HostScalar ratio_;
  at::Tensor divisor_;
  bool on_host_ = true;
  double ranks_ = 1;
  bool single_ = true;
  bool own_seeds_ = false;
  double c0_ = 0;
  double host_count_ = 0;
  std::int64_t micro_batches_ = 0;
  at::Tensor device_count_;
  at::Tensor totals_;  // of all ranks, once they are known
  at::Tensor sum_;
  std::vector<at::Tensor> losses_;
  bool keep_losses_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
