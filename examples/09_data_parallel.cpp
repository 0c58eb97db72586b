// SPDX-License-Identifier: Apache-2.0
// One process that trains on all of its GPUs, or on the CPU twice: each batch is dealt out by rows to copies of the
// model. A process a device (08_distributed.cpp) is faster; this needs no launcher.
// treadle-example: TIMEOUT 300 PASS loss 0\.0
#include <torch/torch.h>
#include <treadle/parallelism/data_parallel.hpp>
#include <treadle/treadle.hpp>

#include <cstdio>

namespace td = treadle;

struct NetImpl : torch::nn::Cloneable<NetImpl> {  // copies are made by clone(), which calls reset()
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(8, 64));
    last = register_module("last", torch::nn::Linear(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

struct SquaredError {
  auto operator()(NetImpl& net, const td::Batch& batch) const {
    return (net.forward(batch.data) - batch.target).square().mean();
  }
};

int main() {
  torch::manual_seed(1);
  const auto x = torch::randn({4096, 8});
  td::data::TensorLoader loader{td::Batch{x, x.narrow(1, 0, 4).sum(1, true).sin()},
                                {.batch_size = 64, .shuffle = true}};
  td::parallelism::DataParallel parallelism{};  // all GPUs
  if (!torch::cuda::is_available()) parallelism.devices = {at::kCPU, at::kCPU};
  td::Trainer trainer{Net(), SquaredError{}, td::optim::AdamW{.learning_rate = 5e-3}, td::policies(parallelism)};
  trainer.fit(loader, {.epochs = 20});
  const auto metrics = trainer.evaluate(loader);
  std::printf("loss %.4f\n", metrics["loss"]);
}
