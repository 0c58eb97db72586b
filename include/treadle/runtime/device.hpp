// SPDX-License-Identifier: Apache-2.0
// Devices without any CUDA header: everything goes through LibTorch's own hooks.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <string>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// How many CUDA devices this LibTorch sees.
inline int cuda_device_count() {
  return at::globalContext().hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
}
/// Whether it sees one.
inline bool cuda_available() {
  return cuda_device_count() > 0;
}

/// The device that was asked for, with its index filled in, or the first CUDA device if there is one, else the CPU.
/// Throws `ConfigError` for a device that is not there.
inline at::Device resolve_device(const std::optional<at::Device>& wanted) {
  if (!wanted) return cuda_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  if (wanted->is_cuda()) {
    const int index = wanted->has_index() ? wanted->index() : 0;
    const int count = cuda_device_count();
    if (index >= count)
      throw ConfigError("treadle: device cuda:" + std::to_string(index) + " was asked for, but LibTorch sees " +
                        std::to_string(count) +
                        " CUDA devices; leave the device out to take what there is, or name at::kCPU.");
    return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
  }
  return *wanted;
}

/// Whether `tensor`, which must be defined, is on `device`; for a CPU without a call.
inline bool is_on(const at::Tensor& tensor, at::Device device) {
  if (tensor.unsafeGetTensorImpl()->device_type() != device.type()) return false;
  return device.is_cpu() || tensor.device() == device;
}

/// `tensor` on `device`. A copy from pageable host memory goes through pinned memory, so that the host does not wait
/// for the device.
inline at::Tensor to_device(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  const bool pageable = device.is_cuda() && tensor.device().is_cpu() && !tensor.is_pinned();
  return (pageable ? tensor.pin_memory() : tensor).to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

/// Waits until everything that was queued on `device` has run; does nothing on a CPU.
inline void synchronize(at::Device device) {
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace v0_1
}  // namespace treadle
