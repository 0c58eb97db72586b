// SPDX-License-Identifier: Apache-2.0
// Marked regions that are cheap to recompute: what one has produced is dropped wherever it is saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "treadle/checkpointing/block_call.hpp"
#include "treadle/checkpointing/frame_backward.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/saved_tensor.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Looks at every tensor that one forward pass saves: what lies in the memory of a region's output is recomputed, other
/// tensors are kept as they would be without.
class RegionOutputs final : public HookSource, public std::enable_shared_from_this<RegionOutputs> {
 public:
  /// Remembers that `frame` has produced `tensor` in `call`, unless it lies in the memory of a parameter.
  void add(const std::shared_ptr<Frame>& frame, const std::shared_ptr<BlockCall>& call, std::size_t position,
           const at::Tensor& tensor) {
    if (!tensor.has_storage() || is_parameter(tensor) || is_view_of_parameter(tensor)) return;
    // What is gone cannot be saved any more: nothing is kept for it.
    std::erase_if(by_storage_, [](const auto& one) { return one.second.storage.expired(); });
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto index = frame->add_output(position, tensor);
    by_storage_.insert_or_assign(
        storage,
        Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl()), frame, call, index,
              tensor.scalar_type(), tensor.storage_offset(), static_cast<std::int64_t>(tensor._version())});
  }
  void clear() { by_storage_.clear(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(shared_from_this());
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other memory gets its address
    std::shared_ptr<Frame> frame;
    std::shared_ptr<BlockCall> call;  // which the frame itself does not keep
    std::size_t index;
    at::ScalarType dtype;
    std::int64_t offset;
    std::int64_t version;
  };

  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<RegionOutputs> outputs) : outputs_(std::move(outputs)) {}
    Hooks(const Hooks&) = delete;
    Hooks& operator=(const Hooks&) = delete;
    ~Hooks() override {
      if (frame_) frame_->release_output(index_);
    }

    void call_pack_hook(const at::Tensor& tensor) override {
      const auto outputs = std::move(outputs_);  // the pass is over when this is used
      version_ = static_cast<std::int64_t>(tensor._version());
      const Entry* entry = outputs->find(tensor);
      if (!entry) {
        kept_ = kept_form(tensor);
        return;
      }
      frame_ = entry->frame;
      call_ = entry->call;
      index_ = entry->index;
      offset_ = tensor.storage_offset() - entry->offset;
      sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
      strides_.assign(tensor.strides().begin(), tensor.strides().end());
      frame_->use_output(index_);
    }
    at::Tensor call_unpack_hook() override {
      if (frame_) {
        const auto whole = frame_->take_output(index_);
        return whole.as_strided(sizes_, strides_, whole.storage_offset() + offset_);
      }
      if (static_cast<std::int64_t>(kept_._version()) != version_) refuse_changed("checkpointing::CheckpointSelective");
      return kept_;
    }

   private:
    std::shared_ptr<RegionOutputs> outputs_;
    at::Tensor kept_;
    std::int64_t version_ = 0;
    std::shared_ptr<Frame> frame_;
    std::shared_ptr<BlockCall> call_;
    std::size_t index_ = 0;
    std::int64_t offset_ = 0;
    c10::SmallVector<std::int64_t, 5> sizes_;
    c10::SmallVector<std::int64_t, 5> strides_;
  };

  const Entry* find(const at::Tensor& tensor) const {
    if (!tensor.has_storage() || tensor.is_conj() || tensor.is_neg()) return nullptr;
    const auto found = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == by_storage_.end() || found->second.dtype != tensor.scalar_type() ||
        found->second.version != static_cast<std::int64_t>(tensor._version()))
      return nullptr;
    return &found->second;
  }

  std::unordered_map<const c10::StorageImpl*, Entry> by_storage_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
