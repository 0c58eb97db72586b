// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/axis.hpp"
#include "treadle/precision/plain_state.hpp"
#include "treadle/precision/switches.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Full precision: TF32 off for cuBLAS and cuDNN while Treadle computes; fp64 models stay fp64.
///
/// This is the axis's no-op policy and, with `plain_state.hpp`, the worked example of `precision/concept.hpp`.
struct Fp32 {
  using policy_axis = axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;

  bool operator==(const Fp32&) const = default;
  void check() const {}

  class State : public PlainState {
   public:
    State(const Fp32&, ParameterList&, const BufferList&, bool /*window*/) {}
    Switches math() const { return Switches(false); }
    NoGuard autocast() const { return {}; }
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
