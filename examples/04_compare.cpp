// SPDX-License-Identifier: Apache-2.0
// Which policies pay for this model on this machine? Losses are checked before anything is timed.
// treadle-example: TIMEOUT 120 PASS baseline.*Bf16 +agree.*SplitBatch\(4\) +agree.*AccumulateOver\(4\) +agree
#include <torch/torch.h>
#include <treadle/compare.hpp>
#include <treadle/treadle.hpp>

namespace td = treadle;

struct CrossEntropy {
  auto operator()(auto& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

int main() try {
  std::vector<td::Batch> batches;
  for (int i = 0; i < 8; ++i) batches.push_back({torch::randn({256, 64}), torch::randint(10, {256})});

  // A new model at each call; `compare` sets the seed before it.
  const auto make_trainer = [](const auto& policies) {
    using namespace torch::nn;
    return td::Trainer{Sequential(Linear(64, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 10)), CrossEntropy{},
                       td::optim::AdamW{}, policies};
  };
  using td::accumulation::AccumulateOver, td::accumulation::SplitBatch, td::precision::Bf16;
  td::compare(make_trainer, batches, {}, td::policies(), td::policies(Bf16{}),
              td::policies(SplitBatch{.micro_batches = 4}), td::policies(Bf16{}, AccumulateOver{.batches = 4}));
} catch (const std::exception& error) {
  td::warn(error.what());
  return 1;
}
