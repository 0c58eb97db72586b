// SPDX-License-Identifier: Apache-2.0
// Running this program as several processes on this host, without any other launcher.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/environment.hpp"
#include "treadle/runtime/job.hpp"
#include "treadle/runtime/rank.hpp"
#include "treadle/runtime/rank_process.hpp"
#include "treadle/runtime/store.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {

/// How `launch` treats its ranks. After a failure or a signal a job ends within `grace` + `kill_grace` and a little.
struct LaunchOptions {
  std::filesystem::path
      log_dir;  ///< if given, rank r writes into `rank-<r>.log` there instead of the launcher's output
  std::chrono::milliseconds grace{10'000};  ///< from the first failure, or a signal, to SIGTERM for the other ranks
  std::chrono::milliseconds kill_grace{10'000};  ///< from there to SIGKILL
};

namespace detail {

/// The environment of a rank: this one, with the variables of the world in place of those that it may have had.
inline std::vector<std::string> rank_environment(int rank, int ranks, std::uint16_t port) {
  const std::string size = std::to_string(ranks);
  std::vector<std::pair<std::string, std::string>> own{{"RANK", std::to_string(rank)},
                                                       {"WORLD_SIZE", size},
                                                       {"LOCAL_RANK", std::to_string(rank)},
                                                       {"LOCAL_WORLD_SIZE", size},
                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                       {"MASTER_PORT", std::to_string(port)},
                                                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                       {"TORCHELASTIC_RESTART_COUNT", "0"},
                                                       {"TREADLE_LAUNCHED", "1"},
                                                       {"TREADLE_LAUNCHER_PID", std::to_string(::getpid())}};
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (threads == nullptr || *threads == '\0') {  // each rank would take all cores
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    own.emplace_back("OMP_NUM_THREADS", std::to_string(std::max(1, cores / ranks)));
  }
  std::vector<std::string> result;
  for (char** variable = ::environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const auto name = text.substr(0, text.find('='));
    if (std::none_of(own.begin(), own.end(), [&](const auto& one) { return one.first == name; }))
      result.emplace_back(text);
  }
  for (const auto& [name, value] : own) result.push_back(name + "=" + value);
  return result;
}

/// Opens standard input, output and error where they are closed, or a pipe or socket would take their numbers, and get
/// what a rank prints.
inline void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) == -1 && errno == EBADF && ::open("/dev/null", O_RDWR) < 0) return;
}

inline void check_launch(int ranks, const LaunchOptions& options) {
  if (ranks < 1) {
    throw ConfigError("launch: " + std::to_string(ranks) + " processes cannot be started: ask for at least 1.");
  }
  if (options.grace.count() < 0 || options.kill_grace.count() < 0)
    throw ConfigError("launch: grace and kill_grace must not be negative: give milliseconds, 0 or more.");
  const EnvironmentLookup lookup = [](const char* name) { return std::getenv(name); };
  const auto starter = started_by(Environment(lookup));
  if (starter == StartedBy::Nobody || starter == StartedBy::SlurmBatch) return;
  if (const auto world = World::from(lookup); world.world_size > 1 && ranks > 1) {
    throw ConfigError("launch: this process is rank " + std::to_string(world.rank) + " of " +
                      std::to_string(world.world_size) + " already (" + world.launcher +
                      "), and cannot start ranks of its own: leave launch out, or ask it for 1 process.");
  }
}

/// Opens the file for the output of a rank; nothing if there is no folder for it.
inline Descriptor open_log(const std::filesystem::path& path) {
  if (path.empty()) return Descriptor();
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (file.get() >= 0) return file;
  throw ConfigError("launch: cannot write '" + path.string() + "' (" + std::strerror(errno) +
                    "): name a log_dir that can be written.");
}

}  // namespace detail

/// Runs this program, with the same arguments, as `ranks` processes on this host, and returns the code to end with when
/// all have ended; returns nothing in such a process, which goes on as a rank. Call it early in main:
///
///     if (auto code = td::launch(ranks, argc, argv)) return *code;
///     return td::run_rank([&] { train(td::World::from_environment()); });
///
/// With 1 process nothing is started and this one goes on. The store is served by the launcher, so no port can be lost
/// to another program. The code is 0 if all ranks ended with 0, else that of the rank that failed first (128 + number
/// for a signal); its reason is written once. SIGINT, SIGTERM and SIGHUP are passed on to the ranks. Rank 0 has the
/// launcher's input. OMP_NUM_THREADS is set to cores / ranks, at least 1, unless it is set. Throws `ConfigError` for
/// what cannot work and `DistributedError` if a process cannot be started.
inline std::optional<int> launch(int ranks, int argc, char** argv, const LaunchOptions& options = {}) {
  if (detail::join_launcher()) return std::nullopt;
  detail::check_launch(ranks, options);
  if (ranks == 1) return std::nullopt;
  detail::open_standard_streams();
  const auto store = detail::serve_store(0, std::chrono::seconds(30));
  std::vector<char*> arguments(argv, argv + argc);
  arguments.push_back(nullptr);
  const auto program = detail::own_program();
  std::fflush(stdout);
  detail::Job job(options.grace, options.kill_grace);
  for (int rank = 0; rank < ranks; ++rank) {
    std::filesystem::path log_path;
    if (!options.log_dir.empty()) log_path = options.log_dir / ("rank-" + std::to_string(rank) + ".log");
    job.start(detail::open_log(log_path), log_path.string(), program, arguments.data(),
              detail::rank_environment(rank, ranks, store->getPort()));
  }
  return job.run();
}

}  // namespace v0_1
}  // namespace treadle
