// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// Treadle against PyTorch's own training tools on the CPU: cases.hpp has the cases.
#define GOLDEN_DEVICE at::kCPU
#define GOLDEN_NEEDS_DEVICE() static_cast<void>(0)
#include "golden/cases.hpp"
