// SPDX-License-Identifier: Apache-2.0
// parallelism::DataParallel over two replicas on one device, against a hand-written loop that runs the same two
// replicas one after the other: what the policy itself costs. Prints one table.
//   benchmark_data_parallel [--device cpu|cuda] [--blocks N] [--threads N]
#include <ATen/Context.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <treadle/parallelism/data_parallel.hpp>
#include <treadle/treadle.hpp>

#include "median.hpp"

namespace td = treadle;
using at::Tensor;

struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  MlpImpl(std::int64_t inputs, std::int64_t width) : inputs(inputs), width(width) { reset(); }
  void reset() override {
    hidden = register_module("hidden", torch::nn::Linear(inputs, width));
    middle = register_module("middle", torch::nn::Linear(width, width));
    output = register_module("output", torch::nn::Linear(width, 10));
  }
  Tensor forward(const Tensor& x) { return output(torch::relu(middle(torch::relu(hidden(x))))); }
  std::int64_t inputs, width;
  torch::nn::Linear hidden{nullptr}, middle{nullptr}, output{nullptr};
};
TORCH_MODULE(Mlp);

/// A small CNN with batch norm, so that there are buffers.
struct CnnImpl : torch::nn::Cloneable<CnnImpl> {
  CnnImpl() { reset(); }
  void reset() override {
    using torch::nn::Conv2dOptions;
    first = register_module("first", torch::nn::Conv2d(Conv2dOptions(1, 16, 3).padding(1).bias(false)));
    first_norm = register_module("first_norm", torch::nn::BatchNorm2d(16));
    second = register_module("second", torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1).bias(false)));
    second_norm = register_module("second_norm", torch::nn::BatchNorm2d(32));
    output = register_module("output", torch::nn::Linear(32 * 7 * 7, 10));
  }
  Tensor forward(const Tensor& x) {
    auto y = torch::max_pool2d(torch::relu(first_norm(first(x))), 2);
    y = torch::max_pool2d(torch::relu(second_norm(second(y))), 2);
    return output(y.flatten(1));
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d first_norm{nullptr}, second_norm{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Cnn);

struct CrossEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

/// Two replicas by hand: shared weights, gradients and statistics of their own, the first one's statistics for both.
template <class Net>
class Hand {
 public:
  explicit Hand(Net given) : nets_{given, Net(std::dynamic_pointer_cast<typename Net::ContainedType>(given->clone()))} {
    const at::NoGradGuard no_grad;
    for (std::size_t r = 0; r < 2; ++r) {
      parameters_[r] = nets_[r]->parameters();
      buffers_[r] = nets_[r]->buffers();
    }
    for (std::size_t i = 0; i < parameters_[0].size(); ++i) {
      parameters_[1][i].set_data(parameters_[0][i].detach());
      weights_.push_back(parameters_[0][i].detach());
      exp_avg_.push_back(torch::zeros_like(weights_[i]));
      exp_avg_sq_.push_back(torch::zeros_like(weights_[i]));
    }
    const auto options = weights_[0].options();
    step_ = torch::zeros({}, options);
    steps_.assign(weights_.size(), step_);
    rate_ = torch::full({}, 1e-3, options);
    two_ = torch::full({}, 2.0, options);
  }
  Tensor step(const td::Batch& batch) {
    if (!buffers_[0].empty()) {
      const at::NoGradGuard no_grad;
      at::_foreach_copy_(buffers_[1], buffers_[0]);
    }
    Tensor total;
    const std::int64_t half = batch.data.size(0) / 2;
    for (std::size_t r = 0; r < 2; ++r) {
      const auto begin = static_cast<std::int64_t>(r) * half;
      const auto loss = at::cross_entropy_loss(nets_[r]->forward(batch.data.narrow(0, begin, half)),
                                               batch.target.narrow(0, begin, half));
      loss.backward();
      const Tensor value(loss.tensor_data());
      total = r == 0 ? value : at::add(total, value);
    }
    const at::NoGradGuard no_grad;
    std::vector<Tensor> gradients[2];
    for (std::size_t r = 0; r < 2; ++r)
      for (const auto& parameter : parameters_[r]) gradients[r].push_back(std::exchange(parameter.mutable_grad(), {}));
    at::_foreach_add_(gradients[0], gradients[1]);
    step_.add_(1);
    at::_fused_adamw_(weights_, gradients[0], exp_avg_, exp_avg_sq_, {}, steps_, rate_, 0.9, 0.999, 1e-2, 1e-8, false,
                      false, two_);
    return at::mul(total, 0.5);
  }

 private:
  Net nets_[2];
  std::vector<Tensor> parameters_[2], buffers_[2];
  std::vector<Tensor> weights_, exp_avg_, exp_avg_sq_, steps_;
  Tensor step_, rate_, two_;
};

template <class Net>
void compare(const char* name, at::Device device, const std::vector<td::Batch>& batches, Net net, int blocks) {
  td::apply(td::Determinism{.seed = 1});
  at::globalContext().setDeterministicAlgorithms(false, false);
  net->to(device);
  Hand<Net> hand(Net(std::dynamic_pointer_cast<typename Net::ContainedType>(net->clone())));
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-3, .weight_decay = 1e-2},
                      td::policies(td::parallelism::DataParallel{.devices = {device, device}})};
  Tensor ours, theirs;
  const auto seconds = [&](auto&& step, int steps) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) step(batches[static_cast<std::size_t>(i) % batches.size()]);
    td::synchronize(device);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / steps;
  };
  const auto treadle = [&](int steps) {
    return seconds([&](const td::Batch& b) { ours = trainer.accumulate(b)->loss; }, steps);
  };
  const auto by_hand = [&](int steps) { return seconds([&](const td::Batch& b) { theirs = hand.step(b); }, steps); };
  treadle(10);
  const int steps = std::clamp(static_cast<int>(0.05 / by_hand(10)), 2, 500);
  const double difference = std::abs(ours.item<double>() - theirs.item<double>());
  std::vector<double> our_times, their_times, ratios;
  for (int block = 0; block < blocks; ++block) {
    double a, b;
    if (block % 2 == 0)
      a = treadle(steps), b = by_hand(steps);
    else
      b = by_hand(steps), a = treadle(steps);
    our_times.push_back(a * 1e6);
    their_times.push_back(b * 1e6);
    ratios.push_back(a / b);
  }
  std::printf("| %s | %.1f | %.1f | %.3f | %.1e |\n", name, median(our_times), median(their_times), median(ratios),
              difference);
}

int main(int argc, char** argv) {
  at::Device device(at::kCPU);
  int blocks = 31;
  int threads = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--device")) device = td::resolve_device(at::Device(argv[i + 1]));
    if (!std::strcmp(argv[i], "--blocks")) blocks = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--threads")) threads = std::atoi(argv[i + 1]);
  }
  torch::set_num_threads(threads);
  torch::manual_seed(1);
  at::globalContext().setAllowTF32CuDNN(false);  // what precision::Fp32 promises
  const auto batches = [&](std::vector<std::int64_t> sizes) {
    std::vector<td::Batch> made;
    for (int i = 0; i < 4; ++i)
      made.push_back({torch::randn(sizes).to(device), torch::randint(0, 10, {sizes[0]}, torch::kLong).to(device)});
    return made;
  };
  std::printf("two replicas on %s, %d thread(s), %d interleaved blocks\n", device.str().c_str(), threads, blocks);
  std::printf("| model | DataParallel, us a step | by hand, us a step | median ratio | difference of losses |\n");
  std::printf("|---|---|---|---|---|\n");
  compare("MLP 32-64-64-10, batch 32", device, batches({32, 32}), Mlp(32, 64), blocks);
  compare("MLP 256-512-512-10, batch 128", device, batches({128, 256}), Mlp(256, 512), blocks);
  compare("CNN with batch norm 28x28, batch 64", device, batches({64, 1, 28, 28}), Cnn(), blocks);
  return 0;
}
