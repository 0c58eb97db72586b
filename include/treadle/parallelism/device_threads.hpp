// SPDX-License-Identifier: Apache-2.0
// A thread a device, kept from step to step.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// One thread for each device but the first, whose share the calling thread does itself.
///
/// A thread takes over the caller's grad mode, dispatch keys and autocast, and its current stream of that device, so
/// that what the caller has queued there runs before. One caller at a time.
class DeviceThreads {
 public:
  DeviceThreads() = default;
  explicit DeviceThreads(std::vector<at::Device> devices) : devices_(std::move(devices)) {
    for (std::size_t i = 1; i < devices_.size(); ++i) threads_.emplace_back([this, i] { work(i); });
  }
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;
  ~DeviceThreads() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    begins_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  /// Calls `f(i)` for each device, side by side, and returns when all have returned. `f` must not throw.
  template <class F>
  void run(F&& f) {
    if (threads_.empty()) return f(std::size_t{0});
    const at::ThreadLocalState state;
    std::vector<c10::Stream> streams;
    if (!devices_.front().is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(devices_.front().type());
      for (const auto device : devices_) streams.push_back(guard.getStream(device));
    }
    {
      const std::lock_guard lock(mutex_);
      call_ = [](void* object, std::size_t i) { (*static_cast<std::remove_reference_t<F>*>(object))(i); };
      object_ = &f;
      state_ = &state;
      streams_ = &streams;
      busy_ = threads_.size();
      ++round_;
    }
    begins_.notify_all();
    f(std::size_t{0});
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  void work(std::size_t i) {
    for (std::size_t done = 0;; ++done) {
      {
        std::unique_lock lock(mutex_);
        begins_.wait(lock, [&] { return ends_ || round_ != done; });
        if (ends_) return;
      }
      one_round(i);
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) ended_.notify_one();
    }
  }
  // What it reads was written before the round began, and is not written again before it has ended.
  void one_round(std::size_t i) {
    const at::ThreadLocalStateGuard state(*state_);
    if (!streams_->empty()) {
      const c10::impl::VirtualGuardImpl guard(devices_[i].type());
      guard.setDevice(devices_[i]);
      guard.exchangeStream((*streams_)[i]);
    }
    call_(object_, i);
  }

  std::vector<at::Device> devices_;
  std::mutex mutex_;
  std::condition_variable begins_;
  std::condition_variable ended_;
  std::size_t round_ = 0;
  std::size_t busy_ = 0;
  bool ends_ = false;
  void (*call_)(void*, std::size_t) = nullptr;
  void* object_ = nullptr;
  const at::ThreadLocalState* state_ = nullptr;
  const std::vector<c10::Stream>* streams_ = nullptr;
  std::vector<std::thread> threads_;  // last: they use what stands above
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
