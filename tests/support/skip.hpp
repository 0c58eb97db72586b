// SPDX-License-Identifier: Apache-2.0
// Skips that show: a case that cannot run here prints why, and a program in which every case was skipped
// exits with 77.
#pragma once

#include <string>

namespace treadle_test {
/// Notes that the running test case was skipped and prints `SKIPPED <case>: <reason>`; defined in main.cpp.
void skip_case(const std::string& reason);
/// Whether a CUDA device is present; throws where TREADLE_CUDA_TESTS=1 is set and there is none.
bool cuda_or_fail();
/// Like cuda_or_fail for at least `count` devices.
bool cuda_devices_or_skip(int count);
}  // namespace treadle_test

/// Leaves the running test case, which counts as skipped, with the reason on standard output.
#define TREADLE_SKIP(reason)           \
  do {                                 \
    ::treadle_test::skip_case(reason); \
    return;                            \
  } while (false)

/// Leaves the running test case when there is no CUDA device; fails instead where TREADLE_CUDA_TESTS=1 is
/// set.
#define TREADLE_REQUIRE_CUDA()                                           \
  do {                                                                   \
    if (!::treadle_test::cuda_or_fail()) TREADLE_SKIP("no CUDA device"); \
  } while (false)

/// Leaves the running test case when there are fewer than `count` CUDA devices.
#define TREADLE_REQUIRE_CUDA_DEVICES(count)                                                          \
  do {                                                                                               \
    TREADLE_REQUIRE_CUDA();                                                                          \
    if (!::treadle_test::cuda_devices_or_skip(count)) TREADLE_SKIP("needs " #count " CUDA devices"); \
  } while (false)
