// SPDX-License-Identifier: Apache-2.0
// Stages 1 to 4 of a step, from a micro-batch to its gradients, which the parallelism policy calls in their order.
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/batch.hpp"
#include "treadle/detail/checks.hpp"
#include "treadle/loss.hpp"
#include "treadle/objective.hpp"
#include "treadle/runtime/verdict.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

template <class Trainer>
class TrainerState;  // in snapshot/trainer_state.hpp

template <class Trainer>
struct Stages {
  Trainer& trainer;

  /// The loss of a batch, or of its shard on one replica, under the precision's guard.
  template <class Model, class B, class Context>
  [[gnu::always_inline]] Loss forward(Model& model, const B& batch, Context& context) const {
    const auto objective = [&]() __attribute__((always_inline)) {
      [[maybe_unused]] const auto cast = trainer.precision_.autocast();
      [[maybe_unused]] const auto pass = trainer.checkpointing_.pass(model);
      return call_objective(trainer.objective_, model, batch, context);
    };
    return treadle::rows(batch) == 0 ? Loss::mean({}, 0) : objective();
  }

  /// Counts the loss of a micro-batch.
  template <class B>
  [[gnu::always_inline]] Weight weigh(const Loss& loss, const B& batch) const {
    const bool plain = is_plain_loss(loss.value) || check_loss(loss.value);
    const auto rows = [&] { return treadle::rows(batch); };
    return {trainer.window_.add(loss, rows,
                                [&](double count) { return trainer.parallelism_.agree(count, "the nominal count"); }),
            plain};
  }

  /// In place of `weigh` and `backward` where there is nothing to count.
  void skip() const {
    trainer.window_.add_nothing([&](double count) { return trainer.parallelism_.agree(count, "the nominal count"); });
  }

  /// What this rank tells the others of its window: `Window::share`.
  at::Tensor share() const { return trainer.window_.share(); }

  /// The backward pass, outside the precision's guard, from the weight times the loss scale.
  [[gnu::always_inline]] void backward(const at::Tensor& value, Weight weight) const {
    const at::Tensor* scale = loss_scale_of<Trainer::Precision::scales_loss>(trainer.precision_);
    detail::backward(value, weight.plain, trainer.window_.seed(weight.factor, scale), weight.factor);
  }

  /// In place of `backward` for a policy that runs the passes of several losses as one; the seed is the caller's own.
  Root root(const at::Tensor& value, Weight weight) const {
    const at::Tensor* scale = loss_scale_of<Trainer::Precision::scales_loss>(trainer.precision_);
    return root_of(value, trainer.window_.seed(weight.factor, scale)->clone(), weight.factor);
  }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
