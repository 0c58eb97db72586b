// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_fused_sgd.h>

#include <string>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/runtime/runs.hpp"
#include "treadle/runtime/sum_dtype.hpp"

namespace treadle {
inline namespace v0_1 {
namespace averaging {

/// An exponential moving average of the weights (their fp32 masters where there are some): average = decay x average +
/// (1 - decay) x weight after each applied step, starting from the first weights.
///
/// `evaluate` and `predict` use the average unless they are told not to. Buffers are not averaged: the average is
/// evaluated with the model's own.
struct ExponentialAverage {
  using policy_axis = axis::Averaging;
  static constexpr bool averages = true;

  double decay = 0.999;

  bool operator==(const ExponentialAverage&) const = default;
  void check() const {
    if (!(decay >= 0 && decay < 1))
      throw ConfigError("averaging::ExponentialAverage: decay must lie in [0, 1), such as 0.999.");
  }

  class State {
   public:
    State(const ExponentialAverage& policy, const ParameterList& parameters) : weight_(1 - policy.decay) {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> weights;
      std::vector<const std::string*> names;
      for (const auto& parameter : parameters) {
        if (!parameter.model.requires_grad()) continue;
        weights.push_back(parameter.master.detach());
        names.push_back(&parameter.name);
      }
      for (const auto i : detail::order_by_place(weights)) {
        names_.push_back(*names[i]);
        weights_.push_back(weights[i]);
        averages_.push_back(weights[i].to(wide(weights[i].scalar_type()), /*non_blocking=*/false, /*copy=*/true));
      }
      runs_ = detail::runs_of(weights_);
    }

    /// Takes the new weights in, or leaves the average alone where `found_inf` (may be null) is 1.
    ///
    /// The skip is selected inside ATen's fused SGD, which computes the same numbers as lerp: with decay 1 and gradient
    /// `-weight` its step is average - (1 - decay) x (average - weight). A lerp with weight 0 would turn NaN into NaN.
    void update(const at::Tensor* found_inf) {
      for (const auto& [begin, end] : runs_) {
        const auto into = detail::slice(averages_, begin, end);
        const auto from = detail::slice(weights_, begin, end);
        if (into[0].scalar_type() == from[0].scalar_type())
          move(into, from, found_inf);
        else
          move(into, widened(from, into[0].scalar_type()), found_inf);
      }
    }

    /// Writes the average into the weights, by value, so that every address stays; `use_weights` undoes it.
    void use_average() {
      const at::NoGradGuard no_grad;
      if (depth_ == 0) {  // else an evaluation within an evaluation
        std::vector<at::Tensor> saved;
        for (const auto& weight : weights_) saved.push_back(weight.clone());  // what can run out of memory comes first
        saved_ = std::move(saved);
        for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i].copy_(averages_[i]);
      }
      ++depth_;
    }
    void use_weights() {
      const at::NoGradGuard no_grad;
      if (depth_ == 0 || --depth_ > 0) return;
      for (std::size_t i = 0; i < saved_.size(); ++i) weights_[i].copy_(saved_[i]);
      saved_.clear();
    }

    template <class Visitor>
    void for_each_state(Visitor&& visit) {
      for (std::size_t i = 0; i < averages_.size(); ++i) visit(names_[i], averages_[i]);
    }

   private:
    void move(at::TensorList into, at::TensorList from, const at::Tensor* found_inf) const {
      if (!found_inf)
        at::_foreach_lerp_(into, from, weight_);
      else
        at::_fused_sgd_(into, from, {}, /*weight_decay=*/1.0, /*momentum=*/0.0, /*lr=*/weight_,
                        /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/true, /*is_first_step=*/false, {},
                        *found_inf);
    }
    static std::vector<at::Tensor> widened(at::TensorList tensors, at::ScalarType dtype) {
      std::vector<at::Tensor> wide;
      for (const auto& tensor : tensors) wide.push_back(tensor.to(dtype));
      return wide;
    }

    // A bf16 average at 0.999 never moves, so averages of low-precision weights are fp32.
    static at::ScalarType wide(at::ScalarType dtype) { return detail::is_narrow(dtype) ? at::kFloat : dtype; }

    double weight_;
    std::vector<std::string> names_;
    std::vector<at::Tensor> weights_;
    std::vector<at::Tensor> averages_;
    std::vector<std::pair<std::size_t, std::size_t>> runs_;  // of one device and dtype, a fused call each
    std::vector<at::Tensor> saved_;
    int depth_ = 0;
  };
};

}  // namespace averaging
}  // namespace v0_1
}  // namespace treadle
