// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace accumulation {

/// What becomes of a window that an epoch's end cuts short.
enum class Tail {
  Step,  ///< it is a step, weighted by what it counted
  Drop   ///< its gradients are dropped and no step is made
};

}  // namespace accumulation
}  // namespace v0_1
}  // namespace treadle
