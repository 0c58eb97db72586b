// SPDX-License-Identifier: Apache-2.0
// What becomes of the others when a rank fails; included once for Gloo, once for NCCL, behind training.hpp.
#pragma once

#include "distributed/training.hpp"

#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/runtime/rank.hpp"
#include "treadle/runtime/sink.hpp"

namespace {

struct Thrower {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    if (failing && ++*calls == at) {
      if (how == "throw") throw std::runtime_error("the batch is broken");
      if (how == "kill") std::raise(SIGKILL);
      if (how == "stop") std::raise(SIGSTOP);
      if (how == "sleep") std::this_thread::sleep_for(seconds(3600));
    }
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
  bool failing = false;
  std::string how{};
  int at = 4;
  std::shared_ptr<int> calls = std::make_shared<int>(0);
};

/// What the ranks that did not fail are told.
template <ParameterUse Use = ParameterUse::Every, class Feed>
std::string told(const td::World& world, const std::string& how, milliseconds timeout, Feed&& feed, int at = 4) {
  auto net = make<PlainNet>(1);
  auto policy = ddp<Use>();
  policy.timeout = timeout;
  td::Trainer trainer{net, Thrower{world.rank == 1, how, at}, td::optim::AdamW{},
                      td::policies(policy, td::accumulation::AccumulateOver{.batches = 2})};
  try {
    feed(trainer);
  } catch (const td::DistributedError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("own: ") + error.what();
  }
  return "nothing";
}
template <ParameterUse Use>
void throws(const td::World& world, int at) {
  CAPTURE(at);
  const auto fit = [&](auto& t) { t.fit(dealt(ragged(), world), {.epochs = 1}); };
  const auto said = told<Use>(world, "throw", seconds(20), fit, at);
  CAPTURE(said);
  if (world.rank == 1)
    CHECK(said == "own: the batch is broken");
  else
    CHECK(said.find("the first to fail was rank 1: the batch is broken") != said.npos);
}
const Role throws_role("throws", [](const td::World& world) {
  throws<ParameterUse::Every>(world, 4);
  throws<ParameterUse::Find>(world, 3);
  for (const int at : {1, 2, 3}) throws<ParameterUse::Static>(world, at);  // micro-batches of the first window, too
});

struct BrokenLoader : Stream {
  bool broken;
  struct Iterator : Stream::Iterator {
    bool broken;
    Iterator& operator++() {
      if (broken && i == 2) throw td::DataError("the file ends in the middle of a record.");
      return ++i, *this;
    }
  };
  Iterator begin() const { return {{list, 0}, broken}; }
};
void loader_throws(const td::World& world) {
  const auto mine = dealt(ragged(), world);
  const auto said = told(world, "", seconds(20), [&](auto& t) {
    t.fit(BrokenLoader{{&mine}, world.rank == 1}, {.epochs = 1});
  });
  CAPTURE(said);
  if (world.rank == 1)
    CHECK(said == "own: the file ends in the middle of a record.");
  else
    CHECK(said.find("rank 1: the file ends in the middle") != said.npos);
}
const Role loader_throws_role("loader throws", loader_throws);

void evaluation_throws(const td::World& world) {
  const auto mine = dealt(ragged(), world);
  std::string said;
  const auto begin = std::chrono::steady_clock::now();
  const auto evaluate = [&](auto& trainer) {
    try {
      trainer.evaluate(BrokenLoader{{&mine}, world.rank == 1});
    } catch (const td::DataError&) {
      std::this_thread::sleep_for(seconds(9));  // and the trainer lives on, with its connections
      throw;
    }
  };
  said = told(world, "", seconds(60), evaluate);
  CAPTURE(said);
  if (world.rank == 1) return;
  CHECK(said.find("rank 1: the file ends in the middle") != said.npos);
  CHECK(std::chrono::steady_clock::now() - begin < seconds(7));
}
const Role evaluation_throws_role("evaluation throws", evaluation_throws);

/// Ends the rank as a program that catches nothing of `body` itself.
template <class F>
[[noreturn]] void end_with(F&& body) {
  const int code = td::run_rank(body);
  std::fflush(nullptr);
  std::_Exit(code);
}
struct Slow {
  ~Slow() { std::this_thread::sleep_for(seconds(2)); }
};
/// Rank 1 fails, where `how` says; the others lose it, and all report that, in any order.
void cause(const td::World& world, const std::string& how) {
  end_with([&] {
    auto net = make<PlainNet>(1);
    const Slow slow{};  // the one who fails is the last to say so
    td::Trainer trainer{net, Thrower{world.rank == 1, how == "step" ? "throw" : "", 3}, td::optim::AdamW{},
                        td::policies(ddp())};
    if (how == "between" && world.rank == 1) throw std::runtime_error("the batch is broken");
    trainer.fit(dealt(ragged(), world), {.epochs = 1});
    trainer.evaluate(dealt(ragged(), world));
  });
}
const Role cause_in_step_role("cause in step", [](const td::World& world) { cause(world, "step"); });
const Role cause_between_role("cause between", [](const td::World& world) { cause(world, "between"); });

/// Ranks that are not at the same call.
const Role apart_role("apart", [](const td::World& world) {
  const auto mine = dealt(ragged(), world);
  const auto said = told(world, "", seconds(20), [&](auto& trainer) {
    if (world.rank == 0) trainer.evaluate(mine);
    trainer.fit(mine, {.epochs = 1});
  });
  CAPTURE(said);
  CHECK(said.find("is at ") != said.npos);
  CHECK(said.find("evaluate") != said.npos);
  CHECK(said.find("the start of fit") != said.npos);
});

/// All handle a failure and go on; the next one is told by its own words.
const Role again_role("again", [](const td::World& world) {
  const auto mine = dealt(ragged(), world);
  const auto said = told(world, "", seconds(20), [&](auto& trainer) {
    CHECK_THROWS_AS(trainer.fit(mine, {.epochs = 0}), td::ConfigError);  // on all ranks alike: nothing is lost
    CHECK_THROWS_AS(trainer.evaluate(std::vector<td::Batch>{}), td::DataError);
    trainer.fit(mine, {.epochs = 1});
    trainer.fit(BrokenLoader{{&mine}, world.rank == 1}, {.epochs = 1});
  });
  CAPTURE(said);
  const std::string broken = "the file ends in the middle of a record.";
  if (world.rank == 1)
    CHECK(said == "own: " + broken);
  else
    CHECK(said.find("the first to fail was rank 1: " + broken.substr(0, 30)) != said.npos);
});

void killed(const td::World& world) {
  const auto said = told(world, "kill", seconds(20), [&](auto& t) { t.fit(dealt(ragged(), world), {.epochs = 1}); });
  CAPTURE(said);
  CHECK(said.find("lost the others") != said.npos);
}
const Role killed_role("killed", killed);

void stands_still(const td::World& world, const char* how) {
  const auto said = told(world, how, seconds(3), [&](auto& t) { t.fit(dealt(ragged(), world), {.epochs = 1}); });
  if (said.find("lost the others") == said.npos) {
    std::fputs((said + "\n").c_str(), stderr);
    std::_Exit(9);
  }
  td::report_failure(said);  // as run_rank does for a program that does not catch it
  throw td::DistributedError(said);
}
const Role sleeps_role("sleeps", [](const td::World& world) { stands_still(world, "sleep"); });
const Role stops_role("stops", [](const td::World& world) { stands_still(world, "stop"); });

/// What the launcher writes while this lives.
struct Said {
  Said() : before(td::set_sink([this](td::Severity, std::string_view text) { texts.emplace_back(text); })) {}
  ~Said() { td::set_sink(before); }
  std::vector<std::string> texts;
  decltype(td::set_sink({})) before;
};

double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST_CASE("a throw on one rank ends the step on all, who are told why") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) {
    CHECK(run_ranks(ranks, "throws") == 0);
    CHECK(run_ranks(ranks, "loader throws") == 0);
    if (ranks == 2) CHECK(run_ranks(ranks, "evaluation throws", seconds(40)) == 0);
  }
}
TEST_CASE("the launcher names the rank that failed, not those who lost it") {
  REQUIRE_DEVICE();
  for (const char* role : {"cause in step", "cause between"}) {
    CAPTURE(role);
    const Said said;
    const int ranks = worlds(2).back();
    CHECK(run_ranks(ranks, role) == 1);
    REQUIRE(said.texts.size() == 1);
    CHECK(said.texts[0] ==
          "launch: rank 1 of " + std::to_string(ranks) + " failed with exit code 1: the batch is broken");
  }
}
TEST_CASE("ranks at different calls are told so") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) CHECK(run_ranks(ranks, "apart") == 0);
}
TEST_CASE("a failure that all ranks have handled is not the reason of the next") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) CHECK(run_ranks(ranks, "again") == 0);
}
TEST_CASE("a rank that is killed in the middle of a step ends the job") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) {
    const Said said;
    const double taken = seconds_of([&] { CHECK(run_ranks(ranks, "killed", seconds(5)) == 128 + SIGKILL); });
    CHECK(taken < 45);
    REQUIRE(said.texts.size() == 1);
    CHECK(said.texts[0].starts_with("launch: rank 1 of " + std::to_string(ranks) + " was killed by SIGKILL"));
  }
}
TEST_CASE("a rank that stands still is given up after the time-out") {
  REQUIRE_DEVICE();
  for (const auto& job : {std::pair{2, "sleeps"}, {worlds(2).back(), "sleeps"}, {2, "stops"}}) {
    const Said said;
    const double taken = seconds_of([&] { CHECK(run_ranks(job.first, job.second, seconds(2)) == 1); });
    CHECK(taken < 45);
    REQUIRE(said.texts.size() == 1);  // of the ranks that gave up, the first
    CHECK(said.texts[0].find("lost the others") != std::string::npos);
  }
}
