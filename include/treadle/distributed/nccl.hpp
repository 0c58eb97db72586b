// SPDX-License-Identifier: Apache-2.0
// NCCL, which moves CUDA tensors between processes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "treadle/error.hpp"

#if TREADLE_HAS_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// An NCCL backend for `world_size` ranks that meet in `store`, this one on `device`.
inline c10::intrusive_ptr<c10d::Backend> make_nccl([[maybe_unused]] c10::intrusive_ptr<c10d::Store> store,
                                                   [[maybe_unused]] int rank, [[maybe_unused]] int world_size,
                                                   [[maybe_unused]] at::Device device,
                                                   [[maybe_unused]] std::chrono::milliseconds timeout) {
#if TREADLE_HAS_NCCL
  // LibTorch's default answer to a lost rank is to end the process, which is not a library's business: 2 gives up the
  // communicator only. A user's own setting stays.
  ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  // For flight recorders to be written, a rank that loses the others waits twice: before it gives up a communicator
  // LibTorch's watchdog sleeps four times the one, a minute by default, and with the other on, as by default, the
  // destructor waits for a thread that sleeps TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, eight minutes by default. There are
  // such recorders only where one of these asks for them.
  if (!std::getenv("TORCH_FR_BUFFER_SIZE") && !std::getenv("TORCH_NCCL_TRACE_BUFFER_SIZE")) {
    ::setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250", /*overwrite=*/0);
    ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  }
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, world_size, std::move(options));
  backend->eagerConnectSingleDevice(device);  // now, so that what is wrong with it is said here
  return backend;
#else
  throw ConfigError(
      "parallelism::DistributedDataParallel: this LibTorch has no NCCL, which CUDA devices need; use a LibTorch with "
      "CUDA and NCCL, or device = at::kCPU.");
#endif
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
