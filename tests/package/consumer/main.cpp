// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "train.hpp"

#ifdef SECOND_UNIT
extern "C" double unit();
#else
static double unit() {
  return train();
}
#endif

#ifdef EXPECT_CPU_ONLY
#include <string>
#include <treadle/data/fashion_mnist.hpp>

static_assert(TREADLE_HAS_CUDA == 0 && TREADLE_HAS_NCCL == 0, "the emulated LibTorch has no CUDA");
static_assert(TREADLE_HAS_ZLIB == 0 && TREADLE_HAS_JPEG == 0 && TREADLE_HAS_PNG == 0,
              "this consumer asked for neither");

// A device that this LibTorch cannot have is a sentence, and the CPU goes on training.
static bool cuda_is_a_sentence() {
  try {
    Line line;
    td::Trainer trainer{line, SquaredError{}, td::optim::Sgd{.learning_rate = 0.1},
                        td::policies(td::parallelism::SingleDevice{.device = at::kCUDA})};
  } catch (const td::ConfigError& error) {
    return std::string(error.what()).find("LibTorch sees 0 CUDA devices") != std::string::npos;
  }
  return false;
}
#else
static bool cuda_is_a_sentence() {
  return true;
}
#endif
static_assert(CONSUMER_FLAG == 1, "the consumer's own flags are in force");

int main() {
  if (!cuda_is_a_sentence()) return 1;
  const double here = train();
  const double there = unit();
  std::printf("losses %.9g %.9g\n", here, there);
  return here == there && here > 0 && one_torch() ? 0 : 1;
}
