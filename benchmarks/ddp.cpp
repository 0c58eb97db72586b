// SPDX-License-Identifier: Apache-2.0
// Steps of DistributedDataParallel: an MLP and the quick start's CNN, 64 rows a rank, over Gloo or NCCL.
//   OMP_NUM_THREADS=1 benchmark_ddp [--nproc N] [--device cuda] [--blocks N]
// With --serve it reads lines `NAME STEPS` instead and answers each with the wall and processor seconds that a step
// took on rank 0, so that ddp.py can interleave it with PyTorch's DistributedDataParallel.
#include <sys/resource.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <treadle/parallelism/distributed_data_parallel.hpp>
#include <treadle/runtime/launch.hpp>
#include <treadle/treadle.hpp>
#include <vector>

#include "median.hpp"

namespace td = treadle;

constexpr std::int64_t batch_rows = 64;
constexpr std::int64_t classes = 10;

struct Mlp : torch::nn::Module {
  static constexpr std::array<std::int64_t, 1> row{256};
  Mlp()
      : hidden(register_module("hidden", torch::nn::Linear(256, 256))),
        output(register_module("output", torch::nn::Linear(256, classes))) {}
  at::Tensor forward(const at::Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden, output;
};

struct Cnn : torch::nn::Module {
  static constexpr std::array<std::int64_t, 3> row{1, 28, 28};
  Cnn()
      : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)))),
        second(register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)))),
        hidden(register_module("hidden", torch::nn::Linear(32 * 7 * 7, 128))),
        output(register_module("output", torch::nn::Linear(128, classes))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto once = torch::max_pool2d(torch::relu(first(x)), 2);
    const auto twice = torch::max_pool2d(torch::relu(second(once)), 2);
    return output(torch::relu(hidden(twice.flatten(1))));
  }
  torch::nn::Conv2d first, second;
  torch::nn::Linear hidden, output;
};

struct CrossEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

using Parallel = td::parallelism::DistributedDataParallel<>;

struct Seconds {
  double wall, processor;
};

double processor_time() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

template <class Net>
struct Contestant {
  explicit Contestant(const Parallel& parallel)
      : trainer(net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-3}, td::policies(parallel)) {
    std::vector<std::int64_t> sizes{batch_rows};
    sizes.insert(sizes.end(), Net::row.begin(), Net::row.end());
    for (int i = 0; i < 8; ++i)
      batches.push_back({torch::randn(sizes, trainer.device()),
                         torch::randint(classes, {batch_rows}, at::device(trainer.device()).dtype(at::kLong))});
    run(20);  // buckets are rebuilt, state is made
  }
  Seconds run(int steps) {
    trainer.parallelism().agree(0, "the benchmark");  // all begin together
    const double processor = processor_time();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) loss = trainer.accumulate(batches[static_cast<std::size_t>(i % 8)])->loss;
    td::synchronize(trainer.device());
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return {wall / steps, (processor_time() - processor) / steps};
  }

  Net net;
  std::vector<td::Batch> batches;
  td::Trainer<Net, CrossEntropy, td::optim::AdamW, td::Policies<Parallel>> trainer;
  at::Tensor loss;
};

void work(const std::string& device, bool serve, int blocks) {
  Parallel parallel;
  if (!device.empty() && device != "cuda") parallel.device = at::Device(device);  // "cuda": the local rank's
  parallel.timeout = std::chrono::hours(1);  // rank 0 may wait long for its next line
  Contestant<Mlp> mlp(parallel);
  Contestant<Cnn> cnn(parallel);
  auto& ranks = mlp.trainer.parallelism();
  const auto run = [&](int which, int steps) { return which == 1 ? mlp.run(steps) : cnn.run(steps); };
  if (serve) {
    if (ranks.rank() == 0) std::cout << "ready" << std::endl;
    for (;;) {
      std::string name;
      int which = 0, steps = 0;
      if (ranks.rank() == 0 && std::cin >> name >> steps) which = name == "mlp" ? 1 : 2;
      which = static_cast<int>(ranks.agree(which, "the benchmark"));
      steps = static_cast<int>(ranks.agree(steps, "the benchmark"));
      if (which == 0) return;
      const auto took = run(which, steps);
      if (ranks.rank() == 0) std::cout << took.wall << ' ' << took.processor << std::endl;
    }
  }
  for (const int which : {1, 2}) {
    std::vector<double> wall, processor;
    for (int i = 0; i < blocks; ++i) {
      const auto took = run(which, which == 1 ? 100 : 8);
      wall.push_back(took.wall);
      processor.push_back(took.processor);
    }
    if (ranks.rank() == 0)
      std::printf("%s, %d ranks, %s: %8.1f us a step, %8.1f us of processor time on rank 0; medians of %d blocks\n",
                  which == 1 ? "MLP" : "CNN", ranks.world_size(), mlp.trainer.device().str().c_str(),
                  1e6 * median(wall), 1e6 * median(processor), blocks);
  }
}

int main(int argc, char** argv) {
  std::string device = "cpu";
  int nproc = 1, blocks = 41;
  bool serve = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--serve") {
      serve = true;
    } else if (i + 1 < argc && option == "--device") {
      device = argv[++i];
    } else if (i + 1 < argc && option == "--nproc") {
      nproc = std::atoi(argv[++i]);
    } else if (i + 1 < argc && option == "--blocks") {
      blocks = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "benchmark_ddp: no option '%s'\n", option.c_str());
      return 2;
    }
  }
  return td::run_rank([&] {
    if (const auto code = td::launch(nproc, argc, argv)) return *code;
    work(device, serve, blocks);
    return 0;
  });
}
