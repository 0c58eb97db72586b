// SPDX-License-Identifier: Apache-2.0
// Batches brought to a device ahead of their use, on a thread and a stream of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/pass.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/data/random.hpp"
#include "treadle/error.hpp"
#include "treadle/loader.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Copies batches to a CUDA device through a ring of page-locked buffers, on a stream of its own. For one thread, but
/// for `arrive` and `release`, which are for the thread that uses the batches.
class CopyRing {
 public:
  CopyRing(at::Device device, int depth)
      : device_(device), depth_(depth), slots_(static_cast<std::size_t>(std::max(2, depth))) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_.emplace(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  }

  /// Copies `batch`, and gives the event that tells when it is there. At most `depth` + 1 batches are kept from the
  /// time when they are copied to the time when the device is done with them: for more, the calling thread waits.
  template <class B>
  c10::Event copy(B& batch, const std::atomic<bool>& stop) {
    if (copied_ > depth_) {
      std::optional<c10::Event> done;
      {
        const std::lock_guard lock(mutex_);
        done.emplace(std::move(released_.front()));
        released_.pop_front();
      }
      wait(*done, stop);
    }
    Slot& slot = slots_[static_cast<std::size_t>(copied_++) % slots_.size()];
    if (slot.copied) wait(*slot.copied, stop);
    std::size_t which = 0;
    const c10::StreamGuard on_copy_stream(*stream_);
    treadle::for_each_tensor(batch, [&](at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == device_) return;
      at::Tensor there = at::empty(tensor.sizes(), tensor.options().device(device_).pinned_memory(false));
      if (tensor.is_cpu() && !tensor.is_pinned()) {
        if (slot.buffers.size() <= which) slot.buffers.resize(which + 1);
        there.copy_(staged(slot.buffers[which++], tensor), /*non_blocking=*/true);
      } else {
        there.copy_(tensor, /*non_blocking=*/true);
      }
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
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    event.block(current);
    treadle::for_each_tensor(batch, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.device() == device_) tensor.record_stream(current);
    });
  }
  /// Says that the current stream has been given all work on the batch that arrived first of those not yet released.
  void release() {
    c10::Event done(device_.type());
    done.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    const std::lock_guard lock(mutex_);
    released_.push_back(std::move(done));
  }

 private:
  struct Slot {
    std::vector<at::Tensor> buffers;  // bytes; they grow to what the largest batch needs
    std::optional<c10::Event> copied;
  };

  static at::Tensor staged(at::Tensor& buffer, const at::Tensor& tensor) {
    const auto bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
    if (!buffer.defined() || buffer.numel() < bytes)
      buffer = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    at::Tensor place = buffer.narrow(0, 0, bytes).view(tensor.scalar_type()).view(tensor.sizes());
    return place.copy_(tensor);
  }
  /// An event's own way of waiting keeps a core busy.
  static void wait(const c10::Event& event, const std::atomic<bool>& stop) {
    while (!event.query()) {
      if (stop.load(std::memory_order_relaxed)) throw Abandoned{};
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  at::Device device_;
  std::int64_t depth_;
  std::optional<c10::Stream> stream_;
  std::vector<Slot> slots_;
  std::int64_t copied_ = 0;
  std::mutex mutex_;
  std::deque<c10::Event> released_;
};

/// A batch on its way.
template <class B>
struct Sent {
  B batch;
  std::optional<c10::Event> arrived{};
  std::vector<data::KeyedGenerator> generators{};
};

/// Takes batches from a loader and sends them to the device; one thread does so.
template <class Range>
class PrefetchWork {
  using Inner = decltype(std::declval<Range&>().begin());
  using End = decltype(std::declval<Range&>().end());

 public:
  using Batch = std::remove_cvref_t<decltype(*std::declval<Inner&>())>;

  PrefetchWork(Range& loader, std::shared_ptr<CopyRing> ring)
      : it_(loader.begin()), end_(loader.end()), ring_(std::move(ring)) {}

  std::optional<Sent<Batch>> claim() {
    if (begun_) ++it_;
    begun_ = true;
    if (!(it_ != end_)) return std::nullopt;
    Sent<Batch> sent{.batch = *it_};
    if constexpr (requires { it_.generators(); }) sent.generators = it_.generators();
    return sent;
  }
  Sent<Batch> make(Sent<Batch> sent, const std::atomic<bool>& stop) const {
    if (ring_) sent.arrived.emplace(ring_->copy(sent.batch, stop));
    return sent;
  }

 private:
  Inner it_;
  End end_;
  std::shared_ptr<CopyRing> ring_;
  bool begun_ = false;
};

}  // namespace detail

namespace data {

struct PrefetchOptions {
  std::optional<at::Device> device{};  ///< none: the first CUDA device if there is one, else the CPU
  int depth = 2;                       ///< batches that are under way or there, beside the one in use
};

/// A loader whose batches are on the device when they are asked for: see `prefetch`. `L` may be a reference.
template <class L>
class Prefetched {
  using Range = std::remove_reference_t<L>;
  using Work = treadle::detail::PrefetchWork<Range>;
  using Sent = treadle::detail::Sent<typename Work::Batch>;

  struct Pass {
    std::shared_ptr<treadle::detail::CopyRing> ring;
    std::int64_t batches;  // -1: not known
    std::shared_ptr<Position> place;
    Position start;
    std::int64_t given = 0;
    std::optional<Sent> sent;
    treadle::detail::Pipeline<Work> pipeline;
    bool ended = false;

    void fetch() {
      if (ended) return;
      ended = true;  // a batch that cannot be made ends the pass, whose position stays in front of it
      if (sent && ring) ring->release();
      sent.reset();
      sent = pipeline.next();
      ended = !sent;
      if (sent && sent->arrived) ring->arrive(sent->batch, *sent->arrived);
      if (sent) *place = {start.epoch, start.batch + ++given};
      if (!sent || place->batch == batches) *place = {start.epoch + 1, 0};
    }
  };

 public:
  explicit Prefetched(L&& loader, PrefetchOptions options)
      : loader_(std::forward<L>(loader)), device_(resolve_device(options.device)), depth_(options.depth) {
    if (depth_ < 1) throw ConfigError("data::prefetch: depth must be at least 1 batch.");
    if constexpr (resumable<Range>) turns_.seek(loader_.position(), -1);
  }

  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using iterator_category = std::input_iterator_tag;
    using value_type = typename Work::Batch;
    using difference_type = std::ptrdiff_t;
    using reference = const value_type&;
    using pointer = const value_type*;

    Iterator() = default;
    reference operator*() const { return pass_->sent->batch; }
    pointer operator->() const { return &pass_->sent->batch; }
    Iterator& operator++() {
      pass_->fetch();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) { return !it.pass_ || !it.pass_->sent; }
    /// As those of the loader's own iterator.
    std::vector<KeyedGenerator> generators() const { return pass_->sent->generators; }

   private:
    friend class Prefetched;
    explicit Iterator(std::shared_ptr<Pass> pass) : pass_(std::move(pass)) { pass_->fetch(); }
    std::shared_ptr<Pass> pass_;
  };

  Iterator begin() {
    const Position start = turns_.start();
    if constexpr (resumable<Range>) loader_.seek(start);
    auto ring = device_.is_cuda() ? std::make_shared<treadle::detail::CopyRing>(device_, depth_) : nullptr;
    auto place = turns_.begin_pass();
    return Iterator(std::shared_ptr<Pass>(new Pass{.ring = ring,
                                                   .batches = treadle::detail::batches_of(loader_),
                                                   .place = place,
                                                   .start = start,
                                                   .sent = std::nullopt,
                                                   .pipeline{Work(loader_, ring), /*workers=*/1, depth_}}));
  }
  std::default_sentinel_t end() const { return {}; }

  std::int64_t size() const requires sized_loader<Range> { return loader_.size(); }
  void set_epoch(std::int64_t epoch) requires reseedable_loader<Range> {
    loader_.set_epoch(epoch);
    turns_.set_epoch(epoch);
  }
  /// Which batch comes next, whatever was fetched ahead.
  Position position() const requires resumable<Range> { return turns_.position(); }
  void seek(Position position) requires resumable<Range> {
    loader_.seek(position);
    turns_.seek(loader_.position(), -1);
  }
  std::string advice() const requires requires(const Range& r) { r.advice(); }
  { return loader_.advice(); }
  at::Device device() const { return device_; }

 private:
  L loader_;
  at::Device device_;
  int depth_;
  treadle::detail::Turns turns_;
};

/// `loader` with its batches brought to `options.device` by a thread and on a stream of their own, while the device
/// computes: asking for a batch makes the current stream wait for its copy, and the host for nothing but the loader.
///
/// Any range of batches will do. It is kept by reference if it has a name, and is used by the other thread as long as a
/// pass lives. What is not page-locked is copied through a ring of max(2, depth) page-locked batches; on the device are
/// at most depth + 2 batches that Treadle keeps, however far the host runs ahead. On a CPU batches are only fetched
/// ahead.
template <class L>
Prefetched<L> prefetch(L&& loader, PrefetchOptions options = {}) {
  return Prefetched<L>(std::forward<L>(loader), options);
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
