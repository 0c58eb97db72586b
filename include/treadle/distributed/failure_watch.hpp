// SPDX-License-Identifier: Apache-2.0
// A look at the store beside the training, for word that another rank has failed.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Calls `act` once, on a thread of its own, `grace` after another rank has left word under `key` of `store`.
///
/// The grace lets the ranks meet once more where the one that failed takes part in their step to tell them. A rank that
/// fails itself calls `stop`: what all ranks do alike is nobody's loss.
class FailureWatch {
 public:
  FailureWatch(const c10::intrusive_ptr<c10d::Store>& store, std::string key, std::chrono::milliseconds interval,
               std::chrono::milliseconds grace, std::function<void()> act)
      : store_(store->clone()),  // a connection of its own: a waiting collective may hold the other one's lock
        key_(std::move(key)),
        thread_([this, interval, grace, act = std::move(act)] {
          try {
            while (!sleep(interval))
              if (store_->check({key_})) {
                if (!sleep(grace)) act();
                return;
              }
          } catch (const std::exception&) {  // the store has gone, and with it those who could leave word
          }
        }) {}
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;
  ~FailureWatch() {
    stop();
    thread_.join();
  }

  void stop() {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
    wake_.notify_all();
  }

 private:
  /// Whether it is time to stop, after `duration` at the latest.
  bool sleep(std::chrono::milliseconds duration) {
    std::unique_lock lock(mutex_);
    return wake_.wait_for(lock, duration, [&] { return stopped_; });
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string key_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
