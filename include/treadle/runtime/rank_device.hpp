// SPDX-License-Identifier: Apache-2.0
// Which device a process of a job uses.
#pragma once

#include <c10/core/Device.h>

#include "treadle/runtime/device.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {

/// The device of a process of a job, where `visible` GPUs are seen: the one numbered by the local rank; the CPU where
/// there is none. Throws `ConfigError` for a local rank beyond them.
inline at::Device rank_device(const World& world, int visible = cuda_device_count()) {
  if (visible == 0) return at::kCPU;
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(world.device_index(visible)));
}
/// The same for this process, as its launcher describes it (`World::from_environment`).
inline at::Device rank_device() {
  return cuda_available() ? rank_device(World::from_environment()) : at::Device(at::kCPU);
}

}  // namespace v0_1
}  // namespace treadle
