// SPDX-License-Identifier: Apache-2.0
// One process of a job, seen from its launcher. No torch here.
#pragma once

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/rank.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A file descriptor that is closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  int get() const { return value_; }
  void close() { *this = Descriptor(std::exchange(value_, -1)); }

 private:
  int value_ = -1;
};

/// The path of this program, to run it again.
inline std::string own_program() {
  std::array<char, PATH_MAX> path{};
  const auto size = ::readlink("/proc/self/exe", path.data(), path.size());
  std::string program(path.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  // A program that was rebuilt meanwhile has no path any more, but the link leads to it all the same.
  return ::access(program.c_str(), X_OK) == 0 ? program : "/proc/self/exe";
}

struct RankProcess {
  pid_t pid = -1;
  Descriptor report;  // the read end of the pipe, non-blocking
  Descriptor log;
  std::string log_path;
  bool ended = false;
  int status = 0;            // as waitpid gave it
  bool ended_by_us = false;  // a signal of the launcher's own was sent before it ended
  std::string text;          // what it reported
  std::int64_t sign = 0;     // when it gave the first sign of failure, on the shared clock; 0 if it never did
  bool follows = false;      // it says that another's end is its reason

  bool failed() const { return ended && (status != 0 || !text.empty()); }

  /// 128 plus the signal, or the exit code; 1 where the code says 0, or the launcher's signal, after a report.
  int code() const {
    if (WIFSIGNALED(status)) return ended_by_us && !text.empty() ? 1 : 128 + WTERMSIG(status);
    return WEXITSTATUS(status) == 0 && !text.empty() ? 1 : WEXITSTATUS(status);
  }

  void send(int signal_number) const {
    if (!ended && pid > 0) ::kill(pid, signal_number);
  }

  /// Takes what the rank has reported. `waiting` tells poll whether there may be more.
  void read_report() {
    std::array<char, 65536> buffer;
    const auto size = report.get() < 0 ? 0 : ::read(report.get(), buffer.data(), buffer.size());
    if (size < 0) return;  // nothing yet
    if (size > 0) {
      const char* const end = buffer.data() + size;
      const char* const time = std::from_chars(buffer.data(), end, sign).ptr;
      follows = end - time > 1 && time[1] == '1';
      text.assign(std::min(time + 3, end), end);
      if (text.empty()) text = "no reason was given";
    }
    report.close();
  }

  /// Notes whether it has ended.
  void reap() {
    if (ended || pid < 0) return;
    pid_t result = 0;
    do result = ::waitpid(pid, &status, WNOHANG);
    while (result < 0 && errno == EINTR);
    ended = result != 0;
    if (result < 0) status = 0;  // somebody else has taken its code; there is nothing to tell
  }
};

/// Starts `program` as a rank with its output in `process.log`, if that is open. No fork: a forked child of a process
/// with threads may run hardly anything, and hangs in OpenMP.
inline void spawn_rank(RankProcess& process, int rank, const std::string& program, char* const* argv,
                       std::vector<std::string> environment) {
  std::array<int, 2> pipe{-1, -1};
  int error = ::pipe2(pipe.data(), O_CLOEXEC) == 0 ? 0 : errno;
  const Descriptor write_end(pipe[1]);
  process.report = Descriptor(pipe[0]);
  if (error == 0) {
    ::fcntl(pipe[0], F_SETFL, O_NONBLOCK);
    environment.push_back("TREADLE_REPORT_FD=" + std::to_string(pipe[1]));
    std::vector<char*> variables;
    for (auto& variable : environment) variables.push_back(variable.data());
    variables.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    if (rank != 0) ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    for (const int output : {STDOUT_FILENO, STDERR_FILENO})
      if (process.log.get() >= 0) ::posix_spawn_file_actions_adddup2(&actions, process.log.get(), output);
    ::posix_spawn_file_actions_adddup2(&actions, pipe[1], pipe[1]);  // onto itself: it is kept over the exec
    error = ::posix_spawn(&process.pid, program.c_str(), &actions, nullptr, argv, variables.data());
    ::posix_spawn_file_actions_destroy(&actions);
  }
  if (error == 0) return;
  process.pid = -1;
  throw DistributedError("launch: rank " + std::to_string(rank) + " cannot be started (" + std::strerror(error) +
                         "): check the limits of processes and open files (ulimit -u, -n).");
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
