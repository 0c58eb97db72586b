// SPDX-License-Identifier: Apache-2.0
// fit: limits, reasons to stop, log points, evaluation and what a second call does.
#include "treadle/fit.hpp"

#include <forward_list>
#include <string>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
using namespace treadle_test;
using td::StopReason;

/// Notes all it is told.
struct Notes {
  std::vector<std::string>* events;
  std::vector<double>* rates = nullptr;
  std::int64_t stop_after = -1;  // steps; -1 never, 0 before the first
  void on_fit_begin(const td::observe::RunInfo& info) {
    events->push_back("begin " + std::to_string(info.total_steps) + " " + std::to_string(info.steps_per_epoch));
  }
  void on_log(const td::observe::LogEvent& event) {
    events->push_back("log " + std::to_string(event.step));
    if (rates) rates->push_back(event.learning_rate);
  }
  bool on_step(const td::observe::StepEvent& event) { return event.step != stop_after; }
  void on_epoch(const td::observe::EpochEvent& event) {
    events->push_back("epoch " + std::to_string(event.epoch) + (event.test ? " tested" : ""));
  }
  void on_fit_end(const td::FitResult& result) {
    events->push_back("end: " + std::string(td::to_string(result.stop_reason)));
  }
};
using Events = std::vector<std::string>;

/// A trainer that learns nothing, so that every epoch has the same metrics.
template <class Rule = td::optim::Sgd, class P = td::Policies<>>
auto still(Events& events, std::int64_t stop_after = -1, Rule rule = {.learning_rate = 0}, P policies = {}) {
  return td::Trainer<PlainNetImpl, CrossEntropy, Rule, P, td::observe::Set<Notes>>(
      make<PlainNet>(), CrossEntropy{}, std::move(rule), policies, td::observers(Notes{&events, nullptr, stop_after}));
}
}  // namespace

TEST_CASE("fit tells observers what it does, in order") {
  Events events;
  auto trainer = still(events);
  const auto train = make_batches({4, 4, 4, 4, 2});
  const auto result = trainer.fit(train, make_batches({4}), {.epochs = 3, .log_every = 2, .evaluate_every = 2});
  CHECK(events == Events{"begin 15 5", "log 2", "log 4", "log 5", "epoch 0", "log 7", "log 9", "log 10",
                         "epoch 1 tested", "log 12", "log 14", "log 15", "epoch 2 tested", "end: finished"});
  CHECK((result.stop_reason == StopReason::Finished));
  CHECK(result.epochs == 3);
  CHECK(result.steps == 15);
  CHECK(result.skipped == 0);
  REQUIRE(result.history.size() == 3);
  CHECK_FALSE(result.history[0].test);
  CHECK(result.test()["loss"] == result.history[2].test->find("loss"));
}

TEST_CASE("observers are told steps as counts, the first one as 1") {
  struct Counts {
    std::string* told;
    void on_step(const td::observe::StepEvent& event) {
      *told += std::to_string(event.step_in_epoch) + "/" + std::to_string(event.step) + "/" +
               std::to_string(event.result.index) + " ";
    }
    void on_log(const td::observe::LogEvent& event) {
      *told += "log " + std::to_string(event.step_in_epoch) + "/" + std::to_string(event.step) + " ";
    }
  };
  std::string told;
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{}, td::policies(), td::observers(Counts{&told})};
  trainer.fit(make_batches({4, 4}), {.epochs = 2});
  CHECK(told == "1/1/0 2/2/1 log 2/2 1/3/2 2/4/3 log 2/4 ");
}

TEST_CASE("an epoch's training metrics are the means over all its rows") {
  Events events;
  auto trainer = still(events);
  const auto train = make_batches({4, 4, 1});
  const auto result = trainer.fit(train, {.log_every = 2});
  const auto whole = trainer.evaluate(train);
  CHECK(result.history[0].train["loss"] == doctest::Approx(whole["loss"]).epsilon(1e-6));
  CHECK(result.history[0].train["accuracy"] == doctest::Approx(whole["accuracy"]).epsilon(1e-6));
}

TEST_CASE("limits") {
  const auto train = make_batches({4, 4, 4});
  Events events;
  auto trainer = still(events);
  auto result = trainer.fit(train, {.epochs = 0, .max_steps = 4});
  CHECK((result.stop_reason == StopReason::MaxSteps));
  CHECK(result.steps == 4);
  CHECK(result.epochs == 1);
  CHECK(result.history.size() == 2);
  CHECK(events.front() == "begin 4 3");

  result = trainer.fit(train, {.epochs = 2, .max_steps = 100});
  CHECK((result.stop_reason == StopReason::Finished));
  CHECK(result.steps == 6);

  result = trainer.fit(train, {.epochs = 5, .max_seconds = 1e-9});
  CHECK((result.stop_reason == StopReason::MaxTime));
  CHECK(result.steps == 1);
  CHECK(result.epochs == 0);
  CHECK(trainer.steps() == 11);
}

TEST_CASE("an observer can ask to stop, and the trainer goes on afterwards") {
  const auto train = make_batches({4, 4, 4});
  Events events;
  auto trainer = still(events, 2);
  auto result = trainer.fit(train, make_batches({4}), {.epochs = 5});
  CHECK((result.stop_reason == StopReason::Requested));
  CHECK(result.steps == 2);
  CHECK(result.history.size() == 1);
  CHECK(result.history[0].test);  // what was reached is evaluated
  CHECK(events.back() == "end: stop requested");
  CHECK(trainer.accumulate(train[0]));

  struct Never {
    bool on_fit_begin(const td::observe::RunInfo&) { return false; }
  };
  td::Trainer never{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{}, td::policies(), td::observers(Never{})};
  result = never.fit(train);
  CHECK((result.stop_reason == StopReason::Requested));
  CHECK(result.steps == 0);
}

TEST_CASE("early stop waits for its patience and knows which way is better") {
  const auto train = make_batches({4, 4});
  Events events;
  auto trainer = still(events);
  for (const bool maximize : {false, true}) {
    const auto result = trainer.fit(
        train, make_batches({8}),
        {.epochs = 20, .early_stop = td::EarlyStop{.metric = "accuracy", .patience = 2, .maximize = maximize}});
    CHECK((result.stop_reason == StopReason::EarlyStop));
    CHECK(result.epochs == 3);  // the first sets the mark
  }
  // A loss that falls goes on; one that falls too little for min_delta does not.
  td::Trainer learns{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.05}};
  auto result = learns.fit(train, {.epochs = 6, .early_stop = td::EarlyStop{.patience = 1}});
  CHECK((result.stop_reason == StopReason::Finished));
  result = learns.fit(train, {.epochs = 6, .early_stop = td::EarlyStop{.patience = 1, .min_delta = 10}});
  CHECK((result.stop_reason == StopReason::EarlyStop));
  CHECK(result.epochs == 2);
}

TEST_CASE("a metric that nobody records is refused by name") {
  Events events;
  auto trainer = still(events);
  const auto train = make_batches({4});
  CHECK_SAYS(td::ConfigError, "there is no metric 'f1'; there is loss, accuracy",
             trainer.fit(train, {.epochs = 3, .early_stop = td::EarlyStop{.metric = "f1"}}));
  CHECK(trainer.fit(train).steps == 1);
}

TEST_CASE("options that cannot be meant are refused before anything happens") {
  Events events;
  auto trainer = still(events);
  const auto train = make_batches({4});
  CHECK_SAYS(td::ConfigError, "must not be negative", trainer.fit(train, {.epochs = -1}));
  CHECK_SAYS(td::ConfigError, "must not be negative", trainer.fit(train, {.max_steps = -1}));
  CHECK_SAYS(td::ConfigError, "must not be negative", trainer.fit(train, {.max_seconds = -1}));
  CHECK_SAYS(td::ConfigError, "must not be negative", trainer.fit(train, {.max_seconds = std::nan("")}));
  CHECK_SAYS(td::ConfigError, "there is no limit", trainer.fit(train, {.epochs = 0}));
  CHECK_SAYS(td::ConfigError, "must be at least 1", trainer.fit(train, {.log_every = 0}));
  CHECK_SAYS(td::ConfigError, "must be at least 1", trainer.fit(train, {.evaluate_every = 0}));
  CHECK_SAYS(td::ConfigError, "a patience of at least 1",
             trainer.fit(train, {.early_stop = td::EarlyStop{.patience = 0}}));
  CHECK(events.empty());
  CHECK(trainer.steps() == 0);
}

TEST_CASE("each fit starts a schedule without a horizon of its own anew, one with its own goes on") {
  const auto train = make_batches({4, 4, 4, 4});
  Events events;
  std::vector<double> rates;
  const auto run = [&](td::Schedule schedule) {
    rates.clear();
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{.learning_rate = 1, .schedule = schedule},
                        td::policies(), td::observers(Notes{&events, &rates})};
    trainer.fit(train, {.log_every = 1});
    trainer.fit(train, {.epochs = 2, .log_every = 1});
    return rates;
  };
  CHECK(run(td::schedule::linear()) ==
        std::vector<double>{1, 0.75, 0.5, 0.25, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125});
  CHECK(run(td::schedule::linear({.steps = 8})) ==
        std::vector<double>{1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0, 0});
}

TEST_CASE("a schedule that needs a horizon says so before the first step") {
  const auto batches = make_batches({4, 4});
  const std::forward_list<td::Batch> unsized(batches.begin(), batches.end());
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{.schedule = td::schedule::cosine()}};
  CHECK_SAYS(td::ConfigError, "needs to know its length", trainer.fit(unsized, {.epochs = 2}));
  CHECK(trainer.steps() == 0);
  CHECK_SAYS(td::ConfigError, "needs to know its length", trainer.accumulate(batches[0]));
  CHECK(trainer.fit(unsized, {.epochs = 2, .max_steps = 3}).steps == 3);
}

TEST_CASE("the steps of an epoch count windows, with or without its tail") {
  using td::accumulation::AccumulateOver;
  using td::accumulation::Tail;
  const auto train = make_batches({4, 4, 4, 4, 4});
  for (const auto tail : {Tail::Step, Tail::Drop}) {
    Events events;
    auto trainer =
        still(events, -1, td::optim::Sgd{.learning_rate = 0}, td::policies(AccumulateOver{.batches = 2, .tail = tail}));
    const auto result = trainer.fit(train, {.epochs = 2});
    const std::int64_t want = tail == Tail::Step ? 3 : 2;
    CHECK(result.steps == 2 * want);
    CHECK(events.front() == "begin " + std::to_string(2 * want) + " " + std::to_string(want));
    for (const auto& p : trainer.parameters()) CHECK_FALSE(p.model.grad().defined());
  }
}

TEST_CASE("fit trains in training mode and leaves the model in it") {
  auto net = make<TinyNet>();
  net->eval();
  td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{}};
  trainer.fit(make_batches({4, 4}), make_batches({4}));
  CHECK(net->is_training());
  CHECK(net->batch_norm->num_batches_tracked.item<std::int64_t>() == 2);
}
