// SPDX-License-Identifier: Apache-2.0
// The store through which the processes of a job find each other.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/reachable.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {

using Store = c10::intrusive_ptr<c10d::Store>;

/// How long `connect` waits for the other processes if it is not told: 30 s on one host, 5 min on several.
inline std::chrono::milliseconds default_timeout(const World& world) {
  return world.on_one_host() ? std::chrono::seconds(30) : std::chrono::minutes(5);
}

namespace detail {

/// Serves a store on `port`, or on a free one if that is 0; `DistributedError` if it cannot be.
inline c10::intrusive_ptr<c10d::TCPStore> serve_store(std::uint16_t port, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const std::string where = "World: the store cannot be served on port " + std::to_string(port) + " of this host";
    if (text.find("EADDRINUSE") == text.npos) throw DistributedError(where + " (" + text + ").");
    throw DistributedError(where +
                           ", because another program uses it: end that program, or set MASTER_PORT to a free port on "
                           "all ranks.");
  }
}

/// The store that this process serves as rank 0. It lives as long as the process, because other ranks may need it for
/// longer than the one who connected first.
inline void keep_store_served(std::uint16_t port, std::chrono::milliseconds timeout) {
  static std::mutex mutex;
  static std::map<std::uint16_t, c10::intrusive_ptr<c10d::TCPStore>> served;
  const std::scoped_lock lock(mutex);
  if (auto& mine = served[port]; !mine) mine = serve_store(port, timeout);
}

/// A client of the store at `host`; null if it does not answer until `deadline`.
///
/// LibTorch waits for the answer of something that is no store without a limit, so the client is made on a thread that
/// can be left behind.
inline c10::intrusive_ptr<c10d::TCPStore> make_client(const std::string& host, const c10d::TCPStoreOptions& options,
                                                      std::chrono::steady_clock::time_point deadline) {
  const auto made = std::make_shared<std::promise<c10::intrusive_ptr<c10d::TCPStore>>>();
  auto client = made->get_future();
  std::thread([made, host, options] {
    try {
      made->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  if (client.wait_until(deadline) != std::future_status::ready) return {};
  try {
    return client.get();
  } catch (const c10::Error&) {
    if (std::chrono::steady_clock::now() < deadline) throw;
    return {};  // LibTorch's own limit, which ends a moment later, was seen first
  }
}

inline constexpr std::size_t shown_ranks = 8;
/// "rank 3", "ranks 1 and 2", "ranks 1, 2, 3 and 12 more", where there are `total` of which `ranks` are the first.
inline std::string list_of_ranks(const std::vector<int>& ranks, std::size_t total) {
  constexpr std::size_t shown = shown_ranks;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), shown); ++i) {
    const bool last = i + 1 == ranks.size();
    text += (i == 0 ? "" : last ? " and " : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() <= shown ? text : text + " and " + std::to_string(total - shown) + " more";
}

/// Waits until all ranks have come here; names those that have not at `deadline`.
inline void wait_for_ranks(c10d::Store& store, const World& world, std::chrono::steady_clock::time_point deadline,
                           const std::string& where) {
  const auto key = [](int rank) { return "arrived/" + std::to_string(rank); };
  if (store.add(key(world.rank), 1) > 1) {
    throw DistributedError(where + " found another process with the same rank: another job uses the same host and " +
                           "port, or a rank was started twice; set MASTER_PORT to a port of this job's own.");
  }
  if (store.add("arrived", 1) == world.world_size) store.set("complete", std::vector<std::uint8_t>{1});
  // Asked again and again, because a wait of LibTorch's that times out writes warnings of its own.
  using std::chrono::milliseconds;
  for (auto pause = milliseconds(2); !store.check({"complete"}); pause = std::min(2 * pause, milliseconds(100))) {
    if (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    std::vector<int> missing;  // the first of them: a world_size that is a mistake may be any number
    for (int rank = 0; rank < world.world_size && missing.size() <= shown_ranks; ++rank)
      if (!store.check({key(rank)})) missing.push_back(rank);
    const auto arrived = std::min<std::int64_t>(store.add("arrived", 0), world.world_size);
    throw DistributedError(
        where + " waited in vain for " + list_of_ranks(missing, static_cast<std::size_t>(world.world_size - arrived)) +
        ": look at what ended them, start them, or wait longer (start_timeout of a policy, timeout of connect).");
  }
}

}  // namespace detail

/// Connects to the store of `world` and waits until all ranks have; each call is a meeting of its own, with keys of its
/// own, so all ranks make the same calls in the same order. Rank 0 serves the store unless the launcher does.
///
/// `timeout` (default: `default_timeout`) limits this call, and later waits on the store. Throws `DistributedError` if
/// the port is in use, if nobody serves it, or if ranks do not come. A job of one process gets a store in memory.
inline Store connect(const World& world, std::optional<std::chrono::milliseconds> timeout = std::nullopt) {
  const auto limit = timeout.value_or(default_timeout(world));
  if (limit <= std::chrono::milliseconds(0))
    throw ConfigError("connect: the timeout must be positive: give it in milliseconds, or leave it out.");
  if (world.rank < 0 || world.rank >= world.world_size)
    throw ConfigError("World: there is no rank " + std::to_string(world.rank) + " of " +
                      std::to_string(world.world_size) + "; ranks count from 0 to world_size - 1.");
  if (world.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  static std::atomic<int> meetings{0};
  const std::string prefix = "treadle/" + std::to_string(world.restart) + "/" + std::to_string(meetings++);
  const std::string where = "World: rank " + std::to_string(world.rank) + " of " + std::to_string(world.world_size) +
                            " (store at " + world.host + ":" + std::to_string(world.port) + ")";
  const bool serves = world.rank == 0 && !world.agent_store;
  if (serves) detail::keep_store_served(world.port, limit);
  const std::string host = serves ? "127.0.0.1" : world.host;
  if (const auto reason = detail::wait_until_reachable(host, world.port, deadline); !reason.empty()) {
    throw DistributedError(where + " cannot reach the store (" + reason + "): check that " +
                           (world.agent_store ? "the launcher" : "rank 0") +
                           " runs there and that MASTER_ADDR and MASTER_PORT name it, or wait longer (start_timeout of "
                           "a policy, timeout of connect).");
  }
  try {
    c10d::TCPStoreOptions options;
    options.port = world.port;
    options.waitWorkers = false;
    options.timeout = limit;
    const auto client = detail::make_client(host, options, deadline);
    if (!client) {
      throw DistributedError(
          where + " gets no answer: what listens there is no store; set MASTER_PORT to a free port " + "on all ranks.");
    }
    auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, client);
    detail::wait_for_ranks(*store, world, deadline, where);
    return store;
  } catch (const c10::Error& error) {
    throw DistributedError(where + " lost the store (" + error.what_without_backtrace() + "): rank 0 or the launcher " +
                           "has ended; look at the first rank that failed.");
  }
}

}  // namespace v0_1
}  // namespace treadle
