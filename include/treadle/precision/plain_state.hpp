// SPDX-License-Identifier: Apache-2.0
// The calls of `precision/concept.hpp` as they are where a precision leaves batches, gradients and weights alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Mixed into the states of `Fp32`, `Tf32`, `Bf16` and `Fp16`; empty.
struct PlainState {
  template <class Batch>
  void cast_inputs(Batch&) const {}
  void gradients(std::span<at::Tensor>) const {}
  void publish() const {}
  template <class Visitor>
  void for_each_state(Visitor&&) {}
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
