// SPDX-License-Identifier: Apache-2.0
// The side of a rank that `launch` started: it ends with its launcher, and tells it why it fails. No torch here.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>

#include "treadle/error.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Nanoseconds of the clock that all processes of this host share.
inline std::int64_t shared_clock() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

/// The write end of the pipe to the launcher, or -1.
inline std::atomic<int>& report_pipe() {
  static std::atomic<int> pipe{-1};
  return pipe;
}

/// A report is the time, a space, whether it is only the end of others that ends this rank (1, else 0), a space and the
/// text; the first one counts. Returns whether a launcher was told.
inline bool report_to_launcher(std::string_view text, bool follows = false) {
  constexpr std::size_t longest = 32'000;  // less than a pipe takes, so that nobody has to be reading
  const int pipe = report_pipe().load();
  static std::atomic<bool> told{false};
  if (pipe < 0) return false;
  if (told.exchange(true)) return true;
  const std::string report =
      std::to_string(shared_clock()) + (follows ? " 1 " : " 0 ") + std::string(text.substr(0, longest));
  // A launcher that has gone takes this process with it, so there is no signal for a broken pipe to care about.
  return ::write(pipe, report.data(), report.size()) == static_cast<ssize_t>(report.size());
}

/// What an exception says, without the list of frames that LibTorch appends to it.
inline std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find("\nException raised from "));
}

/// The text of the exception that is being handled.
inline std::string text_of_current_exception() {
  try {
    throw;
  } catch (const std::exception& error) {
    return text_of(error);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

/// In a rank, `std::terminate` tells the launcher what was not caught before it aborts.
[[noreturn]] inline void report_and_abort() {
  report_to_launcher(std::current_exception() ? text_of_current_exception() : "std::terminate was called");
  std::abort();
}

/// Whether this process is a rank that `launch` started. The first call ties it to its launcher: the kernel kills it
/// when that ends in any way.
inline bool join_launcher() {
  static const bool joined = [] {
    const char* const launcher = std::getenv("TREADLE_LAUNCHER_PID");
    const char* const pipe = std::getenv("TREADLE_REPORT_FD");
    if (launcher == nullptr || pipe == nullptr) return false;
    const auto pid = std::atol(launcher);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != pid) throw DistributedError("launch: the launcher of this rank has ended: start the job anew.");
    const int fd = std::atoi(pipe);
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    report_pipe() = fd;
    ::unsetenv("TREADLE_LAUNCHER_PID");  // programs that this one starts are no ranks
    ::unsetenv("TREADLE_REPORT_FD");
    std::set_terminate(&report_and_abort);
    return true;
  }();
  return joined;
}

}  // namespace detail

/// Says why this rank is about to fail. `launch` prints the text of the rank that failed first, and ends the job if
/// this one does not end by itself; without it, the text is written as a warning. The first report of a process counts.
/// One that `follows` from another rank's end, as a lost connection does, waits for that rank's own.
inline void report_failure(std::string_view text, bool follows = false) {
  if (!detail::report_to_launcher(text, follows)) warn_of_this_rank(text);
}

/// Runs `body()` and returns the code to end the program with: what it returns, 0 if that is nothing, and 1 after an
/// exception, whose text is reported with `report_failure`.
template <class Body>
int run_rank(Body&& body) {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
      body();
      return 0;
    } else {
      return body();
    }
  } catch (const DistributedError& error) {
    report_failure(detail::text_of(error), /*follows=*/true);
  } catch (...) {
    report_failure(detail::text_of_current_exception());
  }
  return 1;
}

}  // namespace v0_1
}  // namespace treadle
