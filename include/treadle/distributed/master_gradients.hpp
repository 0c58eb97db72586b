// SPDX-License-Identifier: Apache-2.0
// Gradients of low-precision weights, accumulated and reduced in fp32 on their masters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Makes backward passes accumulate on the masters instead of on the weights, inside the pass, so that the Reducer,
/// which refuses fp32 gradients on bf16 parameters and watches the masters instead, still overlaps with it.
class MasterGradients {
 public:
  explicit MasterGradients(const ParameterList& parameters) {
    for (const auto& parameter : parameters) {
      if (!parameter.model.requires_grad() || parameter.master.is_same(parameter.model)) continue;
      at::Tensor master = parameter.master;
      master.set_requires_grad(true);
      torch::autograd::impl::set_post_acc_grad_hooks(parameter.model, std::make_unique<Hook>(master));
      weights_.push_back(parameter.model);
      masters_.push_back(std::move(master));
    }
  }
  MasterGradients(const MasterGradients&) = delete;
  MasterGradients& operator=(const MasterGradients&) = delete;
  ~MasterGradients() {
    for (const auto& weight : weights_) torch::autograd::impl::set_post_acc_grad_hooks(weight, nullptr);
  }

  /// Graphs in which a search finds the parameters that `root` depends on, with a master in place of its weight.
  std::vector<at::Tensor> graphs_of(const at::Tensor& root) const {
    std::vector<at::Tensor> graphs{root};
    if (weights_.empty()) return graphs;
    std::unordered_set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> queue{root.grad_fn().get()};
    while (!queue.empty()) {
      auto* node = queue.back();
      queue.pop_back();
      if (node == nullptr || !seen.insert(node).second) continue;
      for (const auto& edge : node->next_edges()) queue.push_back(edge.function.get());
    }
    const at::AutoGradMode with_grad(true);
    for (std::size_t i = 0; i < weights_.size(); ++i)
      if (seen.contains(torch::autograd::impl::grad_accumulator(weights_[i]).get()))
        graphs.push_back(masters_[i].view_as(masters_[i]));
    return graphs;
  }

  /// Moves the masters' gradients to where the rule looks for them.
  void hand_over() const {
    for (std::size_t i = 0; i < weights_.size(); ++i)
      if (masters_[i].grad().defined()) weights_[i].mutable_grad() = std::move(masters_[i].mutable_grad());
  }
  void drop() const {
    for (const auto& master : masters_) master.mutable_grad().reset();
  }

 private:
  struct Hook : torch::autograd::PostAccumulateGradHook {
    explicit Hook(const at::Tensor& master)
        : accumulator(torch::autograd::impl::grad_accumulator(torch::autograd::Variable(master))) {}
    void operator()(const at::Tensor& weight) override {
      const at::Tensor gradient = std::move(weight.mutable_grad());
      torch::autograd::variable_list given{gradient.to(at::kFloat)};
      (*accumulator)(torch::autograd::variable_list(given));
      // The engine calls these for nodes that it runs itself; the Reducer's is among them.
      for (const auto& hook : accumulator->post_hooks()) (*hook)({}, given);
    }
    std::shared_ptr<torch::autograd::Node> accumulator;
  };

  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> masters_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
