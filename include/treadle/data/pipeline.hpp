// SPDX-License-Identifier: Apache-2.0
// Threads that make things ahead, handed out in order. No torch here but for the size of its teams.
#pragma once

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Keeps LibTorch's OpenMP from starting a team for each worker; at::set_num_threads would do so for all threads.
inline void use_one_thread_here() {
  using SetThreads = void (*)(int);
  static const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  at::get_num_threads();  // the first look of each thread sets its team to the process's, so it comes before
  if (set_threads != nullptr) set_threads(1);
}

/// What a worker throws that was told to stop.
struct Abandoned {};

/// Gives the results of `Work` in order, made by `workers` threads, or by the caller where there is none.
///
/// `Work` has `claim()`, which gives a `std::optional` of the next job and is called by one thread at a time, in order;
/// and `make(job, stop)`, which is called by several at once, and throws `Abandoned` where it sees `stop` set. At most
/// `depth` results are in the making or ready. An exception of either takes its result's place in the order, and ends
/// everything. The destructor waits for what is in the making; where that waits for something itself, a `cancel()` of
/// `Work`, called from the thread that ends, makes it give up.
template <class Work>
class Pipeline {
 public:
  using Job = typename decltype(std::declval<Work&>().claim())::value_type;
  using Result = decltype(std::declval<Work&>().make(std::declval<Job>(), std::declval<const std::atomic<bool>&>()));

  Pipeline(Work work, int workers, int depth) : work_(std::move(work)), slots_(static_cast<std::size_t>(depth)) {
    try {
      threads_.reserve(static_cast<std::size_t>(workers));
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  ~Pipeline() { stop(); }

  /// The next result; none at the end, and after an exception.
  std::optional<Result> next() {
    if (stop_.load(std::memory_order_relaxed)) return std::nullopt;
    try {
      return threads_.empty() ? make_next() : take_next();
    } catch (...) {
      stop();
      throw;
    }
  }

  /// What makes the results; its parts that never change may be looked at.
  const Work& work() const { return work_; }

  /// From any thread: a thread that waits in `next`, or makes a result there, gives up, and there are no further ones.
  void cancel() {
    {
      const std::lock_guard lock(mutex_);
      stop_.store(true, std::memory_order_relaxed);
    }
    room_.notify_all();
    ready_.notify_all();
    if constexpr (requires { work_.cancel(); }) work_.cancel();
  }
  /// Ends everything, and waits until no thread is left.
  void stop() {
    cancel();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    slots_.clear();
  }

 private:
  struct Slot {
    std::optional<Result> result;
    std::exception_ptr error;
  };

  std::optional<Result> make_next() {
    auto job = work_.claim();
    if (!job) return std::nullopt;
    return work_.make(std::move(*job), stop_);
  }

  std::optional<Result> take_next() {
    Slot slot;
    {
      std::unique_lock lock(mutex_);
      Slot& next = slots_[static_cast<std::size_t>(taken_) % slots_.size()];
      ready_.wait(lock, [&] {
        return next.result || next.error || (ended_ && taken_ == claimed_) || stop_.load(std::memory_order_relaxed);
      });
      slot = std::exchange(next, Slot{});
      if (!slot.result && !slot.error) return std::nullopt;
      ++taken_;
    }
    room_.notify_one();
    if (slot.error) std::rethrow_exception(slot.error);
    return std::move(slot.result);
  }

  void run() {
    use_one_thread_here();
    for (;;) {
      std::optional<Job> job;
      Slot made;
      std::int64_t turn = 0;
      {
        const std::lock_guard claiming(claim_mutex_);
        {
          std::unique_lock lock(mutex_);
          room_.wait(lock, [&] {
            return stop_.load(std::memory_order_relaxed) ||
                   claimed_ < taken_ + static_cast<std::int64_t>(slots_.size());
          });
          if (stop_.load(std::memory_order_relaxed) || ended_) return;
        }
        try {
          job = work_.claim();
        } catch (...) {
          made.error = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        ended_ = !job;
        if (job || made.error) turn = claimed_++;
        if (!job && !made.error) {
          ready_.notify_one();
          return;
        }
      }
      if (job) try {
          made.result.emplace(work_.make(std::move(*job), stop_));
        } catch (const Abandoned&) {
          return;
        } catch (...) {
          made.error = std::current_exception();
        }
      const std::lock_guard lock(mutex_);
      slots_[static_cast<std::size_t>(turn) % slots_.size()] = std::move(made);
      if (turn == taken_) ready_.notify_one();
    }
  }

  Work work_;
  std::vector<Slot> slots_;
  std::mutex claim_mutex_;  // held before `mutex_`
  std::mutex mutex_;        // guards all that follows, and the slots
  std::condition_variable room_;
  std::condition_variable ready_;
  std::int64_t claimed_ = 0;
  std::int64_t taken_ = 0;
  bool ended_ = false;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
