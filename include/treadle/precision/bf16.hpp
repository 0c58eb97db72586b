// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/axis.hpp"
#include "treadle/precision/autocast.hpp"
#include "treadle/precision/plain_state.hpp"
#include "treadle/precision/switches.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Autocast to bfloat16 around model and objective; weights, gradients and rule state stay fp32. Needs no loss scale.
struct Bf16 {
  using policy_axis = axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;

  bool operator==(const Bf16&) const = default;
  void check() const {}

  class State : public PlainState {
   public:
    State(const Bf16&, ParameterList& parameters, const BufferList&, bool /*window*/)
        : device_(parameters.device().type()) {}
    Switches math() const { return Switches(false); }
    Autocast autocast() const { return Autocast(device_, at::kBFloat16); }

   private:
    at::DeviceType device_;
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
