// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "treadle/axis.hpp"
#include "treadle/error.hpp"
#include "treadle/precision/autocast.hpp"
#include "treadle/precision/plain_state.hpp"
#include "treadle/precision/switches.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Autocast to float16 with a dynamic loss scale that lives on the device; weights and rule state stay fp32.
///
/// Defaults and transition rule are those of PyTorch's GradScaler (`loss_scale.hpp` has the rule in plain numbers).
struct Fp16 {
  using policy_axis = axis::Precision;
  static constexpr bool scales_loss = true;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;

  double initial_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< steps without overflow before the scale grows
  double minimum_scale = 0.0;           ///< the scale never falls below this; 0 sets no floor

  bool operator==(const Fp16&) const = default;

  void check() const {
    if (!(initial_scale > 0) || initial_scale > 3.4e38)
      throw ConfigError("precision::Fp16: initial_scale must be positive and finite in fp32, such as 65536.");
    if (!(growth_factor > 1) || growth_factor > 3.4e38)
      throw ConfigError("precision::Fp16: growth_factor must be above 1 and finite in fp32, such as 2.");
    if (!(backoff_factor > 0 && backoff_factor < 1))
      throw ConfigError("precision::Fp16: backoff_factor must lie between 0 and 1, such as 0.5.");
    if (growth_interval < 1) throw ConfigError("precision::Fp16: growth_interval must be at least 1 step.");
    if (!(minimum_scale >= 0 && minimum_scale <= initial_scale))
      throw ConfigError("precision::Fp16: minimum_scale must lie between 0 and initial_scale.");
  }

  class State;
};

class Fp16::State : public PlainState {
 public:
  State(const Fp16& policy, ParameterList& parameters, const BufferList&, bool /*window*/)
      : policy_(policy),
        device_(parameters.device().type()),
        scale_(at::full({}, policy.initial_scale, at::device(parameters.device()).dtype(at::kFloat))),
        good_steps_(at::zeros({}, at::device(parameters.device()).dtype(at::kInt))) {}

  Switches math() const { return Switches(false); }
  Autocast autocast() const { return Autocast(device_, at::kHalf); }

  /// The scale that the backward pass starts from: fp32, one element, at a fixed address on the device.
  const at::Tensor& loss_scale() const { return scale_; }
  /// Moves the scale by one step; `found_inf` is fp32, one element, 1 where a gradient was not finite.
  void update_scale(const at::Tensor& found_inf) {
    at::_amp_update_scale_(scale_, good_steps_, found_inf, policy_.growth_factor, policy_.backoff_factor,
                           policy_.growth_interval);
    if (policy_.minimum_scale > 0) scale_.clamp_min_(policy_.minimum_scale);
  }

  template <class Visitor>
  void for_each_state(Visitor&& visit) {
    visit("loss_scale", scale_);
    visit("growth_tracker", good_steps_);
  }

 private:
  Fp16 policy_;
  at::DeviceType device_;
  at::Tensor scale_;
  at::Tensor good_steps_;
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
