// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/_fused_adamw.h>

#include <optional>
#include <string_view>
#include <vector>

#include "treadle/optim/adam_family.hpp"
#include "treadle/optim/fused_state.hpp"
#include "treadle/optim/parameter_group.hpp"
#include "treadle/optim/schedule.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Adam with decoupled weight decay on ATen's fused operation; options and defaults as torch.optim.AdamW.
struct AdamW {
  static constexpr bool host_stepped = false;
  using State = FusedState<AdamW>;

  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  Schedule schedule{};
  std::vector<ParameterGroup> groups{};

  bool operator==(const AdamW&) const = default;

  void check() const { detail::check_adam(*this, "optim::AdamW"); }

  std::size_t state_count() const { return amsgrad ? 3 : 2; }
  std::string_view state_name(std::size_t slot) const { return detail::adam_state_name(slot); }

  /// One fused update of a cohort; `State` calls it.
  [[gnu::always_inline]] void update(Cohort& cohort, at::TensorList gradients, const std::optional<at::Tensor>& divisor,
                                     const std::optional<at::Tensor>& found_inf) const {
    detail::update_adam(*this, cohort, gradients, divisor, found_inf,
                        [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
  }
};

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
