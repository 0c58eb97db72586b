// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "treadle/records.hpp"

namespace treadle {
inline namespace v0_1 {

/// What one step did. Its tensors are scalars on the device, are not read on the host, and stay valid when kept.
struct StepResult {
  at::Tensor loss;         ///< mean over everything that the window counted; undefined for a window without rows
  at::Tensor grad_norm{};  ///< norm of the true gradient before clipping; undefined unless the clipping measures it
  at::Tensor skipped{};    ///< fp32, 1 if the step changed nothing; undefined if no step can be skipped
  Records records{};       ///< what the objective recorded
  std::int64_t index = 0;  ///< number of this step, from 0 over the trainer's life, skipped ones included
  std::int64_t micro_batches = 1;
  double count = 0;           ///< what `loss` is the mean over, as far as the host counted it
  at::Tensor device_count{};  ///< the whole count where part of it lives on the device, else undefined
};

}  // namespace v0_1
}  // namespace treadle
