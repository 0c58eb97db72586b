// SPDX-License-Identifier: Apache-2.0
// Schedules against closed forms, written here from their definitions.
#include "treadle/optim/schedule.hpp"

#include <cmath>
#include <functional>
#include <numbers>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;
using treadle_test::thrown;

constexpr double pi = std::numbers::pi;

/// The factors for t = 0 to `horizon`, with a warm-up in front of `after(progress)`.
std::vector<double> closed(int horizon, int warmup, const std::function<double(double, int)>& after) {
  std::vector<double> factors;
  for (int t = 0; t <= horizon; ++t)
    factors.push_back(t < warmup ? (t + 1.0) / (warmup + 1.0) : after((t - warmup) / double(horizon - warmup), t));
  return factors;
}
void check_equal(const std::vector<double>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t t = 0; t < got.size(); ++t) {
    CAPTURE(t);
    CHECK(got[t] == doctest::Approx(want[t]).epsilon(1e-12));
  }
}
}  // namespace

TEST_CASE("linear, cosine and polynomial follow their formulas and end at the floor exactly") {
  for (const int horizon : {1, 2, 5, 100})
    for (const int warmup : {0, 1, 3})
      for (const double floor : {0.0, 0.1, 1.0 / 3.0}) {
        if (warmup >= horizon) continue;
        CAPTURE(horizon);
        CAPTURE(warmup);
        CAPTURE(floor);
        const auto own = [&](auto schedule) {
          schedule.steps = horizon;
          const auto factors = schedule.tabulate(0);
          CHECK(factors.back() == floor);
          schedule.steps = 0;
          CHECK(schedule.tabulate(horizon) == factors);  // the run's horizon is as good as its own
          return factors;
        };
        check_equal(own(td::schedule::linear({.warmup = warmup, .floor = floor})),
                    closed(horizon, warmup, [&](double p, int) { return 1 - p + floor * p; }));
        check_equal(own(td::schedule::cosine({.warmup = warmup, .floor = floor})),
                    closed(horizon, warmup,
                           [&](double p, int) { return floor + (1 - floor) * std::pow(std::cos(pi * p / 2), 2); }));
        check_equal(
            own(td::schedule::polynomial({.warmup = warmup, .floor = floor, .power = 3})),
            closed(horizon, warmup, [&](double p, int) { return floor + (1 - floor) * (1 - p) * (1 - p) * (1 - p); }));
        check_equal(td::schedule::polynomial({.steps = horizon, .warmup = warmup, .floor = floor}).tabulate(0),
                    td::schedule::linear({.steps = horizon, .warmup = warmup, .floor = floor}).tabulate(0));
      }
}

TEST_CASE("step drops by gamma every so many steps after the warm-up") {
  check_equal(td::schedule::step({.every = 3, .gamma = 0.5, .steps = 8}).tabulate(0),
              {1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25});
  check_equal(td::schedule::step({.every = 2, .gamma = 0.1, .warmup = 1}).tabulate(5), {0.5, 1, 1, 0.1, 0.1, 0.01});
}

TEST_CASE("constant holds the base rate after its warm-up") {
  CHECK(td::schedule::constant().constant());
  CHECK(td::Schedule{} == td::schedule::constant());
  CHECK_FALSE(td::schedule::constant({.warmup = 1}).constant());
  CHECK_FALSE(td::schedule::constant({.warmup = 1}).needs_horizon());
  check_equal(td::schedule::constant({.warmup = 3}).tabulate(0), {0.25, 0.5, 0.75, 1, 1});
  CHECK(td::schedule::constant().tabulate(0).back() == 1.0);
}

TEST_CASE("one-cycle rises and falls by cosines between PyTorch's step numbers") {
  const int steps = 20;
  const auto factors =
      td::schedule::one_cycle({.steps = steps, .rise = 0.25, .initial_divisor = 10, .final_divisor = 100}).tabulate(0);
  REQUIRE(factors.size() == 21);
  CHECK(factors[0] == doctest::Approx(0.1));
  CHECK(factors[4] == doctest::Approx(1.0));  // rise x steps - 1
  CHECK(factors[2] == doctest::Approx((0.1 + 1.0) / 2));
  CHECK(factors[19] == doctest::Approx(0.001));
  CHECK(factors[20] == factors[19]);
  for (int t = 0; t < 4; ++t) CHECK(factors[t] < factors[t + 1]);
  for (int t = 4; t < 19; ++t) CHECK(factors[t] > factors[t + 1]);
  for (const int few : {1, 2, 3})  // where the rise takes less than a step
    for (const double factor : td::schedule::one_cycle().tabulate(few)) {
      CHECK(factor > 0);
      CHECK(factor <= 1);
    }
}

TEST_CASE("warm-up, stable, decay") {
  check_equal(td::schedule::warmup_stable_decay({.steps = 10, .warmup = 1, .decay = 0.4, .floor = 0.2}).tabulate(0),
              {0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2});
  const auto all = td::schedule::warmup_stable_decay({.decay = 1.0, .floor = 0.1}).tabulate(7);
  check_equal(all, td::schedule::linear({.floor = 0.1}).tabulate(7));
  CHECK(all.back() == 0.1);
}

TEST_CASE("a table is taken as it is and a chain joins its parts") {
  CHECK(td::schedule::table({0.5, 2, 0.25}).tabulate(100) == std::vector<double>{0.5, 2, 0.25});
  const auto chain =
      td::schedule::chain({td::schedule::table({0.1, 0.2}), td::schedule::linear({.steps = 2, .floor = 0.5}),
                           td::schedule::cosine({.floor = 0.25})});
  CHECK(chain.needs_horizon());
  const auto factors = chain.tabulate(8);
  const auto tail = td::schedule::cosine({.floor = 0.25}).tabulate(4);
  REQUIRE(factors.size() == 4 + tail.size());
  check_equal({factors.begin(), factors.begin() + 4}, {0.1, 0.2, 1, 0.75});
  check_equal({factors.begin() + 4, factors.end()}, tail);
  CHECK(factors.back() == 0.25);
  CHECK_FALSE(td::schedule::chain({td::schedule::table({1}), td::schedule::cosine({.steps = 3})}).needs_horizon());
}

TEST_CASE("only schedules that decay need a horizon") {
  for (const auto& decaying :
       {td::schedule::linear(), td::schedule::cosine(), td::schedule::polynomial(), td::schedule::step({}),
        td::schedule::one_cycle(), td::schedule::warmup_stable_decay()}) {
    CHECK(decaying.needs_horizon());
    CHECK_SAYS(td::ConfigError, "a decaying schedule needs to know its length", decaying.tabulate(0));
    auto own = decaying;
    own.steps = 4;
    CHECK_FALSE(own.needs_horizon());
    CHECK(own.tabulate(0).size() == 5);
  }
  CHECK_SAYS(td::ConfigError, "a decaying schedule needs to know its length",
             td::schedule::chain({td::schedule::table({1}), td::schedule::cosine()}).tabulate(0));
}

TEST_CASE("a warm-up that outlasts the run is refused") {
  CHECK_SAYS(td::ConfigError, "a warm-up of 5 steps does not fit into a run of 5",
             td::schedule::cosine({.warmup = 5}).tabulate(5));
  CHECK_SAYS(td::ConfigError, "a warm-up of 9 steps does not fit into a run of 4",
             td::schedule::linear({.steps = 4, .warmup = 9}).check());
  CHECK_SAYS(td::ConfigError, "does not fit", td::schedule::constant({.warmup = 5}).tabulate(3));
  CHECK(td::schedule::cosine({.warmup = 4}).tabulate(5).size() == 6);
  CHECK_SAYS(td::ConfigError, "take 3 steps, which is all of a run of 3",
             td::schedule::chain({td::schedule::table({1, 1, 1}), td::schedule::cosine()}).tabulate(3));
}
