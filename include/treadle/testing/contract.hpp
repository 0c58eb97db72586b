// SPDX-License-Identifier: Apache-2.0
// Contract checks for the authors of policies and rules: `check_<axis>_contract(policy)` runs what the axis's concept
// promises and the compiler cannot see, and returns one sentence for each broken promise.
#pragma once

#include "treadle/testing/accumulation.hpp"
#include "treadle/testing/averaging.hpp"
#include "treadle/testing/checkpointing.hpp"
#include "treadle/testing/clipping.hpp"
#include "treadle/testing/execution.hpp"
#include "treadle/testing/nonfinite.hpp"
#include "treadle/testing/parallelism.hpp"
#include "treadle/testing/precision.hpp"
#include "treadle/testing/rule.hpp"
