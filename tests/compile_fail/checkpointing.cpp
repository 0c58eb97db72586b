// SPDX-License-Identifier: Apache-2.0
// What a checkpointing policy asks of an objective and its blocks.
#include <torch/nn/modules/linear.h>
#include <treadle/checkpointing/checkpoint_every_block.hpp>
#include <treadle/checkpointing/checkpoint_every_n.hpp>
#include <treadle/treadle.hpp>

#include <memory>

namespace td = treadle;
using Net = torch::nn::LinearImpl;

template <class Policy, class Objective>
void train(Net& net, Objective objective) {
  td::Trainer trainer{net, objective, td::optim::AdamW{}, td::policies(Policy{})};
  trainer.accumulate(td::Batch{});
}
using EveryBlock = td::checkpointing::CheckpointEveryBlock;

inline void right(Net& net) {
  const auto objective = [](Net& n, const td::Batch& b, auto& step) { return step.checkpoint(n, b.data).sum(); };
  train<EveryBlock>(net, objective);
  train<td::checkpointing::CheckpointEveryN>(net, objective);
}
#if CASE == 1
// expect: treadle::Trainer: a checkpointing policy needs to be given the blocks to recompute
inline void without_context(Net& net) {
  train<EveryBlock>(net, [](Net& n, const td::Batch& b) { return n.forward(b.data).sum(); });
}
#elif CASE == 2
// expect: treadle: a checkpointed block must be callable with its inputs
inline void wrong_inputs(Net& net) {
  train<EveryBlock>(net, [](Net& n, const td::Batch& b, auto& step) {
    return step.checkpoint([](int*) { return at::Tensor(); }, b.data, n);
  });
}
// expect: treadle: a checkpointed function object is kept for its backward pass, but cannot be copied
inline void not_copyable(Net& net) {
  train<EveryBlock>(net, [](Net&, const td::Batch& b, auto& step) {
    const auto block = [alone = std::make_unique<int>(1)](const at::Tensor& x) { return x * *alone; };
    return step.checkpoint(block, b.data).sum();
  });
}
#elif CASE == 3
// expect: treadle: an input of a checkpointed block is a view (ArrayRef, span, string_view)
inline void views(Net& net) {
  train<EveryBlock>(net, [](Net&, const td::Batch& b, auto& step) {
    const auto block = [](const at::Tensor& x, at::IntArrayRef sizes) { return x.reshape(sizes); };
    return step.checkpoint(block, b.data, b.data.sizes()).sum();
  });
}
#endif
