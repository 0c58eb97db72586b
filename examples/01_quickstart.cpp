// SPDX-License-Identifier: Apache-2.0
// Trains a small CNN on Fashion-MNIST. Four epochs end at a test accuracy of 0.917 to 0.919.
// treadle-example: ARGS --epochs 1 TIMEOUT 300 PASS test accuracy: 0\.[89]
#include <torch/torch.h>
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

int main(int argc, char** argv) try {
  examples::Arguments arguments(argc, argv, "Trains a small CNN on Fashion-MNIST.");
  const auto epochs = arguments.integer("--epochs", 4, "passes over the training images");
  const auto batch_size = arguments.integer("--batch-size", 128, "images in a batch");
  const auto data = arguments.text("--data", TREADLE_FASHION_MNIST_DIR, "folder of the four IDX files");
  const auto seed = arguments.integer("--seed", 1, "seed of the weights and of the order of the images", 0);
  if (const auto code = arguments.finish()) return *code;

  td::data::TensorLoader train{td::data::fashion_mnist(data, td::data::Split::Train),
                               {.batch_size = batch_size, .shuffle = true, .seed = static_cast<std::uint64_t>(seed)}};
  td::data::TensorLoader test{td::data::fashion_mnist(data, td::data::Split::Test), {.batch_size = 1000}};

  torch::manual_seed(seed);
  using namespace torch::nn;
  Sequential net(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), ReLU(), MaxPool2d(2),
                 Conv2d(Conv2dOptions(16, 32, 3).padding(1)), ReLU(), MaxPool2d(2), Flatten(), Linear(32 * 7 * 7, 128),
                 ReLU(), Linear(128, 10));
  td::Trainer trainer{net, CrossEntropy{},
                      td::optim::AdamW{.learning_rate = 8e-3, .schedule = td::schedule::one_cycle()}, td::policies(),
                      td::observers(td::observe::ProgressBar{}, td::observe::MetricsFile{"metrics.csv"},
                                    td::observe::Curve{"curve.svg"}, td::observe::Table{})};
  const auto result = trainer.fit(train, test, {.epochs = epochs});
  return result.stop_reason == td::StopReason::Finished ? 0 : 1;
} catch (const std::exception& error) {
  td::warn(error.what());
  return 1;
}
