// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/axis.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace averaging {

/// Keeps no average of the weights.
///
/// This is the axis's no-op policy and the worked example of `averaging/concept.hpp`.
struct NoAveraging {
  using policy_axis = axis::Averaging;
  static constexpr bool averages = false;

  bool operator==(const NoAveraging&) const = default;
  void check() const {}

  class State {
   public:
    State(const NoAveraging&, const ParameterList&) {}
    void update(const at::Tensor* /*found_inf*/) const {}
    void use_average() const {}
    void use_weights() const {}
    template <class Visitor>
    void for_each_state(Visitor&&) {}
  };
};

}  // namespace averaging
}  // namespace v0_1
}  // namespace treadle
