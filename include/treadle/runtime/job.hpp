// SPDX-License-Identifier: Apache-2.0
// Watching the ranks of a job until the last one has ended. No torch here.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treadle/runtime/rank_process.hpp"
#include "treadle/runtime/signal_relay.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The ranks from their start to their end. After the first failure, or a signal, those that go on get `grace` to end
/// by themselves, then SIGTERM, then after `kill_grace` SIGKILL.
class Job {
 public:
  using Clock = std::chrono::steady_clock;

  Job(std::chrono::milliseconds grace, std::chrono::milliseconds kill_grace) : grace_(grace), kill_grace_(kill_grace) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {  // after a throw: what was started must not stay
    for (const auto& process : processes_) process.send(SIGKILL);
    for (const auto& process : processes_)
      if (!process.ended && process.pid > 0) ::waitpid(process.pid, nullptr, 0);
  }

  /// Starts the next rank; see `spawn_rank`.
  void start(Descriptor log, std::string log_path, const std::string& program, char* const* argv,
             std::vector<std::string> environment) {
    auto& process = processes_.emplace_back();
    process.log = std::move(log);
    process.log_path = std::move(log_path);
    spawn_rank(process, static_cast<int>(processes_.size()) - 1, program, argv, std::move(environment));
  }

  /// Returns when all ranks have ended: 0, or the code of the one that failed first, whose text is then written.
  int run() {
    while (std::any_of(processes_.begin(), processes_.end(), [](const auto& process) { return !process.ended; })) {
      wait_for_event();
      forward_signals();
      collect();
      tell_first_failure(false);
      if (!press_on()) break;
    }
    tell_first_failure(true);
    return first_ ? processes_[*first_].code() : 0;
  }

 private:
  // Two signs of failure cannot always be told apart by their time: peers may report a lost connection before the
  // kernel says that the process at its other end has died. So the first failure is named `settle` after the first
  // sign, and a death without a report counts as `head_start` earlier than it was noticed. Where all signs so far are
  // of ranks that lost another, that one gets longer: it may still be busy with ending.
  static constexpr std::chrono::milliseconds settle{200};
  static constexpr std::chrono::seconds settle_without_cause{5};
  static constexpr std::int64_t head_start = 500'000'000;  // ns

  void wait_for_event() {
    std::vector<pollfd> waiting{{signals_.descriptor(), POLLIN, 0}};
    for (const auto& process : processes_)
      if (process.report.get() >= 0) waiting.push_back({process.report.get(), POLLIN, 0});
    auto until = Clock::now() + std::chrono::seconds(1);  // a second look costs nothing
    for (const auto& deadline : {settled_, terminate_at_, kill_at_, give_up_at_})
      if (deadline) until = std::min(until, *deadline);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    ::poll(waiting.data(), waiting.size(), static_cast<int>(std::max<std::int64_t>(left, 0)));
  }

  void forward_signals() {
    while (const auto caught = signals_.next()) {
      if (caught->number == SIGCHLD) continue;
      interrupted_by_ = caught->number;
      if (!(caught->from_terminal && caught->number == SIGINT)) send_to_all(caught->number);
      hurry();
    }
  }

  void collect() {
    for (auto& process : processes_) {
      if (process.ended) continue;
      process.reap();  // first, so that the report of one that has ended is complete
      process.read_report();
      if (process.ended && process.status != 0 && process.sign == 0) {
        process.sign = shared_clock() - head_start;
        process.follows = process.ended_by_us;
      }
      if (process.sign == 0) continue;
      if (!told_ && (!settled_ || (!process.follows && !cause_))) {
        const auto now = Clock::now();
        const auto wait = process.follows ? std::chrono::milliseconds(settle_without_cause) : settle;
        settled_ = settled_ ? std::min(*settled_, now + wait) : now + wait;
        cause_ = !process.follows;
      }
      hurry();
      if (process.ended && process.log.get() >= 0 && !process.text.empty()) {
        const std::string line = process.text + "\n";
        if (::write(process.log.get(), line.data(), line.size()) < 0) continue;  // the text is told anyway
      }
    }
  }

  /// Starts the time that the others have left.
  void hurry() {
    if (terminate_at_ || kill_at_ || give_up_at_) return;
    terminate_at_ = Clock::now() + grace_;
  }

  /// Names the first failure, once. Who gave the first sign may be still ending; it is told when its code is known.
  void tell_first_failure(bool all_ended) {
    if (told_ || (!all_ended && (!settled_ || Clock::now() < *settled_))) return;
    settled_.reset();
    const auto order = [&](std::size_t i) { return std::pair(processes_[i].follows, processes_[i].sign); };
    for (std::size_t i = 0; i < processes_.size(); ++i)
      if (processes_[i].sign != 0 && (!first_ || order(i) < order(*first_))) first_ = i;
    if (!first_ || !processes_[*first_].ended) return;
    told_ = true;
    const auto& process = processes_[*first_];
    const bool signaled = WIFSIGNALED(process.status);
    if (interrupted_by_ != 0 && signaled && process.text.empty() && WTERMSIG(process.status) != SIGKILL) {
      warn("launch: the job was ended by " + signal_name(interrupted_by_) + ".");
      return;
    }
    std::string sentence = "launch: rank " + std::to_string(*first_) + " of " + std::to_string(processes_.size());
    if (signaled && !(process.ended_by_us && !process.text.empty())) {
      sentence += " was killed by " + signal_name(WTERMSIG(process.status));
      if (WTERMSIG(process.status) == SIGKILL && !process.ended_by_us)
        sentence += ", which the kernel sends when memory is exhausted";
    } else {
      sentence += " failed with exit code " + std::to_string(process.code());
    }
    if (!process.log_path.empty()) sentence += " (output in '" + process.log_path + "')";
    warn(sentence + (process.text.empty() ? "." : ": " + process.text));
  }

  /// Ends what does not end by itself; returns false when nothing is left to try.
  bool press_on() {
    const auto now = Clock::now();
    if (terminate_at_ && now >= *terminate_at_) {
      send_own(SIGTERM);
      terminate_at_.reset();
      kill_at_ = now + kill_grace_;
    }
    if (kill_at_ && now >= *kill_at_) {
      send_own(SIGKILL);
      kill_at_.reset();
      give_up_at_ = now + std::chrono::seconds(10);
    }
    return !(give_up_at_ && now >= *give_up_at_);  // stuck in the kernel: it dies when the kernel lets it
  }

  void send_own(int signal_number) {
    for (auto& process : processes_) {
      process.ended_by_us |= !process.ended;
      process.send(signal_number);
    }
  }
  void send_to_all(int signal_number) {
    for (const auto& process : processes_) process.send(signal_number);
  }

  std::chrono::milliseconds grace_, kill_grace_;
  SignalRelay signals_;
  std::vector<RankProcess> processes_;
  std::optional<Clock::time_point> settled_, terminate_at_, kill_at_, give_up_at_;
  std::optional<std::size_t> first_;
  bool told_ = false;
  bool cause_ = false;  // there is a sign that follows from no other
  int interrupted_by_ = 0;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
