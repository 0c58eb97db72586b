// SPDX-License-Identifier: Apache-2.0
// A model of blocks with dropout, batch norm, a tied weight, a frozen one, and work outside of them.
#pragma once

#include <string>
#include <vector>

#include "support/tiny.hpp"

namespace treadle_test {

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : fc(register_module("fc", torch::nn::Linear(12, 16))),
        batch_norm(register_module("batch_norm", torch::nn::BatchNorm1d(16))),
        proj(register_module("proj", torch::nn::Linear(16, 12))),
        dropout(register_module("dropout", torch::nn::Dropout(0.1))) {}
  at::Tensor forward(const at::Tensor& x) { return x + dropout(proj(torch::gelu(batch_norm(fc(x))))); }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d batch_norm;
  torch::nn::Linear proj;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Block);

struct BlockNetImpl : torch::nn::Module {
  BlockNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 12))),
        batch_norm(register_module("batch_norm", torch::nn::BatchNorm1d(12))),
        between(register_module("between", torch::nn::BatchNorm1d(12))),
        last(register_module("last", torch::nn::Linear(12, 5))) {
    for (int i = 0; i < 5; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block()));
    blocks[2]->proj->weight.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x, auto& step) {
    auto y = at::dropout(batch_norm(first(x)), 0.1, is_training());
    for (auto& block : blocks) {
      y = step.checkpoint(block, y);
      // Marked regions, one after the other, with chance and statistics in them.
      y = step.checkpoint.cheap("norm", between, y);
      y = step.checkpoint.cheap(
          "gelu", [](const at::Tensor& z) { return at::dropout(at::gelu(z), 0.1, true); }, y);
    }
    y = step.checkpoint([w = first->weight](const at::Tensor& z) { return at::linear(z, w.matmul(w.t())); }, y);
    y = step.checkpoint(blocks[1], y);  // once more
    return last(at::dropout(y, 0.1, is_training()));
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d batch_norm;
  torch::nn::BatchNorm1d between;
  torch::nn::Linear last;
  std::vector<Block> blocks;
};
TORCH_MODULE(BlockNet);

/// Mean cross entropy, with values recorded within a block and outside.
struct BlockEntropy {
  td::Loss operator()(auto& net, const td::Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data, step);
    logits = step.checkpoint(
        [&step](const at::Tensor& x) {
          step.record("mean", x.mean(), 1);
          step.record("one", 1.0, 1);
          return x * 1.5;
        },
        logits);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};

/// Everything that training leaves behind, generators and reported values included.
template <class Trainer>
State left_by(Trainer& trainer, const std::vector<td::Batch>& batches) {
  reseed(7);
  State values;
  std::int64_t i = 0;
  const auto take = [&](const td::StepResult& result) {
    const auto prefix = "step" + std::to_string(i++) + "/";
    values[prefix + "loss"] = result.loss.clone();
    for (const auto& record : result.records) {
      values[prefix + std::string(record.name)] = record.sum.clone();
      values[prefix + std::string(record.name) + "/count"] = at::full({}, record.count);
    }
  };
  for (const auto& batch : batches)
    if (auto done = trainer.accumulate(batch)) take(*done);
  if (auto done = trainer.flush()) take(*done);
  auto all = everything(trainer);
  all.merge(values);
  all["random"] = at::rand({4});
  all["random/device"] = at::rand({4}, at::TensorOptions().device(device()));
  return all;
}

}  // namespace treadle_test
