// SPDX-License-Identifier: Apache-2.0
// When what one thread has put on a device may be used by another.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Makes the streams that use a batch wait for those that made it, never the host: threads may have other current
/// streams. For tensors on a CPU it does nothing.
class Ready {
 public:
  /// In the thread that made `batch`, with its current streams.
  template <class B>
  void mark(B& batch) {
    treadle::for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return;
      for (const auto& [stream, event] : made_)
        if (stream.device() == tensor.device()) return;
      const c10::Stream stream = current_stream(tensor.device());
      made_.emplace_back(stream, c10::Event(stream.device_type())).second.record(stream);
    });
  }
  /// In the thread that will use it, with its current streams.
  template <class B>
  void arrive(B& batch) const {
    for (const auto& [stream, event] : made_) {
      const c10::Stream here = current_stream(stream.device());
      if (here != stream) event.block(here);
    }
    if (made_.empty()) return;
    treadle::for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) tensor.record_stream(current_stream(tensor.device()));
    });
  }

 private:
  std::vector<std::pair<c10::Stream, c10::Event>> made_;
};

/// A batch, and what makes it ready.
template <class B>
struct Made {
  B batch;
  Ready ready{};
};
template <class B>
Made(B) -> Made<B>;

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
