// SPDX-License-Identifier: Apache-2.0
// Signals as events that a loop can wait for. No torch here.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

struct CaughtSignal {
  int number;
  bool from_terminal;  // then the kernel has sent it to the whole foreground group, ranks included
};

/// Catches SIGINT, SIGTERM, SIGHUP and SIGCHLD while it lives, and puts back what was there before. What the process
/// ignores (SIGHUP under nohup) stays ignored.
///
/// Handlers, and not a blocked mask: threads that LibTorch has made before would take the signals and end the process.
class SignalRelay {
 public:
  SignalRelay() {
    if (::pipe2(pipe_.data(), O_CLOEXEC | O_NONBLOCK) != 0)
      throw DistributedError("launch: no pipe can be made (" + std::string(std::strerror(errno)) +
                             "): raise the limit of open files (ulimit -n).");
    int none = -1;
    if (!write_end().compare_exchange_strong(none, pipe_[1])) {
      close_pipe();
      throw ConfigError("launch: another launch is running in this process: wait for its end.");
    }
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) {
      struct sigaction before {};
      ::sigaction(number, nullptr, &before);
      if (number != SIGCHLD && before.sa_handler == SIG_IGN) continue;
      struct sigaction mine {};
      mine.sa_sigaction = &SignalRelay::handle;
      mine.sa_flags = SA_SIGINFO | SA_RESTART | SA_NOCLDSTOP;
      ::sigemptyset(&mine.sa_mask);
      ::sigaction(number, &mine, nullptr);
      before_.emplace_back(number, before);
    }
  }
  SignalRelay(const SignalRelay&) = delete;
  SignalRelay& operator=(const SignalRelay&) = delete;
  ~SignalRelay() {
    for (const auto& [number, action] : before_) ::sigaction(number, &action, nullptr);
    write_end() = -1;
    close_pipe();
  }

  /// Becomes readable when a signal has come.
  int descriptor() const { return pipe_[0]; }

  /// The next signal that has come, if there is one.
  std::optional<CaughtSignal> next() {
    unsigned char word = 0;
    if (::read(pipe_[0], &word, 1) != 1) return std::nullopt;
    return CaughtSignal{word & 0x7f, (word & 0x80) != 0};
  }

 private:
  static std::atomic<int>& write_end() {
    static std::atomic<int> end{-1};
    return end;
  }
  static void handle(int number, siginfo_t* info, void*) {
    const int error = errno;
    const auto word = static_cast<unsigned char>(number | (info->si_code == SI_KERNEL ? 0x80 : 0));
    // A full pipe loses the signal, but then there is enough to wake up for.
    if (::write(write_end().load(), &word, 1) != 1) errno = error;
    errno = error;
  }
  void close_pipe() {
    for (const int end : pipe_) ::close(end);
  }

  std::array<int, 2> pipe_{-1, -1};
  std::vector<std::pair<int, struct sigaction>> before_;
};

/// "SIGKILL" for the signals that end programs, else "signal 40".
inline std::string signal_name(int number) {
  constexpr std::pair<int, const char*> names[] = {
      {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},   {SIGABRT, "SIGABRT"},
      {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"},
      {SIGUSR2, "SIGUSR2"}, {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"}};
  for (const auto& [value, name] : names)
    if (value == number) return name;
  return "signal " + std::to_string(number);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
