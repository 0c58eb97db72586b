// SPDX-License-Identifier: Apache-2.0
// One AdamW step on the 148 tensors of GPT-2 124M: Treadle's rule against torch::optim::AdamW, in interleaved blocks.
//   benchmark_adamw [--device cuda] [--blocks N] [--steps N]
// With --serve it reads lines `NAME STEPS` instead and answers each with the seconds a step took, so that adamw.py can
// interleave Python's fused AdamW with both.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <treadle/optim/adamw.hpp>
#include <treadle/precision/fp32.hpp>
#include <treadle/runtime/device.hpp>
#include <vector>

#include "median.hpp"

namespace td = treadle;

/// GPT-2 124M with its output layer tied to the token embedding: 124,439,808 elements.
std::vector<std::vector<std::int64_t>> gpt2_shapes() {
  constexpr std::int64_t width = 768;
  using Shapes = std::vector<std::vector<std::int64_t>>;
  const Shapes norm{{width}, {width}};
  const Shapes attention{{3 * width, width}, {3 * width}, {width, width}, {width}};
  const Shapes mlp{{4 * width, width}, {4 * width}, {width, 4 * width}, {width}};
  Shapes shapes{{50257, width}, {1024, width}};
  const auto add = [&](const Shapes& more) { shapes.insert(shapes.end(), more.begin(), more.end()); };
  for (int layer = 0; layer < 12; ++layer) {
    add(norm);
    add(attention);
    add(norm);
    add(mlp);
  }
  add(norm);
  return shapes;
}

struct Problem {
  explicit Problem(at::Device device) : device(device) {
    torch::manual_seed(1);
    for (const auto& shape : gpt2_shapes()) {
      weights.push_back(torch::randn(shape, device).mul_(0.02));
      gradients.push_back(torch::randn(shape, device).mul_(1e-3));
    }
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> copies;
    for (const auto& weight : weights) copies.push_back(weight.clone().requires_grad_(true));
    return copies;
  }
  at::Device device;
  std::vector<at::Tensor> weights, gradients;
};

struct Treadle {
  explicit Treadle(const Problem& problem)
      : gradients(problem.gradients),
        list([&] {
          std::vector<td::Parameter> named;
          for (const auto& p : problem.parameters()) named.push_back({std::to_string(named.size()), p, p});
          return td::ParameterList(std::move(named), problem.device);
        }()),
        precision(td::precision::Fp32{}, list, {}, false),
        rule(td::optim::AdamW{}, list) {}
  void step() {
    // The rule takes the gradients out of the parameters; what a backward pass would do is done here.
    for (std::size_t i = 0; i < gradients.size(); ++i) list[i].model.mutable_grad() = gradients[i];
    rule.collect(precision);
    rule.step(nullptr, nullptr, nullptr);
    rule.release();
  }
  at::Tensor parameter(std::size_t i) const { return list[i].model; }
  const std::vector<at::Tensor>& gradients;
  td::ParameterList list;
  td::precision::Fp32::State precision;
  td::optim::AdamW::State rule;
};

struct LibTorch {
  explicit LibTorch(const Problem& problem)
      : parameters(problem.parameters()), optimizer(parameters, torch::optim::AdamWOptions(1e-3)) {
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = problem.gradients[i];
  }
  void step() { optimizer.step(); }
  at::Tensor parameter(std::size_t i) const { return parameters[i]; }
  std::vector<at::Tensor> parameters;
  torch::optim::AdamW optimizer;
};

template <class Contestant>
double seconds_a_step(Contestant& contestant, at::Device device, int steps) {
  td::synchronize(device);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) contestant.step();
  td::synchronize(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / steps;
}

int main(int argc, char** argv) {
  std::string device_name = "cpu";
  int blocks = 11, steps = 0;
  bool serve = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--serve") {
      serve = true;
    } else if (i + 1 < argc && option == "--device") {
      device_name = argv[++i];
    } else if (i + 1 < argc && option == "--blocks") {
      blocks = std::atoi(argv[++i]);
    } else if (i + 1 < argc && option == "--steps") {
      steps = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "benchmark_adamw: no option '%s'\n", option.c_str());
      return 2;
    }
  }
  const at::Device device = td::resolve_device(at::Device(device_name));
  if (steps == 0) steps = device.is_cuda() ? 50 : 2;
  const Problem problem(device);
  Treadle treadle(problem);
  LibTorch libtorch(problem);
  seconds_a_step(treadle, device, 3);  // makes the state
  seconds_a_step(libtorch, device, 3);

  if (serve) {
    std::string name;
    int count = 0;
    std::cout << "ready" << std::endl;
    while (std::cin >> name >> count)
      std::cout << (name == "treadle" ? seconds_a_step(treadle, device, count)
                                      : seconds_a_step(libtorch, device, count))
                << std::endl;
    return 0;
  }

  double apart = 0;
  for (std::size_t i = 0; i < problem.weights.size(); ++i)
    apart = std::max(apart, (treadle.parameter(i) - libtorch.parameter(i)).abs().max().item<double>());
  std::vector<double> ours, theirs, ratios;
  for (int i = 0; i < blocks; ++i) {
    ours.push_back(seconds_a_step(treadle, device, steps));
    theirs.push_back(seconds_a_step(libtorch, device, steps));
    ratios.push_back(ours.back() / theirs.back());
  }
  std::int64_t elements = 0;
  for (const auto& weight : problem.weights) elements += weight.numel();
  std::printf("AdamW, %zu tensors, %lld elements, %s, %d threads; %d interleaved blocks of %d steps\n",
              problem.weights.size(), static_cast<long long>(elements), device.str().c_str(), at::get_num_threads(),
              blocks, steps);
  std::printf("  largest difference of a weight after 3 steps  %.1e\n", apart);
  std::printf("  Treadle              %8.3f ms a step\n", 1e3 * median(ours));
  std::printf("  torch::optim::AdamW  %8.3f ms a step\n", 1e3 * median(theirs));
  std::printf("  ratio                %8.3f (target: at most %.2f)\n", median(ratios), device.is_cuda() ? 0.20 : 0.45);
}
