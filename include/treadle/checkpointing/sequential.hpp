// SPDX-License-Identifier: Apache-2.0
// torch::nn::Sequential, each element of which is a block to checkpoint.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <optional>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// A `torch::nn::Sequential` whose `forward(x, step)` passes each element through `step.checkpoint`; without `step` it
/// is the plain one. Each element takes a tensor and gives one.
class SequentialImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::forward;
  using torch::nn::SequentialImpl::SequentialImpl;

  template <class Step>
  requires requires(Step& step) { step.checkpoint; }
  at::Tensor forward(at::Tensor x, Step& step) {
    for (auto& element : *this) x = step.checkpoint(Element{element}, x);
    return x;
  }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<SequentialImpl>();
    for (const auto& element : *this) copy->push_back(element.clone(device));
    return copy;
  }

 private:
  struct Element {
    torch::nn::AnyModule module;
    at::Tensor operator()(const at::Tensor& x) { return module.forward(x); }
    torch::nn::Module* checkpointed_module() const { return module.ptr().get(); }
  };
};

/// Holder of `SequentialImpl`.
class Sequential : public torch::nn::ModuleHolder<SequentialImpl> {
 public:
  using torch::nn::ModuleHolder<SequentialImpl>::ModuleHolder;
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
