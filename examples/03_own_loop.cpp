// SPDX-License-Identifier: Apache-2.0
// A loop of one's own around the trainer, over batches of one's own type: four batches make a step, and the shorter
// window at the end of an epoch weighs what it holds. plain/03_own_loop_plain.cpp is the same in LibTorch alone.
// treadle-example: TIMEOUT 120 PASS epoch 5: 20 steps, loss 0\.[89]
#include <torch/torch.h>
#include <treadle/treadle.hpp>

namespace td = treadle;

/// Any aggregate of tensors is a batch.
struct Ratings {
  at::Tensor user, item, stars;
};

struct FactorsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& user, const at::Tensor& item) { return (users(user) * items(item)).sum(1); }
  torch::nn::Embedding users = register_module("users", torch::nn::Embedding(100, 8));
  torch::nn::Embedding items = register_module("items", torch::nn::Embedding(80, 8));
};
TORCH_MODULE(Factors);

struct SquaredError {
  td::Loss operator()(FactorsImpl& net, const Ratings& batch) const {
    const auto errors = net.forward(batch.user, batch.item) - batch.stars;
    return {errors.square().sum(), batch.stars.numel()};  // a sum and its count: windows of any size come out right
  }
};

std::vector<Ratings> make_batches() {
  const auto user = torch::randint(100, {5000}), item = torch::randint(80, {5000});
  const auto stars = (torch::randn({100, 3}).index({user}) * torch::randn({80, 3}).index({item})).sum(1);
  std::vector<Ratings> batches;
  for (std::int64_t i = 0; i < 5000; i += 64)
    batches.push_back({user.slice(0, i, i + 64), item.slice(0, i, i + 64), stars.slice(0, i, i + 64)});
  return batches;
}

int main() {
  torch::manual_seed(1);
  const auto batches = make_batches();
  td::Trainer trainer{Factors(), SquaredError{}, td::optim::AdamW{.learning_rate = 0.05},
                      td::policies(td::accumulation::AccumulateOver{.batches = 4})};
  for (int epoch = 1; epoch <= 5; ++epoch) {
    at::Tensor sum = torch::zeros({}, trainer.device());  // nothing is read before the epoch ends
    double count = 0;
    int steps = 0;
    const auto note = [&](const td::StepResult& done) {
      sum += done.loss * done.count;
      count += done.count;
      ++steps;
    };
    for (const auto& batch : batches)
      if (const auto done = trainer.accumulate(batch)) note(*done);
    if (const auto done = trainer.flush()) note(*done);
    std::printf("epoch %d: %d steps, loss %.4f\n", epoch, steps, sum.item<double>() / count);
  }
}
