// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "treadle/runtime/device.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace clipping {

/// The 2-norm over all elements of all `gradients` together: a scalar tensor, in fp64 for fp64 gradients, else in fp32
/// (a norm kept in bf16 is coarse, one in fp16 overflows). Gradients on another device than `device` are gathered
/// there.
inline at::Tensor global_norm(at::TensorList gradients, at::Device device) {
  if (gradients.empty()) return at::zeros({}, at::device(device).dtype(at::kFloat));
  bool fp64 = false;
  bool one_device = true;
  for (const auto& gradient : gradients) {
    fp64 |= gradient.scalar_type() == at::kDouble;
    one_device &= is_on(gradient, device);
  }
  auto norms = at::_foreach_norm(gradients, 2, fp64 ? at::kDouble : at::kFloat);
  if (!one_device)
    for (auto& norm : norms) norm = norm.to(device);
  return norms.size() == 1 ? norms[0] : at::linalg_vector_norm(at::stack(norms));
}

}  // namespace clipping
}  // namespace v0_1
}  // namespace treadle
