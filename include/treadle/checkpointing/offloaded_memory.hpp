// SPDX-License-Identifier: Apache-2.0
// Memory that has left the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

struct OffloadLimits {
  std::int64_t smallest;   // bytes of memory that are worth a copy
  std::int64_t budget;     // bytes that may leave the device in one pass
  std::int64_t in_flight;  // bytes that wait for their copy, or are fetched ahead
};

/// A stream a direction.
struct OffloadStreams {
  c10::Stream out;
  c10::Stream in;
};

/// The memory of one saved tensor, or of several that share it, on the host.
struct OffloadedMemory {
  at::Tensor host;
  at::Tensor leaving{};  // while its copy to the host may be under way
  at::Device device{at::kCPU};
  at::Tensor back{};                  // on the device again
  std::optional<c10::Stream> home{};  // on which `back` was allocated
  std::optional<c10::Event> arrived{};
  std::int64_t bytes = 0;
  std::size_t number = 0;  // in the order of saving
  int users = 0;
  int pending = 0;  // users that have not taken it since it is back

  OffloadedMemory() = default;
  OffloadedMemory(const OffloadedMemory&) = delete;
  OffloadedMemory& operator=(const OffloadedMemory&) = delete;
  ~OffloadedMemory() { release(); }
  /// Lets go of the copy on the device, which may still be written.
  void release() noexcept {
    leaving.reset();
    if (!back.defined()) return;
    try {
      if (arrived) arrived->block(*home);
    } catch (...) {  // the device has failed, and nothing is reused
    }
    back.reset();
    arrived.reset();
  }
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
