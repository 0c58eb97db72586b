// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <string>

#include "treadle/axis.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nonfinite {

/// From the first step with an inf or NaN in loss or gradient on, nothing changes any more, on the device;
/// `NonFiniteError` names step and micro-batch at the next log point (`Trainer::check()`), with the weights of before
/// that step.
///
/// Under `Fp16` an overflowed gradient is the loss scale's business and only skips its step; a non-finite loss stops.
struct Stop {
  using policy_axis = axis::NonFinite;
  static constexpr bool selects = true;
  static constexpr bool inspects_losses = true;

  bool check_every_step = false;  ///< read the verdict after each step: throws at once, costs a host synchronization

  bool operator==(const Stop&) const = default;
  void check() const {}

  class State;
};

class Stop::State {
 public:
  State(const Stop& policy, at::Device device)
      : policy_(policy),
        stopped_(at::zeros({}, at::device(device).dtype(at::kFloat))),
        step_(at::full({}, 0, stopped_.options().dtype(at::kLong))),
        micro_batch_(at::full({}, -1, step_.options())) {}

  /// Adds what earlier steps and this window's losses say to `found_inf`, and notes where it began.
  template <class Window, class Verdict>
  void judge(const Window& window, Verdict& verdict, bool loss_scale) {
    auto& found_inf = verdict.found_inf();
    if (window.empty()) {  // a window that counted nothing is skipped anyway, and is a step like any other
      step_.add_(stopped_.eq(0));
      return;
    }
    auto bad = at::isfinite(at::stack(window.losses())).logical_not();
    auto bad_loss = bad.any().to(at::kFloat);
    auto first = at::argmax(bad.to(at::kInt)).masked_fill(bad_loss.eq(0), -1);
    const auto elsewhere = window.bad_ranks();
    many_ranks_ = elsewhere.defined();
    if (many_ranks_) bad_loss = at::maximum(bad_loss, elsewhere.gt(0).to(at::kFloat));
    auto fatal = loss_scale ? bad_loss : at::maximum(bad_loss, found_inf);
    if (!loss_scale && window.counts_on_device())  // a window that counted nothing is skipped, and nothing is wrong
      fatal = at::where(window.total_count().le(0), bad_loss, fatal);
    auto before = stopped_.ne(0);
    micro_batch_.copy_(at::where(before, micro_batch_, first));
    stopped_.copy_(at::maximum(stopped_, fatal));
    step_.add_(stopped_.eq(0));  // stands still at the first bad step
    if (loss_scale) verdict.freeze(stopped_);
    found_inf.copy_(at::maximum(at::maximum(found_inf, bad_loss), stopped_));
    if (policy_.check_every_step) report();
  }

  /// Reads the verdict and throws `NonFiniteError` if training has stopped.
  void report() const {
    if (stopped_.item<float>() == 0) return;       // sync: only at log points, or where check_every_step asks for it
    const auto step = step_.item<std::int64_t>();  // sync: training is over
    const auto micro_batch = micro_batch_.item<std::int64_t>();  // sync: training is over
    throw NonFiniteError("nonfinite::Stop: step " + std::to_string(step) +
                             (micro_batch >= 0 ? " has a non-finite loss in micro-batch " + std::to_string(micro_batch)
                              : many_ranks_    ? " has a non-finite gradient, or another rank a non-finite loss"
                                               : std::string(" has a non-finite gradient")) +
                             " (counted from 0 over the trainer's life); the weights are those from before it. Look at "
                             "that batch, lower the learning rate, or "
                             "use nonfinite::Skip to go on without such steps.",
                         step, micro_batch);
  }

  template <class Visitor>
  void for_each_state(Visitor&& visit) {
    visit("stopped", stopped_);
    visit("stopped_step", step_);
    visit("stopped_micro_batch", micro_batch_);
  }

 private:
  Stop policy_;
  at::Tensor stopped_;
  at::Tensor step_;
  at::Tensor micro_batch_;
  bool many_ranks_ = false;
};

}  // namespace nonfinite
}  // namespace v0_1
}  // namespace treadle
