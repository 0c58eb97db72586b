// SPDX-License-Identifier: Apache-2.0
// Every option value that a policy, a rule or a schedule refuses, and the values next to it that it takes.
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Refused {
  const char* value;  ///< as it is written
  const char* says;
  std::function<void()> check;
};
#define REFUSED(says, ...)                            \
  Refused {                                           \
#__VA_ARGS__, says, [] { (__VA_ARGS__).check(); } \
  }
#define ACCEPTED(...)                                    \
  Refused {                                              \
#__VA_ARGS__, nullptr, [] { (__VA_ARGS__).check(); } \
  }

void try_all(const std::vector<Refused>& table) {
  for (const auto& row : table) {
    INFO("option: " << row.value);
    if (row.says)
      CHECK_SAYS(td::ConfigError, row.says, row.check());
    else
      CHECK_NOTHROW(row.check());
  }
}
}  // namespace

TEST_CASE("policies") {
  using td::accumulation::AccumulateOver;
  using td::accumulation::SplitBatch;
  using td::averaging::ExponentialAverage;
  using td::clipping::ClipNorm;
  using td::clipping::ClipValue;
  using td::precision::Fp16;
  try_all({
      ACCEPTED(Fp16{}),
      ACCEPTED(Fp16{.initial_scale = 1, .growth_interval = 1, .minimum_scale = 1}),
      REFUSED("precision::Fp16: initial_scale must be positive and finite", Fp16{.initial_scale = 0}),
      REFUSED("precision::Fp16: initial_scale must be positive and finite", Fp16{.initial_scale = -1}),
      REFUSED("precision::Fp16: initial_scale must be positive and finite", Fp16{.initial_scale = kInf}),
      REFUSED("precision::Fp16: initial_scale must be positive and finite", Fp16{.initial_scale = 3.5e38}),
      REFUSED("precision::Fp16: initial_scale must be positive and finite", Fp16{.initial_scale = kNaN}),
      REFUSED("precision::Fp16: growth_factor must be above 1", Fp16{.growth_factor = 1}),
      REFUSED("precision::Fp16: growth_factor must be above 1", Fp16{.growth_factor = kNaN}),
      REFUSED("precision::Fp16: backoff_factor must lie between 0 and 1", Fp16{.backoff_factor = 0}),
      REFUSED("precision::Fp16: backoff_factor must lie between 0 and 1", Fp16{.backoff_factor = 1}),
      REFUSED("precision::Fp16: backoff_factor must lie between 0 and 1", Fp16{.backoff_factor = kNaN}),
      REFUSED("precision::Fp16: growth_interval must be at least 1", Fp16{.growth_interval = 0}),
      REFUSED("precision::Fp16: minimum_scale must lie between 0 and initial_scale", Fp16{.minimum_scale = -1}),
      REFUSED("precision::Fp16: minimum_scale must lie between 0 and initial_scale",
              Fp16{.initial_scale = 2, .minimum_scale = 3}),
      REFUSED("precision::Fp16: minimum_scale must lie between 0 and initial_scale", Fp16{.minimum_scale = kNaN}),
      ACCEPTED(AccumulateOver{.batches = 1}),
      REFUSED("accumulation::AccumulateOver: batches must be at least 1", AccumulateOver{.batches = 0}),
      REFUSED("accumulation::AccumulateOver: batches must be at least 1", AccumulateOver{.batches = -4}),
      ACCEPTED(SplitBatch{.micro_batches = 1}),
      REFUSED("accumulation::SplitBatch: micro_batches must be at least 1", SplitBatch{.micro_batches = 0}),
      ACCEPTED(ClipNorm{.max_norm = 1e-30}),
      REFUSED("clipping::ClipNorm: max_norm must be positive and finite", ClipNorm{.max_norm = 0}),
      REFUSED("clipping::ClipNorm: max_norm must be positive and finite", ClipNorm{.max_norm = -1}),
      REFUSED("clipping::ClipNorm: max_norm must be positive and finite", ClipNorm{.max_norm = kInf}),
      REFUSED("clipping::ClipNorm: max_norm must be positive and finite", ClipNorm{.max_norm = kNaN}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = 0}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = -1}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = kInf}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = kNaN}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = 1e300}),
      REFUSED("clipping::ClipValue: max_value must be positive and finite", ClipValue{.max_value = 1e-300}),
      ACCEPTED(ClipValue{.max_value = 3e38}),
      ACCEPTED(td::TrainerOptions{.nominal_count = 1e15}),
      REFUSED("TrainerOptions: nominal_count must be 0 or lie between", td::TrainerOptions{.nominal_count = -1}),
      REFUSED("TrainerOptions: nominal_count must be 0 or lie between", td::TrainerOptions{.nominal_count = kInf}),
      REFUSED("TrainerOptions: nominal_count must be 0 or lie between", td::TrainerOptions{.nominal_count = kNaN}),
      REFUSED("TrainerOptions: nominal_count must be 0 or lie between", td::TrainerOptions{.nominal_count = 1e300}),
      ACCEPTED(ExponentialAverage{.decay = 0}),
      REFUSED("averaging::ExponentialAverage: decay must lie in [0, 1)", ExponentialAverage{.decay = 1}),
      REFUSED("averaging::ExponentialAverage: decay must lie in [0, 1)", ExponentialAverage{.decay = -0.1}),
      REFUSED("averaging::ExponentialAverage: decay must lie in [0, 1)", ExponentialAverage{.decay = kNaN}),
  });
}

TEST_CASE("rules") {
  using td::optim::Adam;
  using td::optim::AdamW;
  using td::optim::Sgd;
  try_all({
      ACCEPTED(AdamW{.learning_rate = 0, .beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0}),
      REFUSED("optim::AdamW: learning_rate must be finite and not negative", AdamW{.learning_rate = -1}),
      REFUSED("optim::AdamW: learning_rate must be finite and not negative", AdamW{.learning_rate = kNaN}),
      REFUSED("optim::AdamW: beta1 and beta2 must lie in [0, 1)", AdamW{.beta1 = 1}),
      REFUSED("optim::AdamW: beta1 and beta2 must lie in [0, 1)", AdamW{.beta1 = -0.1}),
      REFUSED("optim::AdamW: beta1 and beta2 must lie in [0, 1)", AdamW{.beta2 = 1}),
      REFUSED("optim::AdamW: beta1 and beta2 must lie in [0, 1)", AdamW{.beta2 = kNaN}),
      REFUSED("optim::AdamW: eps must be finite and not negative", AdamW{.eps = -1e-9}),
      REFUSED("optim::AdamW: weight_decay must be finite and not negative", AdamW{.weight_decay = -1}),
      REFUSED("the rate of parameter group '*' must be finite and not negative",
              AdamW{.groups = {{.pattern = "*", .rate = -1}}}),
      REFUSED("the weight decay of parameter group 'b' must be finite and not negative",
              AdamW{.groups = {{.pattern = "a"}, {.pattern = "b", .weight_decay = -1}}}),
      REFUSED("treadle::schedule: floor must lie in [0, 1]", AdamW{.schedule = td::schedule::cosine({.floor = 2})}),
      REFUSED("optim::Adam: learning_rate must be finite and not negative", Adam{.learning_rate = -1}),
      REFUSED("optim::Adam: beta1 and beta2 must lie in [0, 1)", Adam{.beta1 = 1}),
      REFUSED("optim::Adam: beta1 and beta2 must lie in [0, 1)", Adam{.beta2 = -1}),
      REFUSED("optim::Adam: eps must be finite and not negative", Adam{.eps = kNaN}),
      REFUSED("optim::Adam: weight_decay must be finite and not negative", Adam{.weight_decay = -1}),
      REFUSED("the rate of parameter group '*' must be finite and not negative",
              Adam{.groups = {{.pattern = "*", .rate = kNaN}}}),
      REFUSED("treadle::schedule: floor must lie in [0, 1]", Adam{.schedule = td::schedule::linear({.floor = -1})}),
      ACCEPTED(Sgd{.learning_rate = 0, .momentum = 0.9, .nesterov = true}),
      REFUSED("optim::Sgd: learning_rate must be finite and not negative", Sgd{.learning_rate = -1}),
      REFUSED("optim::Sgd: momentum must be finite and not negative", Sgd{.momentum = -0.5}),
      REFUSED("optim::Sgd: weight_decay must be finite and not negative", Sgd{.weight_decay = kNaN}),
      REFUSED("optim::Sgd: nesterov needs a momentum and no dampening", Sgd{.nesterov = true}),
      REFUSED("optim::Sgd: nesterov needs a momentum and no dampening",
              Sgd{.momentum = 0.9, .dampening = 0.1, .nesterov = true}),
      REFUSED("the rate of parameter group '*' must be finite and not negative",
              Sgd{.groups = {{.pattern = "*", .rate = -1}}}),
      REFUSED("treadle::schedule: table", Sgd{.schedule = td::schedule::table({})}),
  });
}

TEST_CASE("schedules") {
  namespace s = td::schedule;
  try_all({
      REFUSED("steps and warmup must not be negative", s::linear({.steps = -1})),
      REFUSED("steps and warmup must not be negative", s::constant({.warmup = -1})),
      REFUSED("floor must lie in [0, 1]", s::linear({.floor = 1.1})),
      REFUSED("floor must lie in [0, 1]", s::cosine({.floor = kNaN})),
      ACCEPTED(s::cosine({.floor = 1})),
      REFUSED("polynomial: power must be positive", s::polynomial({.power = 0})),
      REFUSED("polynomial: power must be positive", s::polynomial({.power = kNaN})),
      REFUSED("step: every must be at least 1 and gamma positive", s::step({.every = 0})),
      REFUSED("step: every must be at least 1 and gamma positive", s::step({.gamma = 0})),
      ACCEPTED(s::step({.gamma = 1.5})),
      REFUSED("step: every must be at least 1 and gamma positive", s::step({.gamma = kInf})),
      REFUSED("polynomial: power must be positive", s::polynomial({.power = kInf})),
      REFUSED("one_cycle: initial_divisor and final_divisor must be at least 1", s::one_cycle({.final_divisor = kInf})),
      REFUSED("table: every factor must be finite and not negative", s::table({1, kNaN})),
      REFUSED("table: every factor must be finite and not negative", s::table({1, kInf, 1})),
      REFUSED("table: every factor must be finite and not negative", s::table({-0.1})),
      REFUSED("a schedule of 1000000000000000000 steps is too long", s::linear({.steps = 1'000'000'000'000'000'000})),
      REFUSED("steps is too long", s::constant({.warmup = INT64_MAX})),
      ACCEPTED(s::linear({.steps = 1'000'000'000})),
      REFUSED("one_cycle: rise must lie between 0 and 1", s::one_cycle({.rise = 0})),
      REFUSED("one_cycle: rise must lie between 0 and 1", s::one_cycle({.rise = 1})),
      REFUSED("one_cycle: initial_divisor and final_divisor must be at least 1",
              s::one_cycle({.initial_divisor = 0.5})),
      REFUSED("one_cycle: initial_divisor and final_divisor must be at least 1", s::one_cycle({.final_divisor = kNaN})),
      REFUSED("warmup_stable_decay: decay must lie in (0, 1]", s::warmup_stable_decay({.decay = 0})),
      REFUSED("warmup_stable_decay: decay must lie in (0, 1]", s::warmup_stable_decay({.decay = 1.1})),
      ACCEPTED(s::warmup_stable_decay({.decay = 1})),
      REFUSED("table: give at least one factor", s::table({})),
      REFUSED("chain: give at least one schedule", s::chain({})),
      REFUSED("chain: a chain cannot hold another chain", s::chain({s::cosine({.steps = 2}), s::chain({s::linear()})})),
      REFUSED("chain: every schedule but the last needs its steps", s::chain({s::cosine(), s::linear()})),
      REFUSED("floor must lie in [0, 1]", s::chain({s::cosine({.steps = 2, .floor = 7}), s::linear()})),
      ACCEPTED(s::chain({s::table({1, 2}), s::cosine({.steps = 2}), s::linear()})),
      REFUSED("a warm-up of 3 steps does not fit into a run of 3", s::cosine({.steps = 3, .warmup = 3})),
      ACCEPTED(s::cosine({.steps = 4, .warmup = 3})),
  });
}

TEST_CASE("values that are given later") {
  using namespace treadle_test;
  CHECK_SAYS(td::ConfigError, "a schedule of 1000000000000000000 steps is too long",
             td::schedule::cosine().tabulate(1'000'000'000'000'000'000));
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}};
  for (const double factor : {kNaN, kInf, -1.0})
    CHECK_SAYS(td::ConfigError, "scale: the factor must be finite and not negative",
               trainer.rule().rates().scale(factor));
  CHECK_NOTHROW(trainer.rule().rates().scale(0));
  const auto train = make_batches({4});
  for (const double least : {kNaN, kInf, -1.0})
    CHECK_SAYS(td::ConfigError, "early_stop needs a min_delta that is finite",
               trainer.fit(train, {.early_stop = td::EarlyStop{.min_delta = least}}));
  CHECK_SAYS(td::ConfigError, "nominal_count",
             td::Trainer(make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}, td::policies(), td::observers(),
                         td::TrainerOptions{.nominal_count = -5}));
}

TEST_CASE("the trainer asks before it touches the model") {
  using namespace treadle_test;
  auto net = make<PlainNet>();
  const auto before = weights(*net);
  const auto* address = net->first->weight.data_ptr();
  CHECK_SAYS(td::ConfigError, "clipping::ClipNorm",
             td::Trainer(net, CrossEntropy{}, td::optim::AdamW{}, td::policies(td::clipping::ClipNorm{.max_norm = 0})));
  CHECK_SAYS(td::ConfigError, "optim::AdamW",
             td::Trainer(net, CrossEntropy{}, td::optim::AdamW{.learning_rate = -1},
                         td::policies(td::precision::Bf16Weights{})));
  CHECK(difference(weights(*net), before) == "");
  CHECK(net->first->weight.data_ptr() == address);
}
