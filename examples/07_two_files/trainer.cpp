// SPDX-License-Identifier: Apache-2.0
#include "trainer.hpp"

#include <torch/nn/functional/loss.h>

NetImpl::NetImpl()
    : hidden(register_module("hidden", torch::nn::Linear(4, 16))),
      output(register_module("output", torch::nn::Linear(16, 1))) {}
at::Tensor NetImpl::forward(const at::Tensor& x) {
  return output(torch::tanh(hidden(x)));
}

at::Tensor SquaredError::operator()(NetImpl& net, const td::Batch& batch) const {
  return torch::nn::functional::mse_loss(net.forward(batch.data), batch.target);
}

template class td::Trainer<NetImpl, SquaredError, td::optim::AdamW,
                           td::Policies<td::accumulation::AccumulateOver, td::clipping::ClipNorm>>;

std::unique_ptr<NetTrainer> make_trainer(Net net, std::int64_t window) {
  return std::make_unique<NetTrainer>(
      std::move(net), SquaredError{}, td::optim::AdamW{.learning_rate = 1e-2},
      td::policies(td::accumulation::AccumulateOver{.batches = window}, td::clipping::ClipNorm{}));
}
std::optional<td::StepResult> accumulate(NetTrainer& trainer, const td::Batch& batch) {
  return trainer.accumulate(batch);
}
td::FitResult fit(NetTrainer& trainer, const std::vector<td::Batch>& batches, const td::FitOptions& options) {
  return trainer.fit(batches, options);
}
