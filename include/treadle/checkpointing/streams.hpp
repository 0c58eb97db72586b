// SPDX-License-Identifier: Apache-2.0
// Streams: a recompute runs where the forward pass ran, whatever stream asks for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The calling thread's stream of a device.
inline c10::Stream stream_here(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
/// What is queued on `later` from now on runs after what is queued on `earlier` so far.
inline void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

/// The calling thread's streams of CUDA devices.
inline std::vector<c10::Stream> streams_here(const std::vector<at::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const auto device : devices)
    if (device.is_cuda()) streams.push_back(stream_here(device));
  return streams;
}

/// Makes streams the calling thread's until `end()`, in order with those that they stand in for.
class OnStreams {
 public:
  explicit OnStreams(const std::vector<c10::Stream>& wanted) {
    for (const auto& stream : wanted) {
      const auto current = stream_here(stream.device());
      if (current == stream) continue;
      order_streams(current, stream);
      c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
      changed_.emplace_back(current, stream);
    }
  }
  OnStreams(const OnStreams&) = delete;
  OnStreams& operator=(const OnStreams&) = delete;
  ~OnStreams() {
    try {
      end();
    } catch (...) {  // on the way of another error, which tells more
    }
  }
  void end() {
    const auto changed = std::exchange(changed_, {});
    for (const auto& [before, stream] : changed)
      c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(before);
    for (const auto& [before, stream] : changed) order_streams(stream, before);
  }

 private:
  std::vector<std::pair<c10::Stream, c10::Stream>> changed_;
};

/// Before `value`, which was made on one of `made_on`, is used on the calling thread's stream.
inline void use_here(const at::Tensor& value, const std::vector<c10::Stream>& made_on) {
  if (made_on.empty() || !value.is_cuda()) return;
  const auto here = stream_here(value.device());
  for (const auto& stream : made_on)
    if (stream.device() == here.device() && stream != here) {
      order_streams(stream, here);
      value.record_stream(here);
    }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
