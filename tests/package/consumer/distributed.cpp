// SPDX-License-Identifier: Apache-2.0
// Two processes train one model over Gloo.
#include <cstdio>
#include <treadle/parallelism/distributed_data_parallel.hpp>
#include <treadle/runtime/launch.hpp>

#include "train.hpp"

int main(int argc, char** argv) {
  if (const auto code = td::launch(2, argc, argv)) return *code;
  return td::run_rank([] {
    Line line;
    const auto world = td::World::from_environment();
    td::Trainer trainer{line, SquaredError{}, td::optim::Sgd{.learning_rate = 0.1},
                        td::policies(td::parallelism::DistributedDataParallel<>{.device = at::Device(at::kCPU)})};
    const double scale = world.rank + 1.0;
    const Rows rows{torch::full({2, 4}, scale), torch::full({2, 1}, 3 * scale)};
    trainer.accumulate(rows);
    // By hand: errors of -1 and -2, and the mean of their gradients over both ranks.
    const double want = 0.5 + 0.1 * (2 * 1 * 1 + 2 * 2 * 2) / 2.0;
    const double got = line->fc->weight[0][0].item<double>();
    std::printf("rank %d of %d: %f\n", world.rank, world.world_size, got);
    if (std::abs(got - want) > 1e-6) throw std::runtime_error("the weight is wrong");
  });
}
