// SPDX-License-Identifier: Apache-2.0
// Signals that ask a fit to save and end, within a time that is bounded whatever it waits for. No torch here.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/signal_relay.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Catches SIGTERM, SIGINT and SIGUSR1 while it lives, and puts back what was there before.
///
/// The first signal sets `flag()`. Half of `budget` later whatever `on_wait` was given last is called, to end a wait;
/// at its end the process leaves with 128 plus the signal's number, after `last_words`. A second signal does what it
/// does in a process that does not handle it.
class Interruption {
 public:
  Interruption(std::chrono::milliseconds budget, std::function<std::string()> last_words)
      : budget_(budget), last_words_(std::move(last_words)) {
    if (::pipe2(pipe_.data(), O_CLOEXEC) != 0)
      throw ConfigError("treadle::Snapshots: no pipe can be made for signals (" + std::string(std::strerror(errno)) +
                        "); raise the limit of open files (ulimit -n).");
    Interruption* none = nullptr;
    if (!instance().compare_exchange_strong(none, this)) {
      close_pipe();
      throw ConfigError("treadle::Snapshots: another fit of this process handles signals; let one of them do so.");
    }
    thread_ = std::thread([this] { watch(); });
    for (const int number : {SIGTERM, SIGINT, SIGUSR1}) {
      struct sigaction mine {};
      struct sigaction before {};
      mine.sa_handler = &Interruption::handle;
      mine.sa_flags = SA_RESTART;
      ::sigemptyset(&mine.sa_mask);
      ::sigaction(number, &mine, &before);
      before_.emplace_back(number, before);
    }
  }
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;
  ~Interruption() {
    for (const auto& [number, action] : before_) ::sigaction(number, &action, nullptr);
    instance() = nullptr;
    const char over = 0;
    while (::write(pipe_[1], &over, 1) < 0 && errno == EINTR) {
    }
    thread_.join();
    close_pipe();
  }

  const std::atomic<bool>& flag() const { return flag_; }
  /// The number of the signal that came first, or 0.
  int signal() const { return signal_.load(); }
  /// Whether a wait was ended.
  bool ended_wait() const { return ended_wait_.load(); }
  /// What ends the wait that begins now; an empty function where nothing can.
  void on_wait(std::function<void()> end) {
    const std::lock_guard lock(mutex_);
    end_wait_ = std::move(end);
  }

 private:
  static std::atomic<Interruption*>& instance() {
    static std::atomic<Interruption*> it{nullptr};
    return it;
  }
  static void handle(int number) {
    const int error = errno;
    Interruption* self = instance().load();
    if (self == nullptr) return;
    if (self->flag_.exchange(true)) {  // the second one
      ::signal(number, SIG_DFL);
      ::raise(number);
      return;
    }
    self->signal_ = number;
    const char word = 1;
    if (::write(self->pipe_[1], &word, 1) != 1) errno = error;
    errno = error;
  }

  void watch() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    if (!wait_for_word()) return;
    const auto half = static_cast<int>(budget_.count() / 2);
    if (word_within(half)) return;
    {
      const std::lock_guard lock(mutex_);
      if (end_wait_) {
        ended_wait_ = true;
        end_wait_();
      }
    }
    if (word_within(static_cast<int>(budget_.count()) - half)) return;
    warn_of_this_rank("treadle::Snapshots: " + std::to_string(budget_.count() / 1000) + " s after " +
                      signal_name(signal()) + " the step under way has not ended; leaving. " + last_words_());
    ::_exit(128 + signal());
  }
  /// Whether the fit ended within the time.
  bool word_within(int milliseconds) const {
    pollfd watched{pipe_[0], POLLIN, 0};
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      if (left.count() <= 0) return false;
      if (::poll(&watched, 1, static_cast<int>(left.count())) > 0) return true;
    }
  }
  /// Whether the word that comes is that of a signal.
  bool wait_for_word() const {
    char word = 0;
    while (::read(pipe_[0], &word, 1) < 0 && errno == EINTR) {
    }
    return word == 1;
  }
  void close_pipe() {
    for (const int end : pipe_) ::close(end);
  }

  std::chrono::milliseconds budget_;
  std::function<std::string()> last_words_;
  std::array<int, 2> pipe_{-1, -1};
  std::vector<std::pair<int, struct sigaction>> before_;
  std::atomic<bool> flag_ = false;
  std::atomic<int> signal_ = 0;
  std::atomic<bool> ended_wait_ = false;
  std::mutex mutex_;
  std::function<void()> end_wait_;
  std::thread thread_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
