// SPDX-License-Identifier: Apache-2.0
// The parameters and buffers of one trainer, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// One named parameter.
struct Parameter {
  std::string name;
  /// What the model computes with and autograd differentiates.
  at::Tensor model;
  /// What the rule updates: `model` itself, or its fp32 master.
  at::Tensor master;
};

/// One named buffer.
struct Buffer {
  std::string name;
  at::Tensor tensor;
};

/// The buffers of a model, each tensor once, in the model's order.
using BufferList = std::vector<Buffer>;

/// The parameters of a model, each tensor once, in the model's order, with the device they live on.
class ParameterList {
 public:
  ParameterList(std::vector<Parameter> parameters, at::Device device)
      : parameters_(std::move(parameters)), device_(device) {
    for (const auto& parameter : parameters_) gradients_.push_back(&parameter.model.mutable_grad());
  }

  at::Device device() const { return device_; }
  std::size_t size() const { return parameters_.size(); }
  auto begin() { return parameters_.begin(); }
  auto end() { return parameters_.end(); }
  auto begin() const { return parameters_.begin(); }
  auto end() const { return parameters_.end(); }
  Parameter& operator[](std::size_t i) { return parameters_[i]; }
  const Parameter& operator[](std::size_t i) const { return parameters_[i]; }

  /// Where autograd puts the gradient of each parameter's `model`. A leaf keeps one place for it all its life, which
  /// `mutable_grad()` finds anew by virtual calls.
  const std::vector<at::Tensor*>& gradients() const { return gradients_; }

  bool any_of_one_element() const {
    return std::ranges::any_of(parameters_, [](const auto& parameter) { return parameter.model.numel() == 1; });
  }
  /// Releases every gradient, so that the next backward pass writes instead of adding.
  [[gnu::always_inline]] void release_gradients() const {
    for (at::Tensor* gradient : gradients_)
      if (gradient->defined()) [[unlikely]]
        gradient->reset();
  }

 private:
  std::vector<Parameter> parameters_;
  std::vector<at::Tensor*> gradients_;
  at::Device device_;
};

}  // namespace v0_1
}  // namespace treadle
