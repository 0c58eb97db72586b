// SPDX-License-Identifier: Apache-2.0
// Windows: whatever their micro-batches hold, a step is that of the mean over everything the window counted.
#include <iterator>
#include <utility>
#include <vector>

#include "support/oracle.hpp"

using namespace treadle_test;  // NOLINT
using td::accumulation::AccumulateOver;
using td::accumulation::SplitBatch;
using td::accumulation::Tail;

namespace {

constexpr double lr = 1e-2;

/// Trains with Treadle, batch by batch, from fixed seeds.
template <class Net, class Objective, class Policies>
std::vector<oracle::Record> treadle_run(Objective objective, Policies policies, const std::vector<td::Batch>& batches,
                                        const td::TrainerOptions& options = {}) {
  td::Trainer trainer{make<Net>(), objective,       td::optim::AdamW{.learning_rate = lr},
                      policies,    td::observers(), options};
  reseed(7);
  return oracle::run(trainer, batches);
}
oracle::Recipe recipe() {
  return {.learning_rate = lr};
}

/// A loader that gives its batches once an epoch and knows neither their number nor an earlier one.
class Stream {
 public:
  explicit Stream(std::vector<td::Batch> batches) : batches_(std::move(batches)) {}
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = td::Batch;
    using difference_type = std::ptrdiff_t;
    explicit iterator(Stream* stream) : stream_(stream) { ++*this; }
    const td::Batch& operator*() const { return stream_->current_; }
    iterator& operator++() {
      if (stream_->next_ == stream_->batches_.size())
        stream_ = nullptr;
      else
        stream_->current_ = stream_->batches_[stream_->next_++];
      return *this;
    }
    bool operator!=(std::default_sentinel_t) const { return stream_ != nullptr; }

   private:
    Stream* stream_;
  };
  iterator begin() {
    next_ = 0;
    return iterator(this);
  }
  std::default_sentinel_t end() { return {}; }

 private:
  std::vector<td::Batch> batches_;
  std::size_t next_ = 0;
  td::Batch current_;
};

}  // namespace

TEST_CASE("windows of 1, 3 and 4 equal micro-batches") {
  const auto batches = make_batches(std::vector<std::int64_t>(12, 8));
  const State start = weights(*make<TinyNet>());
  for (const int n : {1, 3, 4}) {
    CAPTURE(n);
    const auto got = treadle_run<TinyNet>(CrossEntropy{}, td::policies(AccumulateOver{.batches = n}), batches);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    const auto want = oracle::run_windows(loop, batches, static_cast<std::size_t>(n));
    // A third is no binary fraction; 1 and 1/4 are, and then every bit has to agree.
    oracle::check_same(got, want, start, n == 3 ? 0 : want.size(), 1e-4);
  }
}

TEST_CASE("ragged rows weigh what they hold") {
  const auto batches = make_batches({8, 5, 2, 7, 3, 8, 8, 4, 6, 2, 2, 9});
  const State start = weights(*make<TinyNet>());
  for (const int n : {3, 4}) {
    CAPTURE(n);
    const auto got = treadle_run<TinyNet>(CrossEntropy{}, td::policies(AccumulateOver{.batches = n}), batches);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    oracle::check_same(got, oracle::run_windows(loop, batches, static_cast<std::size_t>(n)), start, 0, 1e-4);
  }
  SUBCASE("without state between rows a window is the step of its rows joined") {
    std::vector<td::Batch> joined;
    for (std::size_t i = 0; i < batches.size(); i += 4) {
      std::vector<at::Tensor> data;
      std::vector<at::Tensor> target;
      for (std::size_t j = i; j < i + 4; ++j) {
        data.push_back(batches[j].data);
        target.push_back(batches[j].target);
      }
      joined.push_back({at::cat(data), at::cat(target)});
    }
    auto loop = oracle::classifier(make<PlainNet>(), recipe());
    const auto want = oracle::run_windows(loop, joined, 1);
    const auto got = treadle_run<PlainNet>(CrossEntropy{}, td::policies(AccumulateOver{.batches = 4}), batches);
    oracle::check_same(got, want, weights(*make<PlainNet>()), 0, 1e-4);
  }
}

namespace {
/// Sequences of 4 tokens, of which the last `ignored` targets do not count.
td::Batch tokens(std::int64_t rows, std::int64_t ignored, std::uint64_t seed) {
  auto flat = make_batch(rows * 4, seed);
  auto target = flat.target.clone();
  if (ignored > 0) target.slice(0, target.size(0) - ignored).fill_(-100);
  return {flat.data.view({rows, 4, 6}), target.view({rows, 4})};
}
}  // namespace

namespace {
/// As `TokenLoss`, with the count read on the host.
struct HostTokenLoss {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    const auto loss = TokenLoss{}(net, batch);
    return {loss.value, loss.device_count.item<std::int64_t>()};
  }
};
}  // namespace

TEST_CASE("ragged token counts stay on the device") {
  const std::vector<td::Batch> batches{tokens(2, 0, 1), tokens(2, 3, 2), tokens(3, 7, 3), tokens(1, 1, 4),
                                       tokens(2, 5, 5), tokens(2, 1, 6), tokens(2, 0, 7), tokens(2, 6, 8)};
  const State start = weights(*make<PlainNet>());
  for (const int n : {1, 3, 4}) {
    CAPTURE(n);
    auto loop = oracle::token_model(make<PlainNet>(), recipe());
    const auto want = oracle::run_windows(loop, batches, static_cast<std::size_t>(n));
    const auto got = treadle_run<PlainNet>(TokenLoss{}, td::policies(AccumulateOver{.batches = n}), batches);
    oracle::check_same(got, want, start, 0, 1e-4);
  }
  SUBCASE("and without accumulation") {
    auto loop = oracle::token_model(make<PlainNet>(), recipe());
    oracle::check_same(treadle_run<PlainNet>(TokenLoss{}, td::policies(), batches),
                       oracle::run_windows(loop, batches, 1), start, 0, 1e-4);
  }
  SUBCASE("and counted on the host") {
    auto loop = oracle::token_model(make<PlainNet>(), recipe());
    oracle::check_same(treadle_run<PlainNet>(HostTokenLoss{}, td::policies(AccumulateOver{.batches = 3}), batches),
                       oracle::run_windows(loop, batches, 3), start, 0, 1e-4);
  }
  SUBCASE("and in slices of a batch") {
    auto loop = oracle::token_model(make<PlainNet>(), recipe());
    oracle::check_same(treadle_run<PlainNet>(TokenLoss{}, td::policies(SplitBatch{.micro_batches = 2}), batches),
                       oracle::run_slices(loop, batches, 2), start, 0, 1e-4);
  }
}

TEST_CASE("an all-ignored micro-batch counts nothing") {
  for (const std::size_t where : {0U, 1U, 2U}) {
    CAPTURE(where);
    std::vector<td::Batch> batches{tokens(2, 0, 1), tokens(2, 3, 2), tokens(2, 2, 3),
                                   tokens(2, 0, 4), tokens(2, 1, 5), tokens(2, 4, 6)};
    batches[where] = tokens(2, 8, 9);
    auto loop = oracle::token_model(make<PlainNet>(), recipe());
    const auto want = oracle::run_windows(loop, batches, 3);
    const auto got = treadle_run<PlainNet>(TokenLoss{}, td::policies(AccumulateOver{.batches = 3}), batches);
    oracle::check_same(got, want, weights(*make<PlainNet>()), 0, 1e-4);
  }
}

TEST_CASE("an all-ignored window changes nothing, under Ignore too") {
  const std::vector<td::Batch> ignored{tokens(2, 8, 1), tokens(1, 4, 2)};
  const std::vector<td::Batch> good{tokens(2, 1, 3), tokens(2, 3, 4)};
  const auto check = [&](auto policies, auto objective, bool on_device) {
    td::Trainer trainer{make<PlainNet>(), objective,
                        td::optim::AdamW{.learning_rate = lr, .schedule = td::schedule::linear({.steps = 5})},
                        policies};
    const auto first = weights(trainer.model());
    trainer.step(ignored);  // before there is any rule state
    CHECK(difference(weights(trainer.model()), first) == "");
    trainer.step(good);
    CHECK(difference(weights(trainer.model()), first) != "");
    auto before = everything(trainer);
    before.erase("rule/learning_rates");  // the rate of the step under way is looked up before its count is known
    const auto done = trainer.step(ignored);
    auto after = everything(trainer);
    after.erase("rule/learning_rates");
    CHECK(difference(after, before) == "");
    CHECK(done.loss.template item<double>() == 0);
    CHECK(done.count == 0);
    CHECK(done.device_count.defined() == on_device);
    if (on_device) CHECK(done.device_count.template item<double>() == 0);
    CHECK(trainer.skipped_steps().template item<std::int64_t>() == 2);
    CHECK(trainer.rule().rates().of(0).template item<float>() == doctest::Approx(lr * 0.8));  // one step was applied
    trainer.check();
    trainer.step(good);
    CHECK(finite(weights(trainer.model())));
  };
  const auto check_both = [&](auto policies) {
    check(policies, TokenLoss{}, true);
    check(policies, HostTokenLoss{}, false);
  };
  const AccumulateOver two{.batches = 2};
  SUBCASE("Ignore") {
    check_both(td::policies(two));
  }
  SUBCASE("Skip, clipping, average") {
    check_both(td::policies(two, td::nonfinite::Skip{}, td::clipping::ClipNorm{},
                            td::averaging::ExponentialAverage{.decay = 0.5}));
  }
  SUBCASE("Stop goes on: nothing was non-finite") {
    check_both(td::policies(two, td::nonfinite::Stop{}));
  }
  SUBCASE("ClipValue") {
    check_both(td::policies(two, td::clipping::ClipValue{}));
  }
}

namespace {
/// `TokenLoss` with an infinite gradient where the batch's first number is above 100.
struct OverflowingTokenLoss {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    auto loss = TokenLoss{}(net, batch);
    if (batch.data.flatten()[0].item<float>() > 100) {
      const auto& b = net.last->bias;
      loss.value = loss.value + torch::sqrt((b - b.detach()).sum());
    }
    return loss;
  }
};
}  // namespace

TEST_CASE("under Fp16 and Ignore an overflow is applied, with counts on the device too") {
  auto bad = tokens(2, 1, 3);
  bad.data = bad.data.clone();
  bad.data.view({-1})[0] = 1000;
  td::Trainer trainer{make<PlainNet>(), OverflowingTokenLoss{}, td::optim::Sgd{},
                      td::policies(td::precision::Fp16{.initial_scale = 1024}, td::nonfinite::Ignore{})};
  trainer.accumulate(bad);
  CHECK(!finite(weights(trainer.model())));
  CHECK(trainer.precision().loss_scale().item<float>() == 512);
}

TEST_CASE("an all-ignored window says nothing about the loss scale") {
  td::Trainer trainer{make<PlainNet>(), TokenLoss{}, td::optim::AdamW{},
                      td::policies(td::precision::Fp16{.initial_scale = 1024, .growth_interval = 2})};
  trainer.step(std::vector{tokens(2, 1, 3)});
  const auto before = state_of(trainer.precision());
  trainer.step(std::vector{tokens(2, 8, 1)});
  CHECK(difference(state_of(trainer.precision()), before) == "");
  trainer.step(std::vector{make_batch(0, 1)});
  CHECK(difference(state_of(trainer.precision()), before) == "");
  trainer.step(std::vector{tokens(2, 1, 3)});
  CHECK(trainer.precision().loss_scale().item<float>() == 2048);
}

TEST_CASE("a window cut by the epoch's end") {
  const auto batches = make_batches({8, 8, 8, 8, 4, 6});  // windows of 4: one full, one of two ragged batches
  const State start = weights(*make<TinyNet>());
  constexpr int epochs = 2;
  SUBCASE("is a step with its true weight") {
    td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                        td::policies(AccumulateOver{.batches = 4})};
    reseed(7);
    const auto result = trainer.fit(batches, {.epochs = epochs});
    CHECK(result.steps == 2 * epochs);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    for (int epoch = 0; epoch < epochs; ++epoch) oracle::run_windows(loop, batches, 4);
    CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);
  }
  SUBCASE("is dropped if the option says so") {
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                        td::policies(AccumulateOver{.batches = 4, .tail = Tail::Drop})};
    const auto result = trainer.fit(batches, {.epochs = epochs});
    CHECK(result.steps == epochs);
    CHECK(!trainer.accumulation().open());
    auto loop = oracle::classifier(make<PlainNet>(), recipe());
    const std::vector<td::Batch> full(batches.begin(), batches.begin() + 4);
    for (int epoch = 0; epoch < epochs; ++epoch) oracle::run_windows(loop, full, 4);
    CHECK(difference(weights(trainer.model()), weights(*loop.net())) == "");
  }
  SUBCASE("an epoch shorter than the window is one step") {
    const std::vector<td::Batch> few(batches.begin() + 3, batches.end());
    td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                        td::policies(AccumulateOver{.batches = 16})};
    reseed(7);
    const auto result = trainer.fit(few, {.epochs = 3});
    CHECK(result.steps == 3);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    for (int epoch = 0; epoch < 3; ++epoch) loop.step(few);
    CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);
  }
  SUBCASE("a loader of unknown length") {
    td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                        td::policies(AccumulateOver{.batches = 4})};
    Stream stream(batches);
    reseed(7);
    const auto result = trainer.fit(stream, {.epochs = epochs});
    CHECK(result.steps == 2 * epochs);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    for (int epoch = 0; epoch < epochs; ++epoch) oracle::run_windows(loop, batches, 4);
    CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);
  }
}

TEST_CASE("an empty micro-batch adds exact zeros") {
  const auto with = make_batches({8, 0, 8, 0, 8, 8}, 40);
  std::vector<td::Batch> without{with[0], with[2], with[4], with[5]};
  SUBCASE("inside a window") {
    const auto got = treadle_run<TinyNet>(CrossEntropy{}, td::policies(AccumulateOver{.batches = 3}), with);
    auto loop = oracle::classifier(make<TinyNet>(), recipe());
    reseed(7);
    const auto want = oracle::run_windows(loop, without, 2);
    oracle::check_same(got, want, weights(*make<TinyNet>()), want.size(), 0);
  }
  SUBCASE("as a whole step it changes nothing") {
    td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::Sgd{.learning_rate = lr, .momentum = 0.9}};
    reseed(7);
    const auto first = everything(trainer);
    trainer.accumulate(with[1]);
    CHECK(difference(everything(trainer), first) == "");
    trainer.accumulate(with[0]);
    const auto before = everything(trainer);
    trainer.accumulate(with[1]);
    CHECK(difference(everything(trainer), before) == "");
    trainer.accumulate(with[2]);
    auto loop = oracle::classifier(
        make<TinyNet>(), {.rule = oracle::Rule::Sgd, .learning_rate = lr, .weight_decay = 0, .momentum = 0.9});
    reseed(7);
    loop.step({with[0]});
    loop.step({with[2]});
    CHECK(difference(weights(trainer.model()), weights(*loop.net())) == "");
  }
}

TEST_CASE("slices of a loader batch") {
  const auto batches = make_batches({8, 8, 16, 7, 5, 3});
  const State start = weights(*make<PlainNet>());
  for (const int n : {1, 2, 4}) {
    CAPTURE(n);
    auto loop = oracle::classifier(make<PlainNet>(), recipe());
    const auto want = oracle::run_slices(loop, batches, n);
    const auto got = treadle_run<PlainNet>(CrossEntropy{}, td::policies(SplitBatch{.micro_batches = n}), batches);
    oracle::check_same(got, want, start, 3, 1e-4);
    // The same as the whole batch at once, up to rounding.
    auto whole = oracle::classifier(make<PlainNet>(), recipe());
    oracle::check_same(got, oracle::run_windows(whole, batches, 1), start, 0, 1e-4);
  }
  SUBCASE("a batch of fewer rows makes fewer slices, one of none changes nothing") {
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{},
                        td::policies(SplitBatch{.micro_batches = 4})};
    CHECK(trainer.accumulate(batches[5])->micro_batches == 3);
    const auto before = everything(trainer);
    const auto done = trainer.accumulate(make_batch(0, 1));
    REQUIRE(done.has_value());
    CHECK(done->count == 0);
    CHECK(difference(everything(trainer), before) == "");
  }
}

TEST_CASE("flush ends an open window and step takes a range of any length") {
  const auto batches = make_batches({8, 8, 8, 5, 3, 4});
  const State start = weights(*make<PlainNet>());
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(AccumulateOver{.batches = 4})};
  auto loop = oracle::classifier(make<PlainNet>(), recipe());
  CHECK(!trainer.flush());
  CHECK(!trainer.accumulate(batches[0]));
  CHECK(!trainer.accumulate(batches[3]));
  const auto done = trainer.flush();
  REQUIRE(done.has_value());
  CHECK(done->micro_batches == 2);
  CHECK(done->count == 13);
  CHECK(done->index == 0);
  CHECK(!trainer.flush());
  loop.step({batches[0], batches[3]});
  CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);

  const auto longer = trainer.step(batches);  // 6 batches, the policy says 4: the fourth closes one step already
  loop.step({batches.begin(), batches.begin() + 4});
  loop.step({batches[4], batches[5]});
  CHECK(trainer.steps() == 3);
  CHECK(longer.micro_batches == 2);
  CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);

  const auto shorter = trainer.step(std::vector{batches[4], batches[5]});
  CHECK(shorter.micro_batches == 2);
  loop.step({batches[4], batches[5]});
  CHECK(distance(weights(trainer.model()), weights(*loop.net()), start) < 1e-4);
  CHECK_THROWS_AS(trainer.step(std::vector<td::Batch>{}), td::DataError);
}

TEST_CASE("the nominal count changes no result") {
  const auto batches = make_batches({8, 5, 2, 7, 3, 8, 8, 4});
  const State start = weights(*make<TinyNet>());
  const auto policies = td::policies(AccumulateOver{.batches = 4});
  const auto want = treadle_run<TinyNet>(CrossEntropy{}, policies, batches);
  for (const double c0 : {1.0, 7.0, 4096.0}) {
    CAPTURE(c0);
    oracle::check_same(treadle_run<TinyNet>(CrossEntropy{}, policies, batches, {.nominal_count = c0}), want, start, 0,
                       1e-4);
  }
}
