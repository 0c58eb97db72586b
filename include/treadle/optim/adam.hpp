// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/_fused_adam.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/optim/fused_state.hpp"
#include "treadle/optim/parameter_group.hpp"
#include "treadle/optim/schedule.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Adam on ATen's fused operation; weight decay is added to the gradient. Options and defaults as torch.optim.Adam.
struct Adam {
  static constexpr bool host_stepped = false;
  using State = FusedState<Adam>;

  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool amsgrad = false;
  Schedule schedule{};
  std::vector<ParameterGroup> groups{};

  bool operator==(const Adam&) const = default;

  void check() const {
    const auto refuse = [](const char* why) { throw ConfigError(std::string("optim::Adam: ") + why); };
    if (!(learning_rate >= 0) || !std::isfinite(learning_rate))
      refuse("learning_rate must be finite and not negative.");
    if (!(beta1 >= 0 && beta1 < 1) || !(beta2 >= 0 && beta2 < 1)) refuse("beta1 and beta2 must lie in [0, 1).");
    if (!(eps >= 0) || !std::isfinite(eps)) refuse("eps must be finite and not negative.");
    if (!(weight_decay >= 0) || !std::isfinite(weight_decay)) refuse("weight_decay must be finite and not negative.");
    schedule.check();
    check_groups(groups);
  }

  std::size_t state_count() const { return amsgrad ? 3 : 2; }
  std::string_view state_name(std::size_t slot) const {
    return slot == 0 ? "exp_avg" : slot == 1 ? "exp_avg_sq" : "max_exp_avg_sq";
  }

  /// One fused update of a cohort; `State` calls it.
  void update(Cohort& cohort, at::TensorList gradients, const std::optional<at::Tensor>& divisor,
              const std::optional<at::Tensor>& found_inf) const {
    const at::TensorList maximum = amsgrad ? at::TensorList(cohort.state[2]) : at::TensorList();
    at::_fused_adam_(cohort.parameters, gradients, cohort.state[0], cohort.state[1], maximum, cohort.steps,
                     cohort.learning_rate, beta1, beta2, cohort.weight_decay, eps, amsgrad, /*maximize=*/false, divisor,
                     found_inf);
  }
};

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
