// SPDX-License-Identifier: Apache-2.0
// What Treadle asks of an objective.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "treadle/batch.hpp"
#include "treadle/loss.hpp"

namespace treadle {
inline namespace v0_1 {

/// A plain function as an objective: `td::fn<loss>{}`, so that the call is known at compile time.
template <auto Function>
struct fn {
  template <class... Args>
  requires std::invocable<decltype(Function), Args...>
  decltype(auto) operator()(Args&&... args) const { return std::invoke(Function, std::forward<Args>(args)...); }
};

namespace detail {

template <class Objective, class Model, class Batch, class Context>
inline constexpr bool takes_context = std::invocable<Objective&, Model&, const Batch&, Context&>;
template <class Objective, class Model, class Batch>
inline constexpr bool takes_batch = std::invocable<Objective&, Model&, const Batch&>;

/// What `call` returns, as a `Loss`.
template <class Batch, class Call>
Loss as_loss(const Batch& batch, Call&& call) {
  using Result = std::remove_cvref_t<decltype(call())>;
  static_assert(
      std::same_as<Result, Loss> || std::same_as<Result, at::Tensor>,
      "treadle::Trainer: the objective must return a treadle::Loss (a sum and its count) or a tensor (the mean "
      "over the batch's rows).");
  if constexpr (std::same_as<Result, Loss>)
    return call();
  else
    return Loss::mean(call(), treadle::rows(batch));
}

/// Stands for any lvalue, to find out which parameter an objective does not take.
struct Anything {
  template <class T>
  operator T&() const;
};
template <class Objective, class Model, class Batch, class Context>
inline constexpr bool takes =
    std::invocable<Objective&, Model, Batch> || std::invocable<Objective&, Model, Batch, Context&>;
template <class Objective, class Model, class Batch, class Context>
inline constexpr bool takes_context_by_value = requires(Objective& objective, Model& model, const Batch& batch,
                                                        Context (&made)()) {
  objective(model, batch, made());
};

template <class>
inline constexpr bool never = false;

/// Why an objective cannot be called with this model and batch, in the most specific sentence that fits.
template <class Objective, class Model, class Batch, class Context>
consteval void check_objective() {
  // One after the other: each probe may instantiate the body of a generic objective.
  if constexpr (!takes<Objective, Model&, const Batch&, Context>) {
    if constexpr (takes_context_by_value<Objective, Model, Batch, Context>)
      static_assert(never<Objective>,
                    "treadle::Trainer: the objective takes the step context by value, which would be a copy; let its "
                    "third parameter be auto& step.");
    else if constexpr (takes<Objective, Model&, Batch&, Context>)
      static_assert(never<Objective>,
                    "treadle::Trainer: the objective takes the batch by non-const reference; a batch is not its to "
                    "change, so let its second parameter be const Batch&.");
    else if constexpr (takes<Objective, Model&, Anything, Context>)
      static_assert(never<Objective>,
                    "treadle::Trainer: the objective takes another type of batch than the loader gives; let its second "
                    "parameter be a const reference to what iterating over the loader yields.");
    else if constexpr (takes<Objective, Anything, const Batch&, Context>)
      static_assert(never<Objective>,
                    "treadle::Trainer: the objective takes another type of model than the trainer has; let its first "
                    "parameter be a reference to the model itself, which for a module holder Net is NetImpl&.");
    else
      static_assert(
          never<Objective>,
          "treadle::Trainer: the objective cannot be called as objective(model, batch) nor as objective(model, "
          "batch, step) with this model and batch type; its parameters must be (Model&, const Batch&) or (Model&, "
          "const Batch&, auto& step).");
  }
}

/// The objective's loss. A plain tensor is taken as the mean over the batch's rows.
template <class Objective, class Model, class Batch, class Context>
Loss call_objective(Objective& objective, Model& model, const Batch& batch, Context& context) {
  constexpr bool with_context = takes_context<Objective, Model, Batch, Context>;
  check_objective<Objective, Model, Batch, Context>();
  if constexpr (with_context)
    return as_loss(batch, [&]() -> decltype(auto) { return objective(model, batch, context); });
  else if constexpr (takes_batch<Objective, Model, Batch>)
    return as_loss(batch, [&]() -> decltype(auto) { return objective(model, batch); });
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
