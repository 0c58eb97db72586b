// SPDX-License-Identifier: Apache-2.0
// What a precision's `math()` returns: every switch outside the model that would change a number.
#pragma once

#include "treadle/precision/autocast.hpp"
#include "treadle/runtime/math_flags.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// TF32 on or off and the caller's autocast off while it lives: a step in an autocast region of the caller's own, its
/// backward pass included, computes as it would outside.
class Switches {
 public:
  explicit Switches(bool tf32) : math_(tf32) {}

 private:
  MathFlags math_;
  AutocastOff off_;
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
