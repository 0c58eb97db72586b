// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "treadle/axis.hpp"
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

  class State {
   public:
    State(const Tf32&, ParameterList&, const BufferList&, bool /*window*/) {}
    Switches math() const { return Switches(true); }
    NoGuard autocast() const { return {}; }
    template <class Batch>
    void cast_inputs(Batch&) const {}
    void gradients(std::span<at::Tensor>) const {}
    void publish() const {}
    template <class Visitor>
    void for_each_state(Visitor&&) {}
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
