// SPDX-License-Identifier: Apache-2.0
// Brings a batch to where and what the step computes with.
#pragma once

#include <ATen/core/Tensor.h>

#include "treadle/batch.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

template <class B, class PrecisionState, class F>
[[gnu::noinline]] void moved(const B& batch, at::Device device, PrecisionState& precision, F& f) {
  B here = batch;
  treadle::for_each_tensor(here, [&](at::Tensor& t) {
    if (t.defined()) t = to_device(t, device);
  });
  precision.cast_inputs(here);
  f(here);
}

/// Calls `f` with the batch on `device`, cast as `precision` wants it; with the batch itself if nothing has to change.
template <bool Casts, class B, class PrecisionState, class F>
void placed(const B& batch, at::Device device, PrecisionState& precision, F&& f) {
  bool moves = Casts;
  treadle::for_each_tensor(batch, [&](const at::Tensor& t) { moves |= t.defined() && !is_on(t, device); });
  if (!moves) return f(batch);
  moved(batch, device, precision, f);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
