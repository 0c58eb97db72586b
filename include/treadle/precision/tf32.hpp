// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/axis.hpp"
#include "treadle/precision/plain_state.hpp"
#include "treadle/precision/switches.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// fp32 tensors whose matrix products and convolutions may use the TF32 units of NVIDIA GPUs; on a CPU it is `Fp32`.
struct Tf32 {
  using policy_axis = axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;

  bool operator==(const Tf32&) const = default;
  void check() const {}

  class State : public PlainState {
   public:
    State(const Tf32&, ParameterList&, const BufferList&, bool /*window*/) {}
    Switches math() const { return Switches(true); }
    NoGuard autocast() const { return {}; }
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
