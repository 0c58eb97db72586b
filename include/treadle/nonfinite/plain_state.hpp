// SPDX-License-Identifier: Apache-2.0
// The calls of `nonfinite/concept.hpp` as they are where a policy goes by the gradients alone and keeps nothing.
#pragma once

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nonfinite {

/// Mixed into the states of `Ignore` and `Skip`, which differ in the fact `selects`; empty.
struct PlainState {
  template <class Window, class Verdict>
  void judge(const Window&, Verdict&, bool /*loss_scale*/) const {}
  void report() const {}
  template <class Visitor>
  void for_each_state(Visitor&&) {}
};

}  // namespace nonfinite
}  // namespace v0_1
}  // namespace treadle
