// SPDX-License-Identifier: Apache-2.0
// A program that uses a trainer whose loop another file compiled: editing this one does not compile it again.
#include "trainer.hpp"

#include <torch/types.h>

int main() {
  torch::manual_seed(1);
  std::vector<td::Batch> batches;
  for (int i = 0; i < 12; ++i) {
    const auto x = torch::randn({32, 4});
    batches.push_back({x, x.sum(1, /*keepdim=*/true)});
  }
  const auto trainer = make_trainer(Net(), /*window=*/3);
  const auto result = fit(*trainer, batches, {.epochs = 40});
  std::printf("%ld steps, loss %.4f\n", static_cast<long>(result.steps), result.history.back().train["loss"]);
  accumulate(*trainer, batches[0]);
  accumulate(*trainer, batches[1]);
  const auto done = accumulate(*trainer, batches[2]);
  std::printf("step %ld of %ld micro-batches\n", static_cast<long>(done->index),
              static_cast<long>(done->micro_batches));
  return done->micro_batches == 3 ? 0 : 1;
}
