// SPDX-License-Identifier: Apache-2.0
// The trainer's type is speakable, so other files can name it, and only trainer.cpp compiles its loop.
#pragma once

#include <torch/nn.h>
#include <treadle/treadle.hpp>

namespace td = treadle;

struct NetImpl : torch::nn::Module {
  NetImpl();
  at::Tensor forward(const at::Tensor& x);
  torch::nn::Linear hidden, output;
};
TORCH_MODULE(Net);

struct SquaredError {
  at::Tensor operator()(NetImpl& net, const td::Batch& batch) const;
};

using NetTrainer = td::Trainer<NetImpl, SquaredError, td::optim::AdamW,
                               td::Policies<td::accumulation::AccumulateOver, td::clipping::ClipNorm>>;
extern template class td::Trainer<NetImpl, SquaredError, td::optim::AdamW,
                                  td::Policies<td::accumulation::AccumulateOver, td::clipping::ClipNorm>>;

/// A trainer that steps every `window` batches.
std::unique_ptr<NetTrainer> make_trainer(Net net, std::int64_t window);
/// Members that are templates of their batch or loader get a function each, for the types that this program uses.
std::optional<td::StepResult> accumulate(NetTrainer& trainer, const td::Batch& batch);
td::FitResult fit(NetTrainer& trainer, const std::vector<td::Batch>& batches, const td::FitOptions& options);
