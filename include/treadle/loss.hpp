// SPDX-License-Identifier: Apache-2.0
// What an objective returns: a differentiable value and how much it counts.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// A differentiable scalar with the number of things (rows, tokens) that it is the sum, or the mean, over.
///
/// `Loss{sum, count}` takes a sum, `Loss::mean(value, count)` a mean. The count may be a one-element device tensor (the
/// tokens that are not ignored, say); it is never read on the host. Sums of ragged micro-batches and ranks come out as
/// the mean over everything counted.
class Loss {
 public:
  /// `sum`: a scalar tensor; `things`: how many things it sums over.
  Loss(at::Tensor sum, std::int64_t things) : value(std::move(sum)), count(things), is_mean(false) {}

  /// As above with a count on the device; `nominal` is its usual size on the host, which only sets the magnitude of the
  /// numbers that are back-propagated (default: the batch's rows).
  Loss(at::Tensor sum, at::Tensor things, std::int64_t nominal = 0)
      : value(std::move(sum)), device_count(std::move(things)), count(nominal), is_mean(false) {}

  /// A mean over a number of `things`.
  static Loss mean(at::Tensor mean, std::int64_t things) { return Loss(std::move(mean), things, Mean{}); }

  /// Whether it is a mean over nothing, which is NaN and must not be back-propagated.
  bool counts_nothing() const { return is_mean && count == 0 && !device_count.defined(); }

  at::Tensor value;         ///< scalar: the sum, or the mean if `is_mean`
  at::Tensor device_count;  ///< undefined unless the count lives on the device
  std::int64_t count;       ///< the count, or the nominal one where `device_count` is defined
  bool is_mean;

 private:
  struct Mean {};
  Loss(at::Tensor mean, std::int64_t things, Mean) : value(std::move(mean)), count(things), is_mean(true) {}
};

namespace detail {
/// What a micro-batch's loss counts for: the host's factor on its gradient, and whether it is an fp32 scalar.
struct Weight {
  double factor;
  bool plain;
};

/// Where a backward pass starts, and from what.
struct Root {
  at::Tensor value;
  at::Tensor seed;
};

/// Throws `ConfigError` for an objective's value that is no scalar.
inline void require_scalar(const at::Tensor& value) {
  if (!value.defined())
    throw ConfigError("treadle::Trainer: the objective returned an undefined tensor; return the loss it computed.");
  if (value.numel() != 1)
    throw ConfigError("treadle::Trainer: the objective returned a loss of " + std::to_string(value.numel()) +
                      " elements; reduce it to its mean(), or to a treadle::Loss of its sum() and count.");
}
}  // namespace detail

/// Options of `mean_loss`.
struct MeanLossOptions {
  static constexpr std::int64_t none = INT32_MIN;  // no class; a SymInt holds it inline, unlike INT64_MIN
  std::int64_t ignore_index = none;  ///< target value that does not count, such as -100; by default none is ignored
  double label_smoothing = 0.0;      ///< in [0, 1], as in torch.nn.functional.cross_entropy
};

namespace detail {
/// In a handler of what LibTorch threw: says what is wrong with the target, or throws the same again.
[[noreturn, gnu::cold]] inline void refuse_target(const at::Tensor& logits, const at::Tensor& target,
                                                  const c10::Error& error) {
  if (target.defined() && target.scalar_type() != at::kLong && target.scalar_type() != at::kByte)
    throw DataError(std::string("treadle::mean_loss: target is of dtype ") + c10::toString(target.scalar_type()) +
                    ", but class indices are int64; pass target.to(at::kLong).");
  if (dynamic_cast<const c10::IndexError*>(&error) == nullptr) throw;
  throw DataError("treadle::mean_loss: a target class is out of range for logits of " +
                  std::to_string(logits.dim() > 1 ? logits.size(1) : logits.size(0)) + " classes (" +
                  error.what_without_backtrace() +
                  "); classes are 0 to C-1, and a value that marks targets to ignore goes in ignore_index.");
}
}  // namespace detail

/// Cross entropy as a `Loss`: logits `[N, C]` or `[N, C, d...]` of any floating dtype, target `[N]` or `[N, d...]` of
/// class indices, counted per target.
///
/// Targets are int64; another dtype throws `DataError`. With `ignore_index` the ignored targets count nothing (all
/// ignored: exact zeros, no NaN). A class out of range throws `DataError` on a CPU; on CUDA it is a device-side assert,
/// which ends the process's use of the device.
[[gnu::always_inline]] inline Loss mean_loss(const at::Tensor& logits, const at::Tensor& target,
                                             const MeanLossOptions& options = {}) {
  try {
    if (options.ignore_index == MeanLossOptions::none)
      return Loss::mean(at::cross_entropy_loss(logits, target, {}, at::Reduction::Mean, options.ignore_index,
                                               options.label_smoothing),
                        target.numel());
    return Loss(
        at::cross_entropy_loss(logits, target, {}, at::Reduction::Sum, options.ignore_index, options.label_smoothing),
        target.ne(options.ignore_index).sum(), target.numel());
  } catch (const c10::Error& error) {
    detail::refuse_target(logits, target, error);
  }
}

/// How many rows of `logits` `[N, C]` have their largest entry at `target` `[N]`: a scalar tensor, for `step.record`.
inline at::Tensor correct(const at::Tensor& logits, const at::Tensor& target) {
  return logits.detach().argmax(1).eq(target).sum();
}

}  // namespace v0_1
}  // namespace treadle
