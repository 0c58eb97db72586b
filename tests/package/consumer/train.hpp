// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/linear.h>

#include <treadle/treadle.hpp>
#include <vector>

#include "one_torch.hpp"

namespace td = treadle;

struct LineImpl : torch::nn::Module {
  LineImpl() {
    torch::NoGradGuard no_grad;
    fc->weight.fill_(0.5);
    fc->bias.zero_();
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc->forward(x); }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(4, 1));
};
TORCH_MODULE(Line);

struct Rows {
  at::Tensor data;
  at::Tensor target;
};

struct SquaredError {
  at::Tensor operator()(LineImpl& line, const Rows& rows) const {
    return (line.forward(rows.data) - rows.target).square().mean();
  }
};

/// Trains a line for three steps from fixed numbers; returns the sum of its weights, which the same code
/// always gives.
inline double train() {
  Line line;
  td::Trainer trainer{line, SquaredError{}, td::optim::Sgd{.learning_rate = 0.1},
                      td::policies(td::parallelism::SingleDevice{.device = at::kCPU})};
  const Rows rows{at::arange(8, at::kFloat).view({2, 4}) / 8, at::ones({2, 1})};
  for (int step = 0; step < 3; ++step) trainer.accumulate(rows);
  return line->fc->weight.detach().sum().item<double>();
}
