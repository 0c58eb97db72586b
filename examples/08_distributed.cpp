// SPDX-License-Identifier: Apache-2.0
// The quick start on several processes, one a device: two lines start them, one policy makes them train one model.
// treadle-example: ARGS --nproc 2 --epochs 1 --device cpu TIMEOUT 600 PASS test accuracy: 0\.[89]
#include <torch/torch.h>
#include <treadle/parallelism/distributed_data_parallel.hpp>
#include <treadle/runtime/launch.hpp>
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
  examples::Arguments arguments(argc, argv, "Trains a small CNN on Fashion-MNIST with a process a device.");
  const auto processes =
      arguments.integer("--nproc", 1, "processes to start here; leave it out under torchrun or mpirun");
  const auto epochs = arguments.integer("--epochs", 4, "passes over the training images");
  const auto data = arguments.text("--data", TREADLE_FASHION_MNIST_DIR, "folder of the four IDX files");
  const auto device =
      arguments.text("--device", "", "cpu, to leave GPUs alone; else the GPU of each process's own number");
  if (const auto code = arguments.finish()) return *code;

  if (const auto code = td::launch(static_cast<int>(processes), argc, argv)) return *code;
  return td::run_rank([&] {
    const auto world = td::World::from_environment();
    td::data::TensorLoader train{td::data::fashion_mnist(data, td::data::Split::Train),
                                 td::data::sharded({.batch_size = 128 / world.world_size, .shuffle = true}, world)};
    td::data::TensorLoader test{td::data::fashion_mnist(data, td::data::Split::Test),
                                td::data::sharded({.batch_size = 1000}, world)};
    torch::manual_seed(1);
    using namespace torch::nn;
    Sequential net(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), ReLU(), MaxPool2d(2),
                   Conv2d(Conv2dOptions(16, 32, 3).padding(1)), ReLU(), MaxPool2d(2), Flatten(),
                   Linear(32 * 7 * 7, 128), ReLU(), Linear(128, 10));
    td::Trainer trainer{net, CrossEntropy{},
                        td::optim::AdamW{.learning_rate = 8e-3, .schedule = td::schedule::one_cycle()},
                        td::policies(td::parallelism::DistributedDataParallel<>{
                            .device = device.empty() ? std::nullopt : std::optional(at::Device(device))}),
                        td::observers(td::observe::ProgressBar{}, td::observe::Table{})};
    trainer.fit(train, test, {.epochs = epochs});
  });
} catch (const std::exception& error) {
  td::warn(error.what());
  return 1;
}
