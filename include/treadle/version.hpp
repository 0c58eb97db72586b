// SPDX-License-Identifier: Apache-2.0
// The version of Treadle: the only place that states it (CMake reads it from here).
#pragma once

#define TREADLE_VERSION_MAJOR 0
#define TREADLE_VERSION_MINOR 1
#define TREADLE_VERSION_PATCH 0

namespace treadle {
// Names carry the version, so that two versions in one process are two sets of symbols.
inline namespace v0_1 {
inline constexpr int version_major = TREADLE_VERSION_MAJOR;
inline constexpr int version_minor = TREADLE_VERSION_MINOR;
inline constexpr int version_patch = TREADLE_VERSION_PATCH;
}  // namespace v0_1
}  // namespace treadle
