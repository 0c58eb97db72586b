// SPDX-License-Identifier: Apache-2.0
// Switching strategy is one word: one function template, and a set of policies for each way to train.
// treadle-example: TIMEOUT 300 PASS defaults +0\.[78].*Bf16 +0\.[78].*ClipNorm +0\.[78].*Average\(0\.99\) +0\.[78]
#include <torch/torch.h>
#include <treadle/compare/describe.hpp>
#include <treadle/data/fashion_mnist.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/treadle.hpp>

#include "support/arguments.hpp"

namespace td = treadle;

struct CrossEntropy {
  auto operator()(auto& net, const td::Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};

/// Each set of policies makes a loop of its own, in which the compiler sees all of it.
template <class Policies>
void train(const td::Batch& images, const Policies& policies) {
  torch::manual_seed(1);
  using namespace torch::nn;
  Sequential net(Flatten(), Linear(784, 64), ReLU(), Linear(64, 10));
  td::data::TensorLoader train{td::slice_rows(images, 0, 10'000), {.batch_size = 64, .shuffle = true}};
  td::data::TensorLoader test{td::slice_rows(images, 10'000, 15'000), {.batch_size = 1000}};
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 2e-3}, policies};
  const auto result = trainer.fit(train, test, {.epochs = 2});
  std::printf("%-32s %.4f\n", td::describe(policies).c_str(), result.test()["accuracy"]);
}

int main(int argc, char** argv) try {
  examples::Arguments arguments(argc, argv, "Trains a small network on images in several ways.");
  const auto strategy = arguments.text("--strategy", "all", "plain, bf16, windows, average or all");
  const auto data = arguments.text("--data", TREADLE_FASHION_MNIST_DIR, "folder of the four IDX files");
  if (const auto code = arguments.finish()) return *code;
  const td::Batch images = td::data::fashion_mnist(data);
  // A choice at run time is a choice between instantiations.
  const auto chosen = [&](const char* name) { return strategy == name || strategy == "all"; };
  if (chosen("plain")) train(images, td::policies());
  if (chosen("bf16")) train(images, td::policies(td::precision::Bf16{}));
  if (chosen("windows"))
    train(images, td::policies(td::accumulation::AccumulateOver{.batches = 2}, td::clipping::ClipNorm{}));
  if (chosen("average"))
    train(images, td::policies(td::averaging::ExponentialAverage{.decay = 0.99}, td::nonfinite::Skip{}));
  return 0;
} catch (const std::exception& error) {
  td::warn(error.what());
  return 1;
}
