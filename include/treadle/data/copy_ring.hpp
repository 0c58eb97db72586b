// SPDX-License-Identifier: Apache-2.0
// Copies from the host to a CUDA device, beside what it computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/data/ready.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Copies batches to a CUDA device through a ring of page-locked buffers, on a stream of its own. For one thread, but
/// for `arrive` and `release`, which are for the thread that uses the batches.
class CopyRing {
 public:
  CopyRing(at::Device device, std::int64_t depth)
      : device_(device), depth_(depth), slots_(static_cast<std::size_t>(std::max<std::int64_t>(2, depth))) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_.emplace(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  }

  /// Before a pass: nobody uses batches any more that were copied and not released.
  void begin_pass() {
    const std::lock_guard lock(mutex_);
    kept_ = static_cast<std::int64_t>(released_.size());
  }

  /// Copies `batch`, and gives the event that tells when it is there. At most `depth` + 1 batches are kept from the
  /// time when they are copied to the time when the device is done with them: for more, the calling thread waits.
  template <class B>
  c10::Event copy(B& batch, const std::atomic<bool>& stop) {
    for (; kept_ > depth_; --kept_) wait_until([&] { return forget_one(); }, stop);
    ++kept_;
    Slot& slot = slots_[next_slot_++ % slots_.size()];
    if (slot.copied) wait_until([&] { return slot.copied->query(); }, stop);
    Ready made;  // what is on a device already was made by this thread's current streams
    made.mark(batch);
    std::size_t which = 0;
    const c10::StreamGuard on_copy_stream(*stream_);
    made.arrive(batch);
    treadle::for_each_tensor(batch, [&](at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == device_) return;
      const bool pageable = tensor.is_cpu() && !tensor.is_pinned();
      at::Tensor there = at::empty_like(tensor, tensor.options().device(device_).pinned_memory(false));
      if (pageable && slot.buffers.size() <= which) slot.buffers.resize(which + 1);
      there.copy_(pageable ? staged(slot.buffers[which++], tensor, there) : tensor, /*non_blocking=*/true);
      tensor = std::move(there);
    });
    slot.copied.emplace(device_.type());
    slot.copied->record(*stream_);
    c10::Event arrived(device_.type());
    arrived.record(*stream_);
    return arrived;
  }

  /// Makes the current stream wait for a batch, which it will use.
  template <class B>
  void arrive(B& batch, const c10::Event& event) const {
    const c10::Stream current = current_stream(device_);
    event.block(current);
    treadle::for_each_tensor(batch, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.device() == device_) tensor.record_stream(current);
    });
  }
  /// Says that the current stream has been given all work on the batch that arrived first of those not yet released.
  void release() {
    c10::Event done(device_.type());
    done.record(current_stream(device_));
    const std::lock_guard lock(mutex_);
    released_.push_back(std::move(done));
  }

 private:
  struct Slot {
    std::vector<at::Tensor> buffers;  // bytes; they grow to what the largest batch needs
    std::optional<c10::Event> copied;
  };

  /// A copy of `tensor` in page-locked memory, laid out as `there` is.
  static at::Tensor staged(at::Tensor& buffer, const at::Tensor& tensor, const at::Tensor& there) {
    const auto bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
    if (!buffer.defined() || buffer.numel() < bytes)
      buffer = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    at::Tensor place = buffer.narrow(0, 0, bytes).view(tensor.scalar_type()).as_strided(there.sizes(), there.strides());
    return place.copy_(tensor);
  }
  /// Whether the device is done with the batch that was released first, which then is no longer kept.
  bool forget_one() {
    const std::lock_guard lock(mutex_);
    if (released_.empty() || !released_.front().query()) return false;
    released_.pop_front();
    return true;
  }
  /// An event's own way of waiting keeps a core busy.
  template <class Done>
  static void wait_until(const Done& done, const std::atomic<bool>& stop) {
    while (!done()) {
      if (stop.load(std::memory_order_relaxed)) throw Abandoned{};
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  at::Device device_;
  std::int64_t depth_;
  std::optional<c10::Stream> stream_;
  std::vector<Slot> slots_;
  std::size_t next_slot_ = 0;
  std::int64_t kept_ = 0;
  std::mutex mutex_;                 // for the rest
  std::deque<c10::Event> released_;  // of batches that are kept, until the device is done with them
};

/// The ring of a loader, for one pass after the other: a new one would take another stream, whose memory no other can
/// use, and page-locked memory anew. A copy of the loader has its own.
class RingOfLoader {
 public:
  RingOfLoader() = default;
  RingOfLoader(const RingOfLoader&) {}
  RingOfLoader(RingOfLoader&&) = default;
  RingOfLoader& operator=(RingOfLoader other) {
    ring_ = std::move(other.ring_);
    return *this;
  }
  ~RingOfLoader() = default;

  std::shared_ptr<CopyRing> for_pass(at::Device device, int depth) {
    if (!device.is_cuda()) return nullptr;
    if (!ring_ || ring_.use_count() > 1) ring_ = std::make_shared<CopyRing>(device, depth);  // another pass lives
    ring_->begin_pass();
    return ring_;
  }

 private:
  std::shared_ptr<CopyRing> ring_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
