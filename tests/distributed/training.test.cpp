// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 900
// DistributedDataParallel over Gloo, and what becomes of the others when a rank fails.
#define REQUIRE_DEVICE() static_cast<void>(0)
#include "distributed/training.hpp"
#include "distributed/failures.hpp"

namespace {
const bool on_the_cpu = (chosen_device() = at::Device(at::kCPU), true);
}
