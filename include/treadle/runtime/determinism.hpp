// SPDX-License-Identifier: Apache-2.0
// One switch for runs that repeat bit by bit.
#pragma once

#include <ATen/Context.h>

#include <cstdint>
#include <cstdlib>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// Seeds and deterministic algorithms; pass it in `TrainerOptions`, or apply it before a model is made.
///
/// Bitwise claims on CUDA hold in this mode only. An operation without a deterministic form throws and names itself.
struct Determinism {
  std::uint64_t seed = 0;  ///< of every default generator; 0 is a seed like any other
  bool warn_only = false;  ///< warn, instead of throw, at an operation without a deterministic form
};

/// Sets seeds, deterministic algorithms, cuDNN's deterministic mode without autotuning, and cuBLAS's fixed workspace
/// (which must precede the process's first cuBLAS call), for the whole process.
inline void apply(const Determinism& determinism) {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(true, determinism.warn_only);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
  at::manual_seed(determinism.seed);
}

}  // namespace v0_1
}  // namespace treadle
