// SPDX-License-Identifier: Apache-2.0
// A small GPT that learns to count. One word decides whether its activations are kept, or recomputed block by block;
// the numbers stay the same to the last bit.
// treadle-example: TIMEOUT 300 PASS every block: loss 0\.[0-5].*same bits
#include <torch/torch.h>
#include <treadle/checkpointing/checkpoint_every_block.hpp>
#include <treadle/treadle.hpp>

#include <cstdio>

#include "../benchmarks/models/gpt.hpp"

namespace td = treadle;

/// Rows of numbers that go up by a step of their own, modulo the vocabulary.
td::Batch sequences(std::int64_t rows, std::int64_t length, std::int64_t vocabulary) {
  const auto start = torch::randint(vocabulary, {rows, 1});
  const auto step = torch::randint(1, 4, {rows, 1});
  const auto all = (start + step * torch::arange(length + 1)).remainder(vocabulary);
  return {all.slice(1, 0, length), all.slice(1, 1)};
}

template <class Checkpointing>
double train(Checkpointing checkpointing, const char* name) {
  torch::manual_seed(1);
  gpt::Model model(gpt::Options{.vocabulary = 16, .context = 16, .blocks = 3, .width = 32, .heads = 2, .dropout = 0.1});
  td::data::TensorLoader loader{sequences(512, 16, 16), {.batch_size = 32, .shuffle = true}};
  td::Trainer trainer{model, gpt::NextToken{}, td::optim::AdamW{.learning_rate = 3e-3}, td::policies(checkpointing)};
  trainer.fit(loader, {.epochs = 12});
  const double loss = trainer.evaluate(loader)["loss"];
  std::printf("%s: loss %.4f", name, loss);
  return loss;
}

int main() {
  at::set_num_threads(1);  // more would wait for each other over tensors of this size
  const double plain = train(td::checkpointing::NoCheckpointing{}, "plain");
  const double recomputed = train(td::checkpointing::CheckpointEveryBlock{}, ", every block");
  std::printf("%s\n", plain == recomputed ? ", the same bits" : ", other bits");
}
