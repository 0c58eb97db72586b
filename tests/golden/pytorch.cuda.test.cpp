// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// Treadle against PyTorch's own training tools on a GPU: cases.hpp has the cases.
#define GOLDEN_DEVICE at::kCUDA
#define GOLDEN_NEEDS_DEVICE() TREADLE_REQUIRE_CUDA()
#include "golden/cases.hpp"
