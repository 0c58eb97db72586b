// SPDX-License-Identifier: Apache-2.0
// treadle-twin: ARGS --epochs 1 TIMEOUT 1200 TOLERANCE 100 NUMBERS test loss:|test accuracy:
// The twin of ../01_quickstart.cpp with the loop in LibTorch alone: the same model, order of images and schedule, and
// the same numbers. Only the reading of the images is shared.
#include <torch/torch.h>
#include <treadle/data/fashion_mnist.hpp>
#include <treadle/data/tensor_loader.hpp>

#include "../support/arguments.hpp"

/// The rate of step `step` of `total`: up to `peak` by a cosine, then down, as PyTorch's OneCycleLR.
double one_cycle(double peak, std::int64_t step, std::int64_t total) {
  const auto anneal = [](double from, double to, double share) {
    return to + (from - to) / 2 * (1 + std::cos(M_PI * share));
  };
  const double up = 0.3 * static_cast<double>(total) - 1, end = static_cast<double>(total) - 1;
  const auto now = static_cast<double>(step);
  if (now <= up) return anneal(peak / 25, peak, now / up);
  return anneal(peak, peak / 25 / 1e4, (now - up) / (end - up));
}

int main(int argc, char** argv) try {
  examples::Arguments arguments(argc, argv, "Trains a small CNN on Fashion-MNIST without Treadle's loop.");
  const auto epochs = arguments.integer("--epochs", 4, "passes over the training images");
  const auto batch_size = arguments.integer("--batch-size", 128, "images in a batch");
  const auto data = arguments.text("--data", TREADLE_FASHION_MNIST_DIR, "folder of the four IDX files");
  const auto seed = arguments.integer("--seed", 1, "seed of the weights and of the order of the images", 0);
  if (const auto code = arguments.finish()) return *code;

  using namespace treadle::data;
  TensorLoader train{fashion_mnist(data, Split::Train),
                     {.batch_size = batch_size, .shuffle = true, .seed = static_cast<std::uint64_t>(seed)}};
  TensorLoader test{fashion_mnist(data, Split::Test), {.batch_size = 1000}};

  const at::Device device = torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  torch::manual_seed(seed);
  using namespace torch::nn;
  Sequential net(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), ReLU(), MaxPool2d(2),
                 Conv2d(Conv2dOptions(16, 32, 3).padding(1)), ReLU(), MaxPool2d(2), Flatten(), Linear(32 * 7 * 7, 128),
                 ReLU(), Linear(128, 10));
  net->to(device);
  constexpr double peak = 8e-3;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(peak));
  const std::int64_t total = epochs * train.size();
  std::int64_t step = 0;
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (const auto& batch : train) {
      optimizer.param_groups()[0].options().set_lr(one_cycle(peak, step++, total));
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(net->forward(batch.data.to(device)), batch.target.to(device));
      loss.backward();
      optimizer.step();
    }
  }

  net->eval();
  const torch::NoGradGuard no_grad;
  double loss = 0, right = 0;
  for (const auto& batch : test) {
    const auto target = batch.target.to(device);
    const auto logits = net->forward(batch.data.to(device));
    loss += torch::cross_entropy_loss(logits, target, {}, torch::Reduction::Sum).item<double>();
    right += logits.argmax(1).eq(target).sum().item<double>();
  }
  const auto images = static_cast<double>(test.rows());
  std::printf("test loss: %.4f\ntest accuracy: %.4f\n", loss / images, right / images);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
