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
static_assert(TREADLE_HAS_CUDA == 0 && TREADLE_HAS_NCCL == 0, "the emulated LibTorch has no CUDA");
#endif
static_assert(CONSUMER_FLAG == 1, "the consumer's own flags are in force");

int main() {
  const double here = train();
  const double there = unit();
  std::printf("losses %.9g %.9g\n", here, there);
  return here == there && here > 0 && one_torch() ? 0 : 1;
}
