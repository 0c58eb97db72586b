// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// What DataParallel does beside its arithmetic (which the matrix has): replicas, statistics, records, faults, threads.
#include "treadle/parallelism/data_parallel.hpp"

#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/oracle.hpp"
#include "support/throws.hpp"
#include "treadle/testing/parallelism.hpp"

namespace {

using namespace treadle_test;
using oracle::NonFinite;

std::vector<at::Device> devices(std::size_t n) {
  return std::vector<at::Device>(n, device());
}
struct MakePlain {
  PlainNet operator()() const { return PlainNet(); }
};
struct MakeTiny {
  TinyNet operator()() const { return TinyNet(); }
};

/// Every replica on a thread and with memory of its own, as if each device were another one.
template <class Factory>
struct Apart : td::parallelism::BasicDataParallel<Factory> {
  using Base = td::parallelism::BasicDataParallel<Factory>;
  struct State : Base::State {
    explicit State(const Apart& policy) : Base::State(policy, /*apart=*/true) {}
  };
};
template <class Factory>
Apart<Factory> apart(std::size_t n, Factory factory) {
  return {{devices(n), factory}};
}

/// A torch::nn::Cloneable that counts how often it is made.
struct CountedImpl : torch::nn::Cloneable<CountedImpl> {
  CountedImpl() { reset(); }
  void reset() override {
    ++made;
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(6, 8).bias(false)));
    batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(8));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    last = register_module("last", torch::nn::Linear(8, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return last(dropout(torch::tanh(batch_norm(first(x))))); }
  static inline std::atomic<int> made = 0;
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Counted);

/// One shard of a batch, for the loop by hand.
struct Shard {
  at::Tensor data;
  at::Tensor target;
  bool first;
};
std::vector<Shard> cut(const td::Batch& batch, std::int64_t parts) {
  const auto rows = batch.data.size(0);
  const auto n = std::max<std::int64_t>(1, std::min(parts, rows));
  std::vector<Shard> shards;
  for (std::int64_t i = 0; i < n; ++i)
    shards.push_back({batch.data.slice(0, rows * i / n, rows * (i + 1) / n),
                      batch.target.slice(0, rows * i / n, rows * (i + 1) / n), i == 0});
  return shards;
}
std::vector<td::Batch> plain(const std::vector<Shard>& shards) {
  std::vector<td::Batch> batches;
  for (const auto& shard : shards) batches.push_back({shard.data, shard.target});
  return batches;
}

/// The rule in plain words: one model takes the shards in turn, and what any but the first does to buffers is undone.
template <class Net>
oracle::Loop<Net, Shard> by_hand(Net net, const oracle::Recipe& recipe) {
  return {std::move(net), recipe,
          [](Net& n, const Shard& shard) {
            const State before = buffers(*n);
            const auto loss = torch::nn::functional::cross_entropy(n->forward(shard.data), shard.target);
            const at::NoGradGuard no_grad;
            if (!shard.first)
              for (const auto& item : n->named_buffers())
                item.value().set_data(before.at(item.key()));  // no new version
            return loss;
          },
          [](const Shard& shard) { return static_cast<double>(shard.target.size(0)); }};
}
template <class Net>
std::vector<oracle::Record> steps_by_hand(oracle::Loop<Net, Shard>& loop, const std::vector<td::Batch>& batches,
                                          std::int64_t parts) {
  std::vector<oracle::Record> records;
  for (const auto& batch : batches) records.push_back(loop.step(cut(batch, parts)));
  return records;
}

const td::optim::AdamW adamw{.learning_rate = 1e-2, .weight_decay = 1e-2};

}  // namespace

TEST_CASE(
    "dropout and batch norm: shards draw in order, normalize over their own rows, and the first one's statistics "
    "count") {
  const auto batches = make_batches({8, 8, 8, 8, 9, 7, 4, 6});
  const State start = weights(*make<TinyNet>());
  for (const bool skips : {false, true}) {
    auto run = [&](auto nonfinite) {
      auto given = batches;
      if (skips) given[2] = poisoned(given[2]);  // in the second shard
      oracle::Recipe recipe;
      recipe.nonfinite = skips ? NonFinite::Skip : NonFinite::Ignore;
      td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, adamw,
                          td::policies(td::parallelism::data_parallel(devices(2), MakeTiny{}), nonfinite)};
      reseed(7);
      const auto got = oracle::run(trainer, given);
      auto loop = by_hand(make<TinyNet>(), recipe);
      reseed(7);
      const auto want = steps_by_hand(loop, given, 2);
      oracle::check_same(got, want, start, device().is_cpu() ? 4 : 0, 5e-4);
      for (std::size_t i = 0; i < want.size(); ++i)
        for (const auto& item : want[i].buffers)
          CHECK_MESSAGE(oracle::near(got[i].buffers.at(item.first), item.second, 1e-5), item.first);
      CHECK(trainer.skipped_steps().template item<std::int64_t>() == (skips ? 1 : 0));
    };
    if (skips)
      run(td::nonfinite::Skip{});
    else
      run(td::nonfinite::Ignore{});
  }
}

TEST_CASE("a window of several micro-batches: the first shard of each moves the statistics") {
  const auto batches = make_batches({8, 8, 6, 6});
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, adamw,
                      td::policies(td::parallelism::data_parallel(devices(2), MakeTiny{}),
                                   td::accumulation::AccumulateOver{.batches = 2})};
  reseed(7);
  const auto got = oracle::run(trainer, batches);
  const State start = weights(*make<TinyNet>());
  auto loop = by_hand(make<TinyNet>(), {});
  reseed(7);
  std::vector<oracle::Record> want;
  for (std::size_t i = 0; i < 4; i += 2) {
    auto window = cut(batches[i], 2);
    for (auto& shard : cut(batches[i + 1], 2)) window.push_back(shard);
    want.push_back(loop.step(window));
  }
  oracle::check_same(got, want, start, 0, 5e-4);
}

TEST_CASE("runs with dropout repeat bit by bit, and making replicas draws no random number") {
  const auto batches = make_batches({8, 7, 9, 4, 8});
  const auto run = [&] {
    auto net = make<Counted>();
    reseed(7);
    td::Trainer trainer{net, CrossEntropy{}, adamw, td::policies(td::parallelism::DataParallel{.devices = devices(2)})};
    return oracle::run(trainer, batches);
  };
  const auto first = run();
  const auto second = run();
  for (std::size_t i = 0; i < first.size(); ++i) {
    CHECK(difference(first[i].weights, second[i].weights) == "");
    CHECK(difference(first[i].buffers, second[i].buffers) == "");
  }
  const State start = weights(*make<Counted>());
  auto loop = by_hand(make<Counted>(), {});
  reseed(7);
  const auto want = steps_by_hand(loop, batches, 2);
  oracle::check_same(first, want, start, device().is_cpu() ? 1 : 0, 5e-4);
}

TEST_CASE("replicas are made with the trainer, and never in a step") {
  const auto net = make<Counted>();
  const int before = Counted::ContainedType::made;
  td::Trainer trainer{net, CrossEntropy{}, adamw,
                      td::policies(td::parallelism::DataParallel{.devices = devices(3)},
                                   td::accumulation::AccumulateOver{.batches = 2})};
  CHECK(Counted::ContainedType::made - before == 2);
  CHECK(&trainer.model() == net.get());
  oracle::run(trainer, make_batches({8, 7, 9, 6, 8}));
  trainer.evaluate(make_batches({4}));
  CHECK(Counted::ContainedType::made - before == 2);
}

TEST_CASE("counts on the device: ragged tokens, a shard and a batch without any") {
  std::vector<td::Batch> batches;
  for (std::uint64_t i = 0; i < 6; ++i) {
    const std::int64_t rows = i == 3 ? 1 : 4 + static_cast<std::int64_t>(i % 2);
    auto data = make_batch(rows * 3, 40 + i);
    auto target = data.target.reshape({rows, 3}).clone();
    target[0][1] = -100;
    if (i == 2) target.slice(0, rows / 2) = -100;  // the second shard counts nothing
    if (i == 4) target.fill_(-100);                // nobody does
    batches.push_back({data.data.reshape({rows, 3, 6}), target});
  }
  const State start = weights(*make<PlainNet>());
  for (const std::size_t n : {2, 3}) {
    td::Trainer trainer{make<PlainNet>(), TokenLoss{}, adamw,
                        td::policies(td::parallelism::data_parallel(devices(n), MakePlain{}))};
    const auto got = oracle::run(trainer, batches);
    auto loop = oracle::token_model(make<PlainNet>(), {});
    std::vector<oracle::Record> want;
    for (const auto& batch : batches) want.push_back(loop.step(plain(cut(batch, static_cast<std::int64_t>(n)))));
    CHECK(want[4].skipped);
    oracle::check_same(got, want, start, 0, 5e-4);
  }
}

TEST_CASE("a shard that counts nothing is a micro-batch all the same") {
  struct Objective {  // the mean over rows of the first two classes
    td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
      const auto rows = batch.target.lt(2).nonzero().flatten();
      return td::mean_loss(net.forward(batch.data.index_select(0, rows)), batch.target.index_select(0, rows));
    }
  };
  auto batches = make_batches({8, 8, 8});
  batches[0].target.slice(0, 0, 4).fill_(3);
  batches[1].target.fill_(4);
  batches[2].target.slice(0, 4).fill_(2);
  batches[2].target[0] = 1;
  td::Trainer trainer{make<PlainNet>(), Objective{}, adamw,
                      td::policies(td::parallelism::data_parallel(devices(2), MakePlain{}))};
  auto loop = oracle::Loop<PlainNet>(
      make<PlainNet>(), {},
      [](PlainNet& net, const td::Batch& batch) {
        const auto keep = batch.target.lt(2).to(at::kFloat);
        const auto picked = torch::log_softmax(net->forward(batch.data), 1).gather(1, batch.target.unsqueeze(1));
        return -(picked.squeeze(1) * keep).sum() / keep.sum().clamp_min(1);
      },
      [](const td::Batch& batch) { return batch.target.lt(2).sum().item<double>(); });
  std::vector<oracle::Record> got;
  std::vector<oracle::Record> want;
  for (const auto& batch : batches) {
    const auto done = trainer.accumulate(batch);
    CHECK(done->micro_batches == 2);
    got.push_back(oracle::record_of(trainer, *done));
    want.push_back(loop.step(plain(cut(batch, 2))));
  }
  CHECK(want[1].skipped);
  oracle::check_same(got, want, weights(*make<PlainNet>()), 0, 5e-4);
}

namespace {
/// Records under names that not every shard knows, and counts on host and device.
struct Recording {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch, auto& step) const {
    const auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    step.record("rows", static_cast<double>(batch.data.size(0)), 1);
    step.record("counted", batch.target.sum(), batch.target.ne(0).sum());
    if (batch.target[0].template item<std::int64_t>() % 2 == 1) step.record("odd first", 1.0, 1);
    return td::mean_loss(logits, batch.target);
  }
};
double value_of(const td::Records& records, std::string_view name) {
  const auto* found = records.find(name);
  if (found == nullptr) return -1;
  return found->sum.item<double>() /
         (found->count + (found->device_count.defined() ? found->device_count.item<double>() : 0.0));
}
}  // namespace

TEST_CASE("records of all shards add up, in the first one's order of names") {
  const auto check = [&](auto parallel) {
    td::Trainer trainer{make<PlainNet>(), Recording{}, adamw,
                        td::policies(parallel, td::accumulation::AccumulateOver{.batches = 2})};
    auto net = make<PlainNet>();
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const auto net_weights = weights(trainer.model());
      for (const auto& item : net->named_parameters()) item.value().detach().copy_(net_weights.at(item.key()));
      const std::vector<td::Batch> window{make_batch(7, 60 + seed), make_batch(5, 80 + seed)};
      double correct = 0, rows = 0, sum = 0, nonzero = 0, shards = 0, odd = 0;
      for (const auto& batch : window)
        for (const auto& shard : cut(batch, 3)) {
          correct += (net->forward(shard.data).argmax(1) == shard.target).sum().item<double>();
          rows += static_cast<double>(shard.data.size(0));
          sum += shard.target.sum().item<double>();
          nonzero += shard.target.ne(0).sum().item<double>();
          shards += 1;
          odd += shard.target[0].item<std::int64_t>() % 2 == 1;
        }
      trainer.accumulate(window[0]);
      const auto done = trainer.accumulate(window[1]);
      REQUIRE(done);
      CHECK(done->micro_batches == 6);
      CHECK(value_of(done->records, "accuracy") == doctest::Approx(correct / rows));
      CHECK(value_of(done->records, "rows") == doctest::Approx(rows / shards));
      CHECK(value_of(done->records, "counted") == doctest::Approx(sum / nonzero));
      CHECK(value_of(done->records, "odd first") == (odd > 0 ? 1 : -1));
      CHECK(done->records.begin()->name == "accuracy");
    }
  };
  check(td::parallelism::data_parallel(devices(3), MakePlain{}));
  check(apart(3, MakePlain{}));
}

namespace {
/// Throws where a shard begins with this number.
struct Throwing {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch, auto& step) const {
    step.record("rows", static_cast<double>(batch.data.size(0)), 1);
    const auto mark = batch.data[0][0].template item<double>();
    if (mark > 1000) throw std::runtime_error("shard of " + std::to_string(static_cast<int>(mark)));
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
td::Batch marked(td::Batch batch, std::int64_t row, double mark) {
  batch.data = batch.data.clone();
  batch.data[row][0] = mark;
  return batch;
}
}  // namespace

TEST_CASE("a forward pass that throws leaves the trainer as it was, threads included") {
  const auto batches = make_batches({8, 8, 8, 8});
  const State start = weights(*make<PlainNet>());
  const auto check = [&](auto parallel) {
    td::Trainer trainer{make<PlainNet>(), Throwing{}, adamw,
                        td::policies(parallel, td::accumulation::AccumulateOver{.batches = 2})};
    auto loop = by_hand(make<PlainNet>(), {});
    for (int round = 0; round < 3; ++round) {
      for (const std::int64_t row : {0, 4}) {
        trainer.accumulate(batches[0]);
        CHECK(treadle_test::thrown<std::runtime_error>([&] { trainer.accumulate(marked(batches[1], row, 2000)); }) ==
              "shard of 2000");
      }
      auto both = marked(marked(batches[1], 0, 3000), 4, 4000);
      CHECK(treadle_test::thrown<std::runtime_error>([&] { trainer.accumulate(both); }) == "shard of 3000");
      trainer.accumulate(batches[2]);
      const auto done = trainer.accumulate(batches[3]);
      REQUIRE(done);
      CHECK(value_of(done->records, "rows") == 4);  // of four shards of this window alone
      auto window = cut(batches[2], 2);
      for (auto& shard : cut(batches[3], 2)) window.push_back(shard);
      const std::vector<oracle::Record> got{oracle::record_of(trainer, *done)};
      const std::vector<oracle::Record> want{loop.step(window)};
      oracle::check_same(got, want, start, 0, 5e-4);
    }
  };
  check(td::parallelism::data_parallel(devices(2), MakePlain{}));
  check(apart(2, MakePlain{}));
}

TEST_CASE("a backward pass that throws, and losses that cannot be used, leave the trainer usable") {
  struct Objective {
    td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
      const auto loss = torch::nn::functional::cross_entropy(net.forward(batch.data), batch.target);
      const auto mark = batch.data[0][0].item<double>();
      if (mark > 2000) return td::Loss::mean(loss.detach(), batch.data.size(0));
      if (mark > 1000)
        loss.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no way back"); });
      return td::Loss::mean(loss, batch.data.size(0));
    }
  };
  const auto batch = make_batch(8, 3);
  for (const bool separate : {false, true}) {
    const auto check = [&](auto parallel) {
      td::Trainer trainer{make<PlainNet>(), Objective{}, adamw, td::policies(parallel)};
      CHECK(treadle_test::thrown<std::runtime_error>([&] {
              trainer.accumulate(marked(batch, 4, 1500));
            }).find("no way back") != std::string::npos);
      CHECK_SAYS(td::ConfigError, "has no gradient", trainer.accumulate(marked(batch, 4, 2500)));
      auto loop = by_hand(make<PlainNet>(), {});
      const std::vector<oracle::Record> got{oracle::record_of(trainer, *trainer.accumulate(batch))};
      oracle::check_same(got, {loop.step(cut(batch, 2))}, weights(*make<PlainNet>()), device().is_cpu() ? 1 : 0, 5e-4);
    };
    if (separate)
      check(apart(2, MakePlain{}));
    else
      check(td::parallelism::data_parallel(devices(2), MakePlain{}));
  }
}

TEST_CASE("replicas with threads and memory of their own compute what those of one device do") {
  const auto batches = make_batches({9, 8, 1, 2, 3, 7, 9});
  const auto run = [&](auto parallel, auto precision, auto accumulation) {
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, adamw, td::policies(parallel, precision, accumulation)};
    return oracle::run(trainer, batches);
  };
  const auto check = [&](auto precision, auto accumulation) {
    const auto want = run(td::parallelism::data_parallel(devices(3), MakePlain{}), precision, accumulation);
    const auto got = run(apart(3, MakePlain{}), precision, accumulation);
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      CHECK(difference(got[i].weights, want[i].weights) == "");
      CHECK(got[i].loss == want[i].loss);
    }
  };
  check(td::precision::Fp32{}, td::accumulation::NoAccumulation{});
  check(td::precision::Bf16{}, td::accumulation::AccumulateOver{.batches = 2});
  check(td::precision::Fp16{}, td::accumulation::NoAccumulation{});
  check(td::precision::Bf16Weights{}, td::accumulation::NoAccumulation{});
  check(td::precision::Bf16Weights{}, td::accumulation::SplitBatch{.micro_batches = 2});
}

namespace {
struct Seen {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  int forwards = 0;
  int without_gradient = 0;
  int with_autocast = 0;
  int with_bf16 = 0;
};
struct Looking {
  Seen* seen;
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    const auto logits = net.forward(batch.data);
    const std::lock_guard lock(seen->mutex);
    seen->threads.insert(std::this_thread::get_id());
    ++seen->forwards;
    seen->without_gradient += !at::GradMode::is_enabled();
    seen->with_autocast += at::autocast::is_autocast_enabled(device().type());
    seen->with_bf16 += logits.scalar_type() == at::kBFloat16;
    return td::mean_loss(logits, batch.target);
  }
};
}  // namespace

TEST_CASE("threads stay, and take over the caller's grad mode and autocast") {
  const auto batch = make_batch(8, 1);
  {
    Seen seen;
    td::Trainer trainer{make<PlainNet>(), Looking{&seen}, adamw, td::policies(apart(3, MakePlain{}))};
    for (int i = 0; i < 5; ++i) trainer.accumulate(batch);
    CHECK(seen.threads.size() == 3);
    CHECK(seen.threads.contains(std::this_thread::get_id()));
    CHECK(seen.forwards == 15);
    CHECK(seen.without_gradient == 0);
    CHECK(seen.with_autocast == 0);
    {
      const at::NoGradGuard no_grad;
      CHECK_SAYS(td::ConfigError, "has no gradient", trainer.accumulate(batch));
    }
    CHECK(seen.without_gradient == 3);
    {
      const td::precision::Autocast region(device().type(), at::kBFloat16);
      trainer.accumulate(batch);  // a step is off in it, on every thread
    }
    CHECK(seen.with_autocast == 0);
    CHECK(seen.with_bf16 == 0);
    CHECK(seen.threads.size() == 3);
  }
  {
    Seen seen;
    td::Trainer trainer{make<PlainNet>(), Looking{&seen}, adamw,
                        td::policies(apart(3, MakePlain{}), td::precision::Bf16{})};
    for (int i = 0; i < 5; ++i) trainer.accumulate(batch);
    CHECK(seen.with_autocast == 15);
    CHECK(seen.with_bf16 == 15);
  }
}

TEST_CASE("one device: one thread, the caller's") {
  Seen seen;
  td::Trainer trainer{make<PlainNet>(), Looking{&seen}, adamw,
                      td::policies(td::parallelism::data_parallel(devices(3), MakePlain{}))};
  trainer.accumulate(make_batch(8, 1));
  CHECK(seen.threads == std::set<std::thread::id>{std::this_thread::get_id()});
  CHECK(seen.forwards == 3);
}

TEST_CASE("what changes in the model between windows reaches the replicas: weights, modes, what is frozen") {
  const auto batches = make_batches({8, 8, 8, 8});
  const auto check = [&](auto parallel) {
    auto net = make<TinyNet>();
    net->dropout->eval();  // no chance: threads apart draw in no order
    td::Trainer trainer{net, CrossEntropy{}, adamw, td::policies(parallel)};
    auto other = make<TinyNet>();
    other->dropout->eval();
    auto loop = by_hand(other, {});
    std::vector<oracle::Record> got;
    std::vector<oracle::Record> want;
    const auto step = [&](std::size_t i) {
      got.push_back(oracle::record_of(trainer, *trainer.accumulate(batches[i])));
      want.push_back(loop.step(cut(batches[i], 2)));
    };
    step(0);
    for (auto model : {net, other}) {
      const at::NoGradGuard no_grad;
      model->second->weight.mul_(0.5);
      model->batch_norm->running_mean.add_(0.25);
    }
    step(1);
    for (auto model : {net, other}) model->batch_norm->eval();  // it now computes with its statistics
    step(2);
    for (auto model : {net, other}) model->batch_norm->train();
    net->first->weight.requires_grad_(false);
    const auto frozen = net->first->weight.detach().clone();
    trainer.accumulate(batches[3]);
    CHECK(same_bits(net->first->weight, frozen));
    CHECK(!same_bits(net->second->weight, got.back().weights.at("second.weight")));
    oracle::check_same(got, want, weights(*make<TinyNet>()), device().is_cpu() ? 3 : 0, 5e-4);
  };
  check(td::parallelism::data_parallel(devices(2), MakeTiny{}));
  check(apart(2, MakeTiny{}));
}

namespace {
/// A part that only some shards use, a parameter of one element, and one that nobody uses.
struct BranchedImpl : torch::nn::Module {
  BranchedImpl()
      : trunk(register_module("trunk", torch::nn::Linear(6, 8))),
        branch(register_module("branch", torch::nn::Linear(6, 8))),
        last(register_module("last", torch::nn::Linear(8, 5))),
        gain(register_parameter("gain", torch::ones({1}))),
        unused(register_parameter("unused", torch::ones({3}))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = trunk(x);
    if (x[0][0].item<double>() > 0) y = y + branch(x);
    return last(torch::tanh(y * gain));
  }
  torch::nn::Linear trunk, branch, last;
  at::Tensor gain, unused;
};
TORCH_MODULE(Branched);
}  // namespace

TEST_CASE("parameters that not every replica uses") {
  const auto batches = make_batches({8, 8, 8, 6, 5, 2, 8, 8});
  const auto start = weights(*make<Branched>());
  const auto check = [&](auto parallel) {
    td::Trainer trainer{make<Branched>(), CrossEntropy{}, adamw, td::policies(parallel)};
    const auto got = oracle::run(trainer, batches);
    auto loop = by_hand(make<Branched>(), {});
    oracle::check_same(got, steps_by_hand(loop, batches, 3), start, 0, 5e-4);
    CHECK(same_bits(trainer.model().unused, start.at("unused")));
  };
  const auto factory = [] { return Branched(); };
  check(td::parallelism::data_parallel(devices(3), factory));
  check(apart(3, factory));
}

TEST_CASE("batches without rows, steps without batches, a range and an evaluation") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, adamw,
                      td::policies(td::parallelism::data_parallel(devices(2), MakePlain{}),
                                   td::accumulation::AccumulateOver{.batches = 3})};
  auto loop = by_hand(make<PlainNet>(), {});
  const auto batches = make_batches({0, 5, 0, 4, 3});
  std::vector<oracle::Record> got;
  std::vector<oracle::Record> want;
  for (std::size_t i = 0; i < 3; ++i)
    if (auto done = trainer.accumulate(batches[i])) got.push_back(oracle::record_of(trainer, *done));
  want.push_back(loop.step(cut(batches[1], 2)));
  CHECK(!trainer.accumulate(batches[3]));
  got.push_back(oracle::record_of(trainer, *trainer.flush()));
  want.push_back(loop.step(cut(batches[3], 2)));
  const auto joined = trainer.join();
  CHECK(joined.count == 0);
  oracle::check_same(got, want, weights(*make<PlainNet>()), 0, 5e-4);
  const auto metrics = trainer.evaluate(make_batches({5, 4}));
  CHECK(metrics["accuracy"] >= 0);
  CHECK((trainer.predict(make_batches({5, 4})).size(0) == 9));
}

TEST_CASE("TorchScript modules are copied deeply") {
  const auto scripted = [] {
    reseed(5);
    torch::jit::Module net("Net");
    net.register_attribute("training", c10::BoolType::get(), true);
    net.register_parameter("weight", torch::randn({6, 5}).mul_(0.4).to(device()).requires_grad_(true), false);
    net.register_buffer("calls", torch::zeros({}, device()));
    net.define("def forward(self, x):\n    self.calls.add_(1)\n    return torch.tanh(x).matmul(self.weight)\n");
    return net;
  };
  struct Objective {
    td::Loss operator()(torch::jit::Module& net, const td::Batch& batch) const {
      return td::mean_loss(net.forward({batch.data}).toTensor(), batch.target);
    }
  };
  auto net = scripted();
  td::Trainer trainer{net, Objective{}, td::optim::Sgd{.learning_rate = 0.1},
                      td::policies(td::parallelism::DataParallel{.devices = devices(2)})};
  auto weight = scripted().attr("weight").toTensor().detach().requires_grad_(true);
  for (const auto& batch : make_batches({8, 8, 8})) {
    trainer.accumulate(batch);
    auto loss = torch::nn::functional::cross_entropy(torch::tanh(batch.data).matmul(weight), batch.target);
    loss.backward();
    const at::NoGradGuard no_grad;
    weight.sub_(weight.grad(), 0.1);
    weight.mutable_grad().reset();
  }
  CHECK(at::allclose(net.attr("weight").toTensor(), weight, 1e-5, 1e-6));
  CHECK(net.attr("calls").toTensor().item<double>() == 3);  // the first shard's
}

TEST_CASE("faults in devices, factories and models are said in one sentence") {
  using td::parallelism::data_parallel;
  const auto made = [](auto parallel) {
    return td::Trainer{make<PlainNet>(), CrossEntropy{}, adamw, td::policies(parallel)}.steps();
  };
  CHECK_SAYS(td::ConfigError, "devices are of two kinds",
             made(data_parallel({at::Device(at::kCPU), at::Device(at::kCUDA, 0)}, MakePlain{})));
  CHECK_SAYS(td::ConfigError, "cuda:64", made(data_parallel({at::Device(at::kCUDA, 64)}, MakePlain{})));
  auto always = PlainNet();
  CHECK_SAYS(td::ConfigError, "make a new model", made(data_parallel(devices(3), [always] { return always; })));
  CHECK_SAYS(td::ConfigError, "make a new model",
             made(data_parallel(devices(2), [] { return std::shared_ptr<PlainNetImpl>(); })));
  const auto wider = [] {
    PlainNet net;
    net->last = torch::nn::Linear(8, 6);
    net->replace_module("last", net->last);
    return net;
  };
  CHECK_SAYS(td::ConfigError, "'last.weight' of sizes [6, 8]", made(data_parallel(devices(2), wider)));
  const auto longer = [] {
    PlainNet net;
    net->register_parameter("more", torch::zeros({1}));
    return net;
  };
  CHECK_SAYS(td::ConfigError, "a replica has 5 parameters, the model 4", made(data_parallel(devices(2), longer)));

  struct InConstructorImpl : torch::nn::Cloneable<InConstructorImpl> {
    InConstructorImpl() { linear = register_module("linear", torch::nn::Linear(6, 5)); }
    void reset() override {}
    at::Tensor forward(const at::Tensor& x) { return linear(x); }
    torch::nn::Linear linear{nullptr};
  };
  const td::parallelism::DataParallel two{.devices = devices(2)};
  CHECK_SAYS(td::ConfigError, "register everything in reset()",
             td::Trainer{std::make_shared<InConstructorImpl>(), CrossEntropy{}, adamw, td::policies(two)}.steps());
  struct OfAnotherClass : CountedImpl {};
  CHECK_SAYS(td::ConfigError, "a model of another class",
             td::Trainer{std::make_shared<OfAnotherClass>(), CrossEntropy{}, adamw, td::policies(two)}.steps());
}

TEST_CASE("a factory may hold what it needs, and policies with it are values") {
  const std::vector<std::int64_t> sizes{6, 8};
  const auto policies = td::policies(td::parallelism::data_parallel(devices(2), [sizes] {
    REQUIRE(sizes.size() == 2);
    return PlainNet();
  }));
  auto copy = policies;
  copy = policies;
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, adamw, copy};
  trainer.accumulate(make_batch(4, 1));
  CHECK(td::parallelism::DataParallel{.devices = devices(2)} == td::parallelism::DataParallel{.devices = devices(2)});
  CHECK(td::parallelism::DataParallel{.devices = devices(2)} != td::parallelism::DataParallel{});
  using P = td::Policies<td::parallelism::DataParallel>::Parallelism;
  CHECK((P::replicates && P::slices && P::threads && !P::processes && !P::finds_unused));
}

TEST_CASE("the contract's check finds nothing") {
  for (const std::size_t replicas : {1, 2, 3, 7}) {
    td::parallelism::DataParallel policy{.devices = devices(replicas)};
    for (const auto& sentence : td::testing::check_parallelism_contract(policy)) FAIL_CHECK(sentence);
  }
}

TEST_CASE("FlatBroadcast copies every kind of tensor, in chunks, as often as asked") {
  reseed(3);
  std::vector<at::Tensor> sources{torch::randn({3, 5}),
                                  torch::randn({2, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast),
                                  torch::randn({7}, at::kDouble),
                                  torch::arange(5),
                                  torch::ones({3}, at::kBool),
                                  torch::randn({40, 2}).slice(0, 0, 40, 2),  // with gaps
                                  torch::randn({0, 3}),
                                  torch::randn({}),
                                  torch::randn({100}).to(at::kBFloat16),
                                  torch::randn({300})};
  for (const std::int64_t chunk : {1, 200, 1 << 20}) {
    CAPTURE(chunk);
    td::detail::FlatBroadcast broadcast(sources, chunk);
    const std::vector<std::vector<at::Tensor>> twins{broadcast.add_target(at::kCPU), broadcast.add_target(at::kCPU)};
    for (int round = 0; round < 2; ++round) {
      for (auto& source : sources)
        if (source.is_floating_point()) source.add_(0.5);
      broadcast.run();
      for (const auto& twin : twins)
        for (std::size_t i = 0; i < sources.size(); ++i) {
          CAPTURE(i);
          CHECK(same_bits(twin[i], sources[i]));
          CHECK(!twin[i].is_alias_of(sources[i]));
          if (i != 5) CHECK((twin[i].strides() == sources[i].strides()));
          if (chunk > 1000) CHECK(reinterpret_cast<std::uintptr_t>(twin[i].data_ptr()) % 16 == 0);
        }
      CHECK(!twins[0][0].is_alias_of(twins[1][0]));
    }
  }
}

TEST_CASE("add_packed adds pairwise whatever dtypes and layouts are") {
  reseed(3);
  const std::vector<at::Tensor> parts{torch::randn({3, 5}), torch::randn({4, 3}).t(), torch::randn({7}, at::kDouble),
                                      torch::randn({6}).to(at::kBFloat16)};
  for (const std::int64_t chunk : {1, 1 << 20}) {
    std::vector<at::Tensor> sums{torch::ones({3, 5}), torch::ones({3, 4}), torch::ones({7}, at::kDouble),
                                 torch::ones({6})};
    td::detail::add_packed(sums, parts, chunk);
    for (std::size_t i = 0; i < parts.size(); ++i)
      CHECK(same_bits(sums[i], (1 + parts[i].to(sums[i].scalar_type())).contiguous()));
  }
}

TEST_CASE("DeviceThreads: every device once a round, on its own thread, for thousands of rounds") {
  td::detail::DeviceThreads threads(std::vector<at::Device>(4, at::Device(at::kCPU)));
  std::vector<int> calls(4, 0);
  std::vector<std::thread::id> ids(4);
  for (int round = 0; round < 3000; ++round)
    threads.run([&](std::size_t i) {
      ++calls[i];
      if (round == 0) ids[i] = std::this_thread::get_id();
      if (ids[i] != std::this_thread::get_id()) calls[i] = -1000000;
    });
  CHECK(calls == std::vector<int>(4, 3000));
  CHECK(ids[0] == std::this_thread::get_id());
  CHECK(std::set<std::thread::id>(ids.begin(), ids.end()).size() == 4);
}
