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
#include <c10/core/impl/VirtualGuardImpl.h>
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
#include "treadle/checkpointing/saved_tensor.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

struct OffloadLimits {
  std::int64_t smallest;   // bytes of memory that are worth a copy
  std::int64_t budget;     // bytes that may leave the device in one pass
  std::int64_t in_flight;  // bytes that wait for their copy, or are fetched ahead
};

/// The memory of one saved tensor, or of several that share it, on the host.
struct OffloadedMemory {
  at::Tensor host;
  at::Device device{at::kCPU};
  at::Tensor back{};  // on the device again
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
  void release() {
    if (back.defined() && arrived) arrived->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    back.reset();
  }
};

/// What one forward pass sends to the host. Copies run on a stream of their own; the memory of a tensor is let go once
/// its copy has been waited for on the device, so that the host waits for nothing and the allocator may use it again.
///
/// On a CPU both ways are plain copies.
class OffloadLink final : public HookSource, public std::enable_shared_from_this<OffloadLink> {
 public:
  OffloadLink(const OffloadLimits& limits, std::optional<c10::Stream> copies) : limits_(limits), copies_(copies) {}
  OffloadLink(const OffloadLink&) = delete;
  OffloadLink& operator=(const OffloadLink&) = delete;
  ~OffloadLink() { let_go(0); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(shared_from_this());
  }
  std::int64_t bytes() const { return bytes_; }
  /// Whether a backward pass has begun.
  bool has_fetched() const { return has_fetched_; }

 private:
  struct InFlight {
    at::Tensor flat;
    c10::Event copied;
    std::int64_t bytes;
  };
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other memory gets its address
    std::weak_ptr<OffloadedMemory> memory;
    at::ScalarType dtype;
    std::int64_t version;
  };

  bool takes(const at::Tensor& tensor) const {
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg() ||
        tensor.is_quantized() || is_parameter(tensor) || is_view_of_parameter(tensor))
      return false;
    return copies_ ? tensor.device() == copies_->device() : tensor.is_cpu();
  }

  /// The memory of `tensor` on the host; null where it stays.
  std::shared_ptr<OffloadedMemory> move(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    if (!takes(tensor)) return nullptr;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    const auto version = static_cast<std::int64_t>(tensor._version());
    if (const auto known = known_.find(storage);
        known != known_.end() && known->second.version == version && known->second.dtype == tensor.scalar_type())
      if (auto memory = known->second.memory.lock()) return ++memory->users, memory;
    if (bytes < limits_.smallest || bytes_ + bytes > limits_.budget) return nullptr;
    const auto flat = at::empty({0}, tensor.options())
                          .set_(tensor.storage(), 0, {bytes / static_cast<std::int64_t>(tensor.element_size())}, {1});
    auto memory = std::make_shared<OffloadedMemory>();
    memory->device = tensor.device();
    memory->bytes = bytes;
    memory->number = order_.size();
    memory->users = 1;
    if (copies_) {
      memory->host = at::empty(flat.sizes(), flat.options().device(at::kCPU).pinned_memory(true));
      c10::Event copied(at::kCUDA);
      between(flat.device(), [&] { memory->host.copy_(flat, /*non_blocking=*/true); });
      copied.record(*copies_);
      flying_ += bytes;
      in_flight_.push_back({flat, std::move(copied), bytes});
      let_go(limits_.in_flight);
    } else {
      memory->host = flat.clone();
    }
    bytes_ += bytes;
    order_.push_back(memory);
    known_.insert_or_assign(
        storage, Known{c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), memory,
                       tensor.scalar_type(), version});
    return memory;
  }

  /// The memory on the device again, and what was saved before it on its way.
  at::Tensor fetch(OffloadedMemory& memory) {
    const std::lock_guard lock(mutex_);
    has_fetched_ = true;
    let_go(0);
    bring(memory);
    std::int64_t ahead = 0;
    for (std::size_t i = memory.number; i-- > 0 && ahead < limits_.in_flight;)
      if (const auto next = order_[i].lock()) {
        bring(*next);
        ahead += next->bytes;
      }
    if (memory.arrived) memory.arrived->block(stream(memory.device));
    auto back = memory.back;
    if (--memory.pending <= 0) memory.back.reset();
    return back;
  }
  void release(OffloadedMemory& memory) {
    const std::lock_guard lock(mutex_);
    if (--memory.users == 0) memory.release();
  }

  static c10::Stream stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }
  /// `copy()` on the copies' stream, after everything that was queued for the device so far.
  template <class Copy>
  void between(at::Device device, Copy&& copy) {
    c10::Event before(at::kCUDA);
    before.record(stream(device));
    before.block(*copies_);
    const c10::StreamGuard on(*copies_);
    copy();
  }
  void bring(OffloadedMemory& memory) {
    if (memory.back.defined()) return;
    const at::NoGradGuard no_grad;
    memory.pending = memory.users;
    if (!copies_) {
      memory.back = memory.host.clone();
      return;
    }
    memory.back = at::empty(memory.host.sizes(), memory.host.options().device(memory.device).pinned_memory(false));
    between(memory.device, [&] { memory.back.copy_(memory.host, /*non_blocking=*/true); });
    memory.arrived.emplace(at::kCUDA);
    memory.arrived->record(*copies_);
  }
  /// Lets go of memory that has been copied, and makes the device wait until no more than `most` bytes are under way.
  void let_go(std::int64_t most) {
    while (!in_flight_.empty()) {
      auto& oldest = in_flight_.front();
      if (!oldest.copied.query()) {
        if (flying_ <= most) return;
        oldest.copied.block(stream(oldest.flat.device()));
      }
      flying_ -= oldest.bytes;
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
  std::optional<c10::Stream> copies_;
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  std::vector<std::weak_ptr<OffloadedMemory>> order_;
  std::deque<InFlight> in_flight_;
  std::int64_t flying_ = 0;
  std::int64_t bytes_ = 0;
  bool has_fetched_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
