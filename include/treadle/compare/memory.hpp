// SPDX-License-Identifier: Apache-2.0
// How much memory tensors take meanwhile, on the CPU and on CUDA, without any CUDA header.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Peak memory on one device, above what was there when the meter started.
struct PeakMemory {
  std::int64_t allocated = 0;              ///< bytes of tensors
  std::optional<std::int64_t> reserved{};  ///< bytes that the caching allocator took from the device
};

/// Measures from its construction on. CUDA's caching allocator keeps the figures itself; of the CPU's one the meter
/// hears through the hook that LibTorch's profiler uses, so nothing is measured there while a profiler runs.
class MemoryMeter {
 public:
  MemoryMeter() {
    if (cuda_available()) {
      at::globalContext().lazyInitDevice(at::kCUDA);
      auto* allocator = c10::getDeviceAllocator(at::kCUDA);
      allocator->emptyCache();
      for (int i = 0; i < at::detail::getCUDAHooks().deviceCount(); ++i) {
        allocator->resetPeakStats(static_cast<c10::DeviceIndex>(i));
        before_.push_back(allocator->getDeviceStats(static_cast<c10::DeviceIndex>(i)));
      }
    }
    if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) return;
    host_ = std::make_shared<Host>();
    guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, host_);
  }
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// The peak so far on `device`; nothing where it cannot be told.
  std::optional<PeakMemory> peak(c10::Device device) const {
    const auto i = static_cast<std::size_t>(std::max<int>(device.index(), 0));
    if (device.is_cuda() && i < before_.size()) {
      const auto now = c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(i));
      constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
      return PeakMemory{now.allocated_bytes[all].peak - before_[i].allocated_bytes[all].current,
                        now.reserved_bytes[all].peak - before_[i].reserved_bytes[all].current};
    }
    if (device.is_cpu() && host_) return PeakMemory{host_->peak(), std::nullopt};
    return std::nullopt;
  }

 private:
  class Host : public c10::MemoryReportingInfoBase {
   public:
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device device) override {
      if (!device.is_cpu()) return;
      const std::scoped_lock lock(mutex_);
      current_ += size;
      peak_ = std::max(peak_, current_);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t peak() const {
      const std::scoped_lock lock(mutex_);
      return peak_;
    }

   private:
    mutable std::mutex mutex_;  // a backward pass may allocate on a thread of its own
    std::int64_t current_ = 0;
    std::int64_t peak_ = 0;
  };

  std::vector<c10::CachingDeviceAllocator::DeviceStats> before_;
  std::shared_ptr<Host> host_;
  std::optional<c10::DebugInfoGuard> guard_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
