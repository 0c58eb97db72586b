// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/le.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ne.h>

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

/// Stochastic gradient descent on ATen's fused operation; options and defaults as torch.optim.SGD.
struct Sgd {
  static constexpr bool host_stepped = false;
  using State = FusedState<Sgd>;

  double learning_rate = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  Schedule schedule{};
  std::vector<ParameterGroup> groups{};

  bool operator==(const Sgd&) const = default;

  void check() const {
    const auto refuse = [](const char* why) { throw ConfigError(std::string("optim::Sgd: ") + why); };
    if (!(learning_rate >= 0) || !std::isfinite(learning_rate))
      refuse("learning_rate must be finite and not negative.");
    if (!(momentum >= 0) || !std::isfinite(momentum)) refuse("momentum must be finite and not negative.");
    if (!std::isfinite(dampening)) refuse("dampening must be finite.");
    if (!(weight_decay >= 0) || !std::isfinite(weight_decay)) refuse("weight_decay must be finite and not negative.");
    if (nesterov && (momentum <= 0 || dampening != 0)) refuse("nesterov needs a momentum and no dampening.");
    schedule.check();
    check_groups(groups);
  }

  std::size_t state_count() const { return momentum != 0 ? 1 : 0; }
  std::string_view state_name(std::size_t) const { return "momentum_buffer"; }

  /// One fused update of a cohort; `State` calls it.
  ///
  /// The first applied step takes the gradient undamped. The fused operation's own flag for that is a host value, wrong
  /// once a first step is skipped, so with dampening both forms are launched and the device picks one by the step
  /// count.
  void update(Cohort& cohort, at::TensorList gradients, const std::optional<at::Tensor>& divisor,
              const std::optional<at::Tensor>& found_inf) const {
    const auto launch = [&](bool first, const std::optional<at::Tensor>& skip) {
      at::_fused_sgd_(cohort.parameters, gradients, state_count() ? at::TensorList(cohort.state[0]) : at::TensorList(),
                      cohort.weight_decay, momentum, cohort.learning_rate, dampening, nesterov, /*maximize=*/false,
                      first, divisor, skip);
    };
    if (momentum == 0 || dampening == 0) return launch(false, found_inf);  // zeroed buffers make step 1 come out right
    auto not_first = cohort.step.ne(1).to(at::kFloat);
    auto not_later = cohort.step.le(1).to(at::kFloat);
    launch(true, found_inf ? at::maximum(not_first, *found_inf) : not_first);
    launch(false, found_inf ? at::maximum(not_later, *found_inf) : not_later);
  }
};

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
