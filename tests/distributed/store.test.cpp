// SPDX-License-Identifier: Apache-2.0
// What connect says when processes do not find each other. Real jobs are in launch.test.cpp.
#include <treadle/distributed/failure_watch.hpp>
#include <treadle/runtime/store.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

/// A socket that listens on a port of this host, and nothing behind it.
class Listener {
 public:
  Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t size = sizeof(address);
    REQUIRE(::bind(fd_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(::listen(fd_, 8) == 0);
    REQUIRE(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { ::close(fd_); }
  std::uint16_t port() const { return port_; }

 private:
  int fd_;
  std::uint16_t port_ = 0;
};

std::uint16_t free_port() {
  return Listener().port();
}

td::World world(int rank, int size, std::uint16_t port) {
  td::World result;
  result.rank = result.local_rank = rank;
  result.world_size = result.local_world_size = size;
  result.port = port;
  return result;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a job of one process has a store in memory") {
  const auto store = td::connect(td::World{});
  store->set("key", std::vector<std::uint8_t>{7});
  CHECK(store->get("key") == std::vector<std::uint8_t>{7});
}

TEST_CASE("ranks that there are not") {
  for (const int rank : {-1, 2, 3}) CHECK_SAYS(td::ConfigError, "there is no rank", td::connect(world(rank, 2, 1)));
  CHECK_SAYS(td::ConfigError, "there is no rank 0 of 0", td::connect(world(0, 0, 1)));
}
TEST_CASE("the time to wait") {
  auto one_host = world(0, 4, 1);
  CHECK(td::default_timeout(one_host) == std::chrono::seconds(30));
  one_host.local_world_size = 2;
  CHECK(td::default_timeout(one_host) == std::chrono::minutes(5));
  CHECK_SAYS(td::ConfigError, "the timeout must be positive", td::connect(one_host, milliseconds(0)));
}

TEST_CASE("nobody serves the store") {
  const auto start = std::chrono::steady_clock::now();
  CHECK_SAYS(td::DistributedError, "cannot reach the store (Connection refused): check that rank 0 runs there",
             td::connect(world(1, 2, free_port()), milliseconds(400)));
  const double took = seconds_since(start);
  CHECK(took > 0.1);
  CHECK(took < 5);
  auto agent = world(0, 2, free_port());
  agent.agent_store = true;  // then rank 0 serves nothing itself
  CHECK_SAYS(td::DistributedError, "check that the launcher runs there", td::connect(agent, milliseconds(100)));
  auto nowhere = world(1, 2, 29500);
  nowhere.host = "no-such-host.invalid";
  CHECK_SAYS(td::DistributedError, "no-such-host.invalid:29500) cannot reach the store",
             td::connect(nowhere, milliseconds(100)));
}

TEST_CASE("ranks that do not come are named") {
  const auto start = std::chrono::steady_clock::now();
  CHECK_SAYS(td::DistributedError, "World: rank 0 of 3", td::connect(world(0, 3, free_port()), milliseconds(400)));
  CHECK_SAYS(td::DistributedError, "waited in vain for ranks 1 and 2: look at what ended them",
             td::connect(world(0, 3, free_port()), milliseconds(400)));
  CHECK(seconds_since(start) > 0.8);
  CHECK(seconds_since(start) < 10);
  CHECK(td::detail::list_of_ranks({3}, 1) == "rank 3");
  CHECK(td::detail::list_of_ranks({1, 2, 5}, 3) == "ranks 1, 2 and 5");
  CHECK(td::detail::list_of_ranks({0, 1, 2, 3, 4, 5, 6, 7, 8}, 10) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
  const auto begin = std::chrono::steady_clock::now();
  CHECK_SAYS(td::DistributedError, "waited in vain for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1999999991 more",
             td::connect(world(0, 2'000'000'000, free_port()), milliseconds(200)));
  CHECK(seconds_since(begin) < 10);
}

TEST_CASE("the port is in use") {
  const Listener other;
  CHECK_SAYS(td::DistributedError,
             "port " + std::to_string(other.port()) + " of this host, because another program uses it",
             td::connect(world(0, 2, other.port()), milliseconds(400)));
}

TEST_CASE("what listens is no store") {
  const Listener other;
  const auto start = std::chrono::steady_clock::now();
  CHECK_SAYS(td::DistributedError, "what listens there is no store",
             td::connect(world(1, 2, other.port()), milliseconds(400)));
  CHECK(seconds_since(start) < 20);
}

TEST_CASE("two processes with one rank") {
  c10d::HashStore store;
  store.add("arrived/1", 1);
  CHECK_SAYS(td::DistributedError, "World: rank 1 found another process with the same rank",
             td::detail::wait_for_ranks(store, world(1, 2, 1), std::chrono::steady_clock::now(), "World: rank 1"));
}

TEST_CASE("word of a failure is acted on once, after the grace, and not by who has failed itself") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> told{0};
  const auto watch = [&](milliseconds grace) {
    return std::make_unique<td::detail::FailureWatch>(store, "failure", milliseconds(5), grace, [&] { ++told; });
  };
  const auto wait = [&](int count) {
    for (int i = 0; i < 400 && told < count; ++i) std::this_thread::sleep_for(milliseconds(5));
    return told.load();
  };
  {
    const auto one = watch(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(50));
    CHECK(told == 0);
  }
  CHECK(told == 0);
  const auto start = std::chrono::steady_clock::now();
  const auto one = watch(milliseconds(100));
  store->set("failure", std::vector<std::uint8_t>{1});
  CHECK(wait(1) == 1);
  CHECK(seconds_since(start) > 0.09);
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(told == 1);
  const auto own = watch(seconds(60));
  std::this_thread::sleep_for(milliseconds(50));  // in its grace
  const auto stopping = std::chrono::steady_clock::now();
  own->stop();
  watch(seconds(60)).reset();
  CHECK(seconds_since(stopping) < 30);
  CHECK(told == 1);
}
