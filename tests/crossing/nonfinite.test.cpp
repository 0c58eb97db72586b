// SPDX-License-Identifier: Apache-2.0
// Steps that must not count: skipped ones leave no trace, stopped ones name themselves.
#include <stdexcept>
#include <string>
#include <vector>

#include "support/oracle.hpp"

using namespace treadle_test;  // NOLINT
using td::accumulation::AccumulateOver;
using td::averaging::ExponentialAverage;
using td::nonfinite::Skip;
using td::nonfinite::Stop;

namespace {

constexpr double lr = 1e-2;
const td::Schedule decay =
    td::schedule::cosine({.steps = oracle::rate_steps, .warmup = oracle::rate_warmup, .floor = oracle::rate_floor});

std::vector<td::Batch> with_nan(std::vector<td::Batch> batches, const std::vector<std::size_t>& where) {
  for (const auto i : where) batches[i] = poisoned(batches[i]);
  return batches;
}

template <class Rule, class Policies>
void check_against_oracle(Rule rule, Policies policies, oracle::Recipe recipe, const std::vector<td::Batch>& batches,
                          std::size_t per_window) {
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, rule, policies};
  reseed(7);
  const auto got = oracle::run(trainer, batches);
  recipe.nonfinite = oracle::NonFinite::Skip;
  auto loop = oracle::classifier(make<TinyNet>(), recipe);
  reseed(7);
  const auto want = oracle::run_windows(loop, batches, per_window);
  oracle::check_same(got, want, weights(*make<TinyNet>()), want.size(), 0);
  CHECK(trainer.skipped_steps().template item<std::int64_t>() ==
        static_cast<std::int64_t>(want.size()) - loop.applied());
  const auto moments = loop.moments();
  const auto state = state_of(trainer.rule());
  for (const auto& item : moments) CHECK_MESSAGE(same_bits(state.at(item.first), item.second), item.first);
}

/// An infinite gradient of a finite loss, where the batch's first target is 4.
struct InfiniteGradient {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    auto loss = torch::nn::functional::cross_entropy(net.forward(batch.data), batch.target);
    if (batch.target[0].item<std::int64_t>() == 4) {
      const auto& w = net.last->bias;
      loss = loss + torch::sqrt((w - w.detach()).sum());
    }
    return td::Loss::mean(loss, batch.target.size(0));
  }
};

}  // namespace

TEST_CASE("the first step and a later one are skipped, whatever the rule") {
  const auto batches = with_nan(make_batches({8, 8, 6, 8, 8, 5}), {0, 3});
  SUBCASE("SGD") {
    check_against_oracle(td::optim::Sgd{.learning_rate = lr}, td::policies(Skip{}),
                         {.rule = oracle::Rule::Sgd, .learning_rate = lr, .weight_decay = 0}, batches, 1);
  }
  SUBCASE("SGD with momentum and dampening") {
    check_against_oracle(
        td::optim::Sgd{.learning_rate = lr, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1},
        td::policies(Skip{}),
        {.rule = oracle::Rule::Sgd, .learning_rate = lr, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.5},
        batches, 1);
  }
  SUBCASE("SGD with Nesterov's momentum") {
    check_against_oracle(
        td::optim::Sgd{.learning_rate = lr, .momentum = 0.8, .nesterov = true}, td::policies(Skip{}),
        {.rule = oracle::Rule::Sgd, .learning_rate = lr, .weight_decay = 0, .momentum = 0.8, .nesterov = true}, batches,
        1);
  }
  SUBCASE("Adam") {
    check_against_oracle(td::optim::Adam{.learning_rate = lr, .weight_decay = 0.1}, td::policies(Skip{}),
                         {.rule = oracle::Rule::Adam, .learning_rate = lr, .weight_decay = 0.1}, batches, 1);
  }
  SUBCASE("AdamW with AMSGrad") {
    check_against_oracle(td::optim::AdamW{.learning_rate = lr, .amsgrad = true}, td::policies(Skip{}),
                         {.rule = oracle::Rule::AdamW, .learning_rate = lr, .amsgrad = true}, batches, 1);
  }
  SUBCASE("AdamW in bf16 autocast") {
    check_against_oracle(td::optim::AdamW{.learning_rate = lr}, td::policies(Skip{}, td::precision::Bf16{}),
                         {.precision = oracle::Precision::Bf16, .learning_rate = lr}, batches, 1);
  }
}

TEST_CASE("a NaN in micro-batch 1 skips its whole window of 4") {
  const auto batches = with_nan(make_batches(std::vector<std::int64_t>(16, 4)), {1, 10});
  check_against_oracle(td::optim::AdamW{.learning_rate = lr}, td::policies(Skip{}, AccumulateOver{.batches = 4}),
                       {.learning_rate = lr}, batches, 4);
}

TEST_CASE("a skipped step touches nothing: weights, moments, average, schedule, batch norm, counters") {
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{},
                      td::optim::Sgd{.learning_rate = lr, .momentum = 0.9, .dampening = 0.1, .schedule = decay},
                      td::policies(Skip{}, ExponentialAverage{.decay = 0.5})};
  const auto good = make_batches({8, 8, 8});
  const auto untouched = everything(trainer);
  const auto check_skip = [&](const State& before, std::int64_t skipped) {
    auto after = everything(trainer);
    for (const auto& item : before) CHECK_MESSAGE(same_bits(after.at(item.first), item.second), item.first);
    CHECK(trainer.skipped_steps().item<std::int64_t>() == skipped);
  };
  // In the first step the rule's state comes into being, and must be all zeros then.
  CHECK(trainer.accumulate(poisoned(good[0]))->skipped.item<float>() == 1);
  check_skip({untouched.begin(), untouched.end()}, 1);
  for (const auto& item : state_of(trainer.rule()))
    if (!item.first.starts_with("learning_rates"))
      CHECK_MESSAGE(item.second.count_nonzero().item<std::int64_t>() == 0, item.first);
  CHECK(trainer.accumulate(good[0])->skipped.item<float>() == 0);
  trainer.accumulate(good[1]);
  auto before = everything(trainer);
  CHECK(before.contains("buffer/batch_norm.num_batches_tracked"));
  CHECK(before.at("buffer/batch_norm.num_batches_tracked").item<std::int64_t>() == 2);
  before.erase("rule/learning_rates");  // the rate of the step under way is looked up before its verdict is known
  for (int i = 0; i < 3; ++i) {
    trainer.accumulate(poisoned(good[2]));
    check_skip(before, 2 + i);
    CHECK(trainer.rule().rates().of(0).item<float>() == static_cast<float>(lr * 0.75));  // stands at applied step 2
  }
  trainer.accumulate(good[2]);
  CHECK(trainer.rule().rates().of(0).item<float>() == static_cast<float>(lr * 0.75));
  CHECK(finite(everything(trainer)));
}

TEST_CASE("the moving average of skipped and applied steps") {
  const auto batches = with_nan(make_batches({8, 8, 6, 8, 8, 5, 8}), {0, 2, 3});
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr, .schedule = decay},
                      td::policies(Skip{}, ExponentialAverage{.decay = 0.9})};
  reseed(7);
  const auto got = oracle::run(trainer, batches);
  auto loop = oracle::classifier(make<TinyNet>(), {.nonfinite = oracle::NonFinite::Skip,
                                                   .rate = oracle::Rate::CosineWarmup,
                                                   .averages = true,
                                                   .learning_rate = lr});
  reseed(7);
  const auto want = oracle::run_windows(loop, batches, 1);
  oracle::check_same(got, want, weights(*make<TinyNet>()), want.size(), 0);
}

TEST_CASE("Ignore applies what it gets") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{.learning_rate = lr}};
  const auto done = trainer.accumulate(poisoned(make_batch(4, 1)));
  CHECK(!done->skipped.defined());
  CHECK(!finite(weights(trainer.model())));
}

TEST_CASE("results that are kept stay what they were") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(Skip{}, AccumulateOver{.batches = 2}, td::clipping::ClipNorm{.max_norm = 0.1},
                                   td::precision::Fp16{.initial_scale = 1024, .growth_interval = 2})};
  const auto batches = with_nan(make_batches({4, 4, 4, 3, 4, 4, 2, 4}), {2});
  std::vector<td::StepResult> kept;
  std::vector<std::vector<double>> seen;
  const auto values = [](const td::StepResult& r) {
    const auto* accuracy = r.records.find("accuracy");
    return std::vector<double>{r.loss.item<double>(),    r.grad_norm.item<double>(),
                               r.skipped.item<double>(), accuracy->sum.item<double>(),
                               accuracy->count,          static_cast<double>(r.index)};
  };
  for (const auto& batch : batches)
    if (auto done = trainer.accumulate(batch)) {
      seen.push_back(values(*done));
      kept.push_back(*done);
    }
  REQUIRE(kept.size() == 4);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    CAPTURE(i);
    const auto now = values(kept[i]);
    for (std::size_t k = 0; k < now.size(); ++k)
      if (!std::isnan(seen[i][k])) CHECK(now[k] == seen[i][k]);
    CHECK(now[2] == (i == 1 ? 1 : 0));
    CHECK(now[5] == static_cast<double>(i));
  }
}

TEST_CASE("Stop freezes everything and names step and micro-batch at the next check") {
  const auto batches = with_nan(make_batches(std::vector<std::int64_t>(16, 4)), {4 * 2 + 1, 4 * 2 + 3});
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr, .schedule = decay},
                      td::policies(Stop{}, AccumulateOver{.batches = 4}, ExponentialAverage{.decay = 0.5})};
  State before;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    if (i == 8) {
      trainer.check();
      before = everything(trainer);
      before.erase("rule/learning_rates");
    }
    trainer.accumulate(batches[i]);
  }
  auto after = everything(trainer);
  after.erase("rule/learning_rates");
  CHECK(difference(after, before) == "");
  CHECK(trainer.steps() == 4);
  for (int again = 0; again < 2; ++again) {
    try {
      trainer.check();
      FAIL("check() must throw");
    } catch (const td::NonFiniteError& error) {
      CHECK(error.step() == 2);
      CHECK(error.micro_batch() == 1);
      CHECK(std::string(error.what()).find("step 2") != std::string::npos);
      CHECK(std::string(error.what()).find("micro-batch 1") != std::string::npos);
    }
  }
}

TEST_CASE("Stop in the first step") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}, td::policies(Stop{})};
  const auto first = weights(trainer.model());
  trainer.accumulate(poisoned(make_batch(4, 1)));
  trainer.accumulate(make_batch(4, 2));
  CHECK(difference(weights(trainer.model()), first) == "");
  try {
    trainer.check();
    FAIL("check() must throw");
  } catch (const td::NonFiniteError& error) {
    CHECK(error.step() == 0);
    CHECK(error.micro_batch() == 0);
  }
}

TEST_CASE("Stop counts steps that changed nothing, too") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}, td::policies(Stop{})};
  trainer.accumulate(make_batch(0, 1));
  trainer.accumulate(make_batch(4, 1));
  trainer.accumulate(poisoned(make_batch(4, 2)));
  CHECK_THROWS_WITH_AS(trainer.check(), doctest::Contains("step 2"), td::NonFiniteError);
}

TEST_CASE("Stop numbers an empty micro-batch as the others") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{},
                      td::policies(Stop{}, AccumulateOver{.batches = 3})};
  trainer.step(std::vector{make_batch(4, 1), make_batch(0, 2), poisoned(make_batch(4, 3))});
  try {
    trainer.check();
    FAIL("check() must throw");
  } catch (const td::NonFiniteError& error) {
    CHECK(error.micro_batch() == 2);
  }
}

TEST_CASE("Stop on an infinite gradient of a finite loss") {
  td::Batch good = make_batch(4, 1);
  good.target[0] = 0;
  td::Batch bad = make_batch(4, 2);
  bad.target[0] = 4;
  td::Trainer trainer{make<PlainNet>(), InfiniteGradient{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(Stop{})};
  trainer.accumulate(good);
  const auto before = weights(trainer.model());
  trainer.accumulate(bad);
  trainer.accumulate(good);
  CHECK(difference(weights(trainer.model()), before) == "");
  try {
    trainer.check();
    FAIL("check() must throw");
  } catch (const td::NonFiniteError& error) {
    CHECK(error.step() == 1);
    CHECK(error.micro_batch() == -1);
    CHECK(std::string(error.what()).find("gradient") != std::string::npos);
  }
}

TEST_CASE("Stop under Fp16: an overflow only skips, a NaN loss stops and the loss scale stays") {
  td::Batch good = make_batch(4, 1);
  good.target[0] = 0;
  td::Batch overflows = make_batch(4, 2);
  overflows.target[0] = 4;
  td::Trainer trainer{make<PlainNet>(), InfiniteGradient{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(Stop{}, td::precision::Fp16{.initial_scale = 1024})};
  const auto before = weights(trainer.model());
  CHECK(trainer.accumulate(overflows)->skipped.item<float>() == 1);
  trainer.check();
  CHECK(difference(weights(trainer.model()), before) == "");
  CHECK(trainer.precision().loss_scale().item<float>() == 512);
  CHECK(trainer.accumulate(good)->skipped.item<float>() == 0);
  CHECK(difference(weights(trainer.model()), before) != "");
  const auto scale = state_of(trainer.precision());
  trainer.accumulate(poisoned(good));
  trainer.accumulate(good);
  CHECK(difference(state_of(trainer.precision()), scale) == "");
  CHECK_THROWS_AS(trainer.check(), td::NonFiniteError);
}

TEST_CASE("Stop reads after each step if asked, and fit throws at its log point") {
  auto batches = with_nan(make_batches({4, 4, 4, 4, 4, 4}), {3});
  SUBCASE("check_every_step") {
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                        td::policies(Stop{.check_every_step = true})};
    for (int i = 0; i < 3; ++i) trainer.accumulate(batches[static_cast<std::size_t>(i)]);
    const auto before = weights(trainer.model());
    CHECK_THROWS_WITH_AS(trainer.accumulate(batches[3]), doctest::Contains("step 3"), td::NonFiniteError);
    CHECK(difference(weights(trainer.model()), before) == "");
  }
  SUBCASE("fit") {
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr}, td::policies(Stop{})};
    td::Trainer twin{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr}};
    CHECK_THROWS_WITH_AS(trainer.fit(batches, {.epochs = 3, .log_every = 2}), doctest::Contains("step 3"),
                         td::NonFiniteError);
    CHECK(trainer.steps() == 4);  // the log point after it
    for (std::size_t i = 0; i < 3; ++i) twin.accumulate(batches[i]);
    CHECK(difference(weights(trainer.model()), weights(twin.model())) == "");
  }
}

namespace {
struct ThrowsLate {
  bool* armed;
  td::Loss operator()(TinyNetImpl& net, const td::Batch& batch) const {
    auto loss = td::mean_loss(net.forward(batch.data), batch.target);
    if (*armed) throw std::runtime_error("the objective's own trouble");
    return loss;
  }
};
}  // namespace

TEST_CASE("a throw from the objective leaves the trainer as it was before the window") {
  bool armed = false;
  td::Trainer trainer{make<TinyNet>(), ThrowsLate{&armed}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(Skip{}, AccumulateOver{.batches = 2})};
  const auto batches = make_batches({4, 4});
  trainer.step(batches);
  const auto before = everything(trainer);
  for (const bool second : {false, true}) {
    CAPTURE(second);
    if (second) trainer.accumulate(batches[0]);
    armed = true;
    CHECK_THROWS_AS(trainer.accumulate(batches[1]), std::runtime_error);
    armed = false;
    CHECK(!trainer.accumulation().open());
    CHECK(difference(everything(trainer), before) == "");
    for (const auto& p : trainer.parameters()) CHECK(!p.model.grad().defined());
  }
  trainer.step(batches);
  CHECK(difference(weights(trainer.model()), before) != "");
  CHECK(trainer.steps() == 2);
}
