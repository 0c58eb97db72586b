// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 900
// DistributedDataParallel over NCCL: all ranks on the first GPU, which NCCL allows where each calls itself another
// host.
#include "support/skip.hpp"
#define REQUIRE_DEVICE() TREADLE_REQUIRE_CUDA()
#include "distributed/training.hpp"

namespace {
const bool hosts_differ = [] {
  const char* rank = std::getenv("RANK");
  if (rank != nullptr) {
    ::setenv("NCCL_HOSTID", rank, 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  }
  if (torch::cuda::is_available()) chosen_device() = at::Device(at::kCUDA, 0);
  return true;
}();
}  // namespace
