// SPDX-License-Identifier: Apache-2.0
// Saved tensors on their way to the host and back, beside the computation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/offload_clock.hpp"
#include "treadle/checkpointing/offloaded_memory.hpp"
#include "treadle/checkpointing/saved_tensor.hpp"
#include "treadle/checkpointing/streams.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What one forward pass sends to the host. Copies run on streams of their own; the memory of a tensor is let go once
/// its copy has been waited for on the device, so that the host waits for nothing and the allocator may use it again.
///
/// On a CPU both ways are plain copies.
class OffloadLink final : public HookSource, public std::enable_shared_from_this<OffloadLink> {
 public:
  OffloadLink(const OffloadLimits& limits, const std::optional<OffloadStreams>& streams)
      : limits_(limits), streams_(streams) {}
  OffloadLink(const OffloadLink&) = delete;
  OffloadLink& operator=(const OffloadLink&) = delete;
  ~OffloadLink() {
    try {
      let_go(0);
    } catch (...) {  // the device has failed, and nothing is reused
    }
  }

  /// Notes memory that lives on anyway, so that sending it would free nothing.
  void keep(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    stays_.try_emplace(tensor.storage().unsafeGetStorageImpl(), Weak(tensor.storage().getWeakStorageImpl()));
  }
  void time_stalls() { times_stalls_ = true; }
  std::vector<TimedSpan> take_stalls() {
    times_stalls_ = false;
    return std::move(stalls_);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(shared_from_this());
  }
  std::int64_t bytes() const { return bytes_; }
  /// Those that would have gone with a larger budget included.
  std::int64_t offered() const { return offered_; }
  /// Whether a backward pass has begun.
  bool has_fetched() const { return has_fetched_; }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct InFlight {
    at::Tensor flat;
    std::weak_ptr<OffloadedMemory> memory;
    c10::Stream home;  // on which it was computed, and its memory is used again
    c10::Event copied;
    std::int64_t bytes;
  };
  struct Known {
    Weak storage;  // so that no other memory gets its address
    std::weak_ptr<OffloadedMemory> memory;
    at::ScalarType dtype;
    std::int64_t version;
    bool offered;
  };

  bool takes(const at::Tensor& tensor) const {
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg() ||
        tensor.is_quantized() || is_parameter(tensor) || is_view_of_parameter(tensor) ||
        stays_.contains(tensor.storage().unsafeGetStorageImpl()))
      return false;
    // Without a graph it may be a part of something large, such as a dataset, that all of would go.
    if (!tensor.requires_grad() && 2 * tensor.nbytes() < tensor.storage().nbytes()) return false;
    return streams_ ? tensor.device() == streams_->out.device() : tensor.is_cpu();
  }

  /// The memory of `tensor` on the host; null where it stays.
  std::shared_ptr<OffloadedMemory> move(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    if (!takes(tensor)) return nullptr;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    if (bytes < limits_.smallest) return nullptr;
    const auto version = static_cast<std::int64_t>(tensor._version());
    const auto fresh = [&] {
      return Known{Weak(tensor.storage().getWeakStorageImpl()), {}, tensor.scalar_type(), version, false};
    };
    auto& known = known_.try_emplace(storage, fresh()).first->second;
    if (known.version != version || known.dtype != tensor.scalar_type()) known = fresh();
    if (auto memory = known.memory.lock()) return ++memory->users, memory;
    if (!std::exchange(known.offered, true)) offered_ += bytes;
    if (bytes_ + bytes > limits_.budget) return nullptr;
    const auto flat = at::empty({0}, tensor.options())
                          .set_(tensor.storage(), 0, {bytes / static_cast<std::int64_t>(tensor.element_size())}, {1});
    auto memory = std::make_shared<OffloadedMemory>();
    memory->device = tensor.device();
    memory->bytes = bytes;
    memory->number = order_.size();
    memory->users = 1;
    if (streams_) {
      memory->host = at::empty(flat.sizes(), flat.options().device(at::kCPU).pinned_memory(true));
      const auto home = stream_here(flat.device());
      copy_after(home, streams_->out, [&] { memory->host.copy_(flat, /*non_blocking=*/true); });
      c10::Event copied(at::kCUDA);
      copied.record(streams_->out);
      memory->leaving = flat;
      memory->home = home;
      flying_ += bytes;
      in_flight_.push_back({flat, memory, home, std::move(copied), bytes});
      let_go(limits_.in_flight);
    } else {
      memory->host = flat.clone();
    }
    bytes_ += bytes;
    order_.push_back(memory);
    known.memory = memory;
    return memory;
  }

  /// The memory on the device again, and what was saved before it on its way.
  at::Tensor fetch(OffloadedMemory& memory) {
    const std::lock_guard lock(mutex_);
    has_fetched_ = true;
    let_go(limits_.in_flight);
    bring(memory);
    std::int64_t ahead = 0;
    for (std::size_t i = memory.number; i-- > 0 && ahead < limits_.in_flight;)
      if (const auto next = order_[i].lock()) {
        bring(*next);
        ahead += next->bytes;
      }
    auto back = memory.back;
    if (memory.home) {
      if (memory.arrived) memory.arrived->block(*memory.home);
      use_here(back, {*memory.home});
    }
    if (--memory.pending <= 0) memory.back.reset();
    return back;
  }
  void release(OffloadedMemory& memory) {
    const std::lock_guard lock(mutex_);
    if (--memory.users == 0) memory.release();
  }

  /// `copy()` on a stream of its own, after everything that was queued on `home` so far.
  template <class Copy>
  static void copy_after(const c10::Stream& home, const c10::Stream& own, Copy&& copy) {
    order_streams(home, own);
    const c10::StreamGuard on(own);
    copy();
  }
  void bring(OffloadedMemory& memory) {
    if (memory.back.defined()) return;
    const at::NoGradGuard no_grad;
    memory.pending = memory.users;
    if (!streams_) {
      memory.back = memory.host.clone();
      return;
    }
    memory.arrived.reset();
    if (memory.leaving.defined()) {  // it has not gone yet
      memory.back = memory.leaving;
      return;
    }
    memory.home = stream_here(memory.device);
    memory.back = at::empty(memory.host.sizes(), memory.host.options().device(memory.device).pinned_memory(false));
    copy_after(*memory.home, streams_->in, [&] { memory.back.copy_(memory.host, /*non_blocking=*/true); });
    memory.arrived.emplace(at::kCUDA);
    memory.arrived->record(streams_->in);
  }
  /// Lets go of memory that has been copied, and makes the device wait until no more than `most` bytes are under way.
  void let_go(std::int64_t most) {
    while (!in_flight_.empty()) {
      auto& oldest = in_flight_.front();
      if (!oldest.copied.query()) {
        if (flying_ <= most) return;
        std::optional<c10::Event> began;
        if (times_stalls_) began = timed_event(oldest.home);
        oldest.copied.block(oldest.home);
        if (began) stalls_.push_back({std::move(*began), timed_event(oldest.home)});
      }
      flying_ -= oldest.bytes;
      if (const auto memory = oldest.memory.lock()) memory->leaving.reset();
      in_flight_.pop_front();
    }
  }

  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<OffloadLink> link) : link_(std::move(link)) {}
    Hooks(const Hooks&) = delete;
    Hooks& operator=(const Hooks&) = delete;
    ~Hooks() override {
      if (memory_) link_->release(*memory_);
    }
    void call_pack_hook(const at::Tensor& tensor) override {
      counter_ = tensor.unsafeGetTensorImpl()->version_counter();
      version_ = counter_.current_version();
      memory_ = link_->move(tensor);
      if (!memory_) {
        link_.reset();
        kept_ = kept_form(tensor);
        return;
      }
      offset_ = tensor.storage_offset();
      sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
      strides_.assign(tensor.strides().begin(), tensor.strides().end());
    }
    at::Tensor call_unpack_hook() override {
      if (counter_.current_version() != version_) refuse_changed("checkpointing::OffloadActivations");
      if (!memory_) return kept_;
      const at::NoGradGuard no_grad;
      return link_->fetch(*memory_).as_strided(sizes_, strides_, offset_);
    }

   private:
    std::shared_ptr<OffloadLink> link_;
    std::shared_ptr<OffloadedMemory> memory_;
    at::Tensor kept_;
    c10::VariableVersion counter_;
    std::uint32_t version_ = 0;
    std::int64_t offset_ = 0;
    c10::SmallVector<std::int64_t, 5> sizes_;
    c10::SmallVector<std::int64_t, 5> strides_;
  };

  OffloadLimits limits_;
  std::optional<OffloadStreams> streams_;
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Weak> stays_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  std::vector<std::weak_ptr<OffloadedMemory>> order_;
  std::deque<InFlight> in_flight_;
  std::int64_t flying_ = 0;
  std::int64_t bytes_ = 0;
  std::int64_t offered_ = 0;
  std::vector<TimedSpan> stalls_;
  bool times_stalls_ = false;
  bool has_fetched_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
