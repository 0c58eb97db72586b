// SPDX-License-Identifier: Apache-2.0
// A translation unit, or a shared object, with a trainer of its own inside; one that recomputes, if RECOMPUTES.
#include "train.hpp"

#ifdef RECOMPUTES
#include <treadle/checkpointing/checkpoint_every_block.hpp>

namespace {
struct InBlocks {
  int* calls;
  at::Tensor operator()(LineImpl& line, const Rows& rows, auto& step) const {
    const auto block = [&line, count = calls](const at::Tensor& x) {
      ++*count;
      return line.forward(x).tanh();
    };
    return (step.checkpoint(block, rows.data) - rows.target).square().mean();
  }
};
/// Trains through a block; the sum of the weights, and how often the block was called.
template <class Checkpointing>
double train_in_blocks(int& calls) {
  Line line;
  td::Trainer trainer{line, InBlocks{&calls}, td::optim::Sgd{.learning_rate = 0.1},
                      td::policies(Checkpointing{}, td::parallelism::SingleDevice{.device = at::kCPU})};
  const Rows rows{at::arange(8, at::kFloat).view({2, 4}) / 8, at::ones({2, 1})};
  for (int step = 0; step < 3; ++step) trainer.accumulate(rows);
  return line->fc->weight.detach().sum().item<double>();
}
}  // namespace
#endif

#ifndef UNIT
#define UNIT unit
#endif
extern "C" [[gnu::visibility("default")]] double UNIT() {
#ifdef RECOMPUTES
  int plain = 0;
  int twice = 0;
  const double want = train_in_blocks<td::checkpointing::NoCheckpointing>(plain);
  if (train_in_blocks<td::checkpointing::CheckpointEveryBlock>(twice) != want || plain != 3 || twice != 6) return -1;
#endif
  return train();
}
