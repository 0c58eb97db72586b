// SPDX-License-Identifier: Apache-2.0
// What the policies' hooks ask of a tensor that is saved.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Whether it is a leaf that gets a gradient, which lives on anyway.
inline bool is_parameter(const at::TensorBase& tensor) {
  return tensor.is_leaf() && tensor.requires_grad();
}
/// Whether it is a view of one.
inline bool is_view_of_parameter(const at::TensorBase& tensor) {
  return tensor.is_view() && is_parameter(tensor._base());
}
/// What hooks may keep of `tensor`: a parameter itself, other tensors without their graph, which holds the hooks.
inline at::Tensor kept_form(const at::Tensor& tensor) {
  return is_parameter(tensor) ? tensor : tensor.detach();
}

/// Refuses a tensor that was written to between the passes.
[[noreturn, gnu::cold]] inline void refuse_changed(const std::string& policy) {
  throw ConfigError(policy +
                    ": a tensor that the backward pass needs has been changed in place since it was saved; change it "
                    "out of place, or after the backward pass.");
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
