// SPDX-License-Identifier: Apache-2.0
// What the documentation's fragments take for granted: a model, data, an objective, and the alias td.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <treadle/treadle.hpp>
#include <utility>
#include <vector>

namespace td = treadle;

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return fc->forward(x.flatten(1)); }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(784, 10));
};
TORCH_MODULE(Net);

using Batch = td::Batch;

struct CrossEntropy {
  auto operator()(NetImpl& net, const Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data);
    step.record("accuracy", logits.argmax(1).eq(batch.target).sum(), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};

/// The parameters of every fragment of statements.
#define TREADLE_DOC_PARAMETERS                                                \
  [[maybe_unused]] Net net, [[maybe_unused]] std::vector<Batch>&train_loader, \
      [[maybe_unused]] std::vector<Batch>&test_loader, [[maybe_unused]] const Batch &batch
