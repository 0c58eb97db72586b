// SPDX-License-Identifier: Apache-2.0
// What Adam and AdamW share: the options' ranges, the state's names and the arguments of ATen's fused operations.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>

#include "treadle/error.hpp"
#include "treadle/optim/fused_state.hpp"
#include "treadle/optim/parameter_group.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {
namespace detail {

/// Throws `ConfigError` for an option of `rule` that is out of its range; `name` is what the rule is called.
template <class Rule>
void check_adam(const Rule& rule, const char* name) {
  const auto refuse = [&](const char* why) { throw ConfigError(std::string(name) + ": " + why); };
  if (!(rule.learning_rate >= 0) || !std::isfinite(rule.learning_rate))
    refuse("learning_rate must be finite and not negative.");
  if (!(rule.beta1 >= 0 && rule.beta1 < 1) || !(rule.beta2 >= 0 && rule.beta2 < 1))
    refuse("beta1 and beta2 must lie in [0, 1).");
  if (!(rule.eps >= 0) || !std::isfinite(rule.eps)) refuse("eps must be finite and not negative.");
  if (!(rule.weight_decay >= 0) || !std::isfinite(rule.weight_decay))
    refuse("weight_decay must be finite and not negative.");
  rule.schedule.check();
  check_groups(rule.groups);
}

inline std::string_view adam_state_name(std::size_t slot) {
  return slot == 0 ? "exp_avg" : slot == 1 ? "exp_avg_sq" : "max_exp_avg_sq";
}

/// `fused` is `at::_fused_adam_` or `at::_fused_adamw_`.
template <class Rule, class Fused>
[[gnu::always_inline]] inline void update_adam(const Rule& rule, Cohort& cohort, at::TensorList gradients,
                                               const std::optional<at::Tensor>& divisor,
                                               const std::optional<at::Tensor>& found_inf, Fused&& fused) {
  const at::TensorList maximum = rule.amsgrad ? at::TensorList(cohort.state[2]) : at::TensorList();
  fused(cohort.parameters, gradients, cohort.state[0], cohort.state[1], maximum, cohort.steps, cohort.learning_rate,
        rule.beta1, rule.beta2, cohort.weight_decay, rule.eps, rule.amsgrad, /*maximize=*/false, divisor, found_inf);
}

}  // namespace detail
}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
