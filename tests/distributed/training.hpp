// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel against a loop written by hand that sees all ranks' batches; included once for Gloo, once for
// NCCL.
#pragma once

#include "treadle/parallelism/distributed_data_parallel.hpp"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/throws.hpp"
#include "support/tiny.hpp"
#include "treadle/testing/parallelism.hpp"

namespace {

using namespace treadle_test;
using std::chrono::milliseconds;
using std::chrono::seconds;
using td::ParameterUse;

template <ParameterUse Use = ParameterUse::Every>
td::parallelism::DistributedDataParallel<Use> ddp() {
  return {.device = device(), .start_timeout = seconds(60), .timeout = seconds(20)};
}

/// Numbers of ranks from `least`: up to 3, on one GPU up to 2.
std::vector<int> worlds(int least) {
  std::vector<int> all;
  for (int ranks = least; ranks <= (device().is_cuda() ? 2 : 3); ++ranks) all.push_back(ranks);
  return all;
}

/// The bits of tensors in one string, to compare between ranks.
std::string bits(const State& state) {
  std::string all;
  for (const auto& [name, tensor] : state) {
    const auto flat = tensor.detach().cpu().contiguous();
    all.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  }
  return all;
}
template <class Trainer>
bool same_on_all_ranks(Trainer& trainer) {
  auto state = masters(trainer);
  for (auto& [name, tensor] : weights(trainer.model())) state["weight/" + name] = tensor;
  const auto all = trainer.parallelism().gather(bits(state), "the test");
  return std::ranges::all_of(all, [&](const auto& one) { return one == all[0]; });
}

/// Every rank has the same list; batch i belongs to rank i % ranks. Ragged, and a rank may have a batch more.
std::vector<td::Batch> dealt(const std::vector<td::Batch>& all, const td::World& world) {
  std::vector<td::Batch> mine;
  for (std::size_t i = static_cast<std::size_t>(world.rank); i < all.size();
       i += static_cast<std::size_t>(world.world_size))
    mine.push_back(all[i]);
  return mine;
}
/// The windows of the job: each the union of the ranks' windows of `per_window` batches.
std::vector<std::vector<td::Batch>> windows_of(const std::vector<td::Batch>& all, int ranks, std::size_t per_window) {
  std::vector<std::vector<td::Batch>> windows;
  const std::size_t size = per_window * static_cast<std::size_t>(ranks);
  for (std::size_t i = 0; i < all.size(); i += size)
    windows.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(i),
                         all.begin() + static_cast<std::ptrdiff_t>(std::min(i + size, all.size())));
  return windows;
}

/// The first layer twice, so that its gradient comes about in two places.
struct TwiceNetImpl : PlainNetImpl {
  TwiceNetImpl() : middle(register_module("middle", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(middle(torch::tanh(middle(first(x)))))); }
  torch::nn::Linear middle;
};
TORCH_MODULE(TwiceNet);

const auto mean_cross_entropy = [](auto& net, const td::Batch& batch) {
  return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
};
const auto rows_of = [](const td::Batch& batch) { return static_cast<double>(batch.target.numel()); };

/// Trains on this rank's share and compares with the loop that sees everything.
template <class Net, class Policies>
void compare(const td::World& world, const char* name, Policies policies, oracle::Recipe recipe, std::size_t per_window,
             double tolerance, const std::vector<td::Batch>& all) {
  CAPTURE(std::string(name));
  CAPTURE(world.world_size);
  auto own = make<Net>(static_cast<std::uint64_t>(world.rank) + 1);  // rank 0's is taken
  auto reference = make<Net>(1);
  const State start = weights(*reference);
  reseed(7);
  td::Trainer trainer{own, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01}, policies};
  oracle::Loop<Net> loop(reference, recipe, mean_cross_entropy, rows_of);
  const auto windows = windows_of(all, world.world_size, per_window);
  const auto result = trainer.fit(dealt(all, world), {.epochs = 1});
  CHECK(result.steps == static_cast<std::int64_t>(windows.size()));
  State want;
  for (const auto& window : windows) want = loop.step(window).weights;
  CHECK(same_on_all_ranks(trainer));
  const double error = distance(masters(trainer), want, start);
  CAPTURE(error);
  CHECK(error < tolerance);
}

const std::vector<td::Batch>& ragged() {  // 23 batches: no multiple of any window below, of any number of ranks
  static const auto all = make_batches({5, 3, 4, 7, 2, 6, 1, 8, 3, 3, 9, 4, 5, 2, 7, 6, 4, 4, 1, 5, 3, 8, 2});
  return all;
}

/// As above without batches of one row, which batch norm refuses.
const std::vector<td::Batch>& normal() {
  static const auto all = make_batches({5, 3, 4, 7, 2, 6, 5, 8, 3, 3, 9, 4, 5, 2, 7, 6, 4, 4, 2, 5, 3, 8, 2});
  return all;
}

template <ParameterUse Use>
void matrix(const td::World& world) {
  const auto all = ragged();
  const auto recipe = [](oracle::Precision precision) {
    oracle::Recipe r{.precision = precision, .learning_rate = 0.01};
    if (precision == oracle::Precision::Fp16) {
      r.nonfinite = oracle::NonFinite::Skip;
      r.scale = 1024;
      r.growth_interval = 2000;
    }
    return r;
  };
  const auto each = [&](const char* name, auto precision, oracle::Precision kind, double tolerance) {
    using td::policies;
    compare<TwiceNet>(world, name, policies(ddp<Use>(), precision), recipe(kind), 1, tolerance, all);
    compare<TwiceNet>(world, name, policies(ddp<Use>(), precision, td::accumulation::AccumulateOver{.batches = 3}),
                      recipe(kind), 3, tolerance, all);
    if (device().is_cuda()) return;  // a communicator a trainer takes its time
    compare<TwiceNet>(world, name, policies(ddp<Use>(), precision, td::accumulation::SplitBatch{.micro_batches = 2}),
                      recipe(kind), 1, tolerance, all);
  };
  each("Fp32", td::precision::Fp32{}, oracle::Precision::Fp32, 1e-4);
  if (device().is_cuda() && Use == ParameterUse::Static) return;
  each("Bf16", td::precision::Bf16{}, oracle::Precision::Bf16, 5e-2);
  each("Fp16", td::precision::Fp16{.initial_scale = 1024}, oracle::Precision::Fp16, 2e-2);
  each("Bf16Weights", td::precision::Bf16Weights{}, oracle::Precision::Bf16Weights, 8e-2);
}

void options(const td::World& world) {
  const auto all = ragged();
  const oracle::Recipe recipe{.learning_rate = 0.01};
  const auto with = [&](const char* name, auto policy, double tolerance) {
    compare<TwiceNet>(world, name, td::policies(policy, td::accumulation::AccumulateOver{.batches = 2}), recipe, 2,
                      tolerance, all);
  };
  auto policy = ddp();
  policy.bucket_bytes = policy.first_bucket_bytes = 64;
  with("small buckets", policy, 1e-4);
  policy.bucket_views = false;
  with("small buckets without views", policy, 1e-4);
  policy = ddp();
  policy.bucket_views = false;
  with("without views", policy, 1e-4);
  policy = ddp();
  policy.wire = td::Wire::Fp16;
  with("fp16 on the wire", policy, 2e-2);
  policy.wire = td::Wire::Bf16;
  with("bf16 on the wire", policy, 5e-2);
}

}  // namespace

namespace {
template <ParameterUse Use>
void keeps_contract(const td::World&) {
  for (const auto& sentence : td::testing::check_parallelism_contract(ddp<Use>())) FAIL_CHECK(sentence);
}
const Role contract("contract", [](const td::World& world) {
  keeps_contract<ParameterUse::Every>(world);
  keeps_contract<ParameterUse::Find>(world);
  keeps_contract<ParameterUse::Static>(world);
});

const Role every("every", matrix<ParameterUse::Every>);
const Role find("find", matrix<ParameterUse::Find>);
const Role fixed("static", matrix<ParameterUse::Static>);
const Role options_role("options", options);
}  // namespace

TEST_CASE("the contract's check finds nothing") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(1)) CHECK(run_ranks(ranks, "contract") == 0);
}

TEST_CASE("windows of ragged batches over 1, 2 and 3 ranks equal one loop over all of them") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(1))
    for (const char* role : {"every", "find", "static", "options"}) {
      CAPTURE(ranks);
      CAPTURE(role);
      CHECK(run_ranks(ranks, role) == 0);
    }
}

TEST_CASE("a world of one is bitwise the single device") {
  REQUIRE_DEVICE();
  const auto all = normal();
  const auto train = [&](auto parallelism, auto... others) {
    reseed(3);
    auto net = make<TinyNet>(3);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                        td::policies(parallelism, others...)};
    trainer.fit(all, {.epochs = 2});
    return everything(trainer);
  };
  const auto single = td::parallelism::SingleDevice{.device = device()};
  const auto same = [&](auto... others) {
    CHECK(difference(train(ddp(), others...), train(single, others...)) == "");
    CHECK(difference(train(ddp<ParameterUse::Static>(), others...), train(single, others...)) == "");
  };
  same();
  same(td::accumulation::AccumulateOver{.batches = 3});
  same(td::precision::Bf16{}, td::clipping::ClipNorm{.max_norm = 0.5});
  same(td::precision::Fp16{.initial_scale = 256}, td::averaging::ExponentialAverage{.decay = 0.9});
  same(td::precision::Bf16Weights{}, td::accumulation::AccumulateOver{.batches = 2});
}

namespace {

/// A list without a size.
struct Stream {
  const std::vector<td::Batch>* list;
  struct Iterator {
    const std::vector<td::Batch>* list;
    std::size_t i;
    const td::Batch& operator*() const { return (*list)[i]; }
    Iterator& operator++() { return ++i, *this; }
    bool operator!=(const Iterator& other) const { return i != other.i; }
  };
  Iterator begin() const { return {list, 0}; }
  Iterator end() const { return {list, list->size()}; }
};

/// A parameter that only every other step uses.
struct SometimesImpl : PlainNetImpl {
  SometimesImpl() : side(register_module("side", torch::nn::Linear(6, 5))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = PlainNetImpl::forward(x);
    return uses_side ? y + side(x) : y;
  }
  torch::nn::Linear side;
  bool uses_side = false;
};
TORCH_MODULE(Sometimes);

// Rank r has `least` + 2r batches; the oracle's step k has the k-th window of every rank that has one.
template <ParameterUse Use, class Net>
void uneven(const td::World& world, int least) {
  std::vector<std::vector<td::Batch>> shares;
  for (int r = 0; r < world.world_size; ++r)
    shares.push_back(make_batches(std::vector<std::int64_t>(static_cast<std::size_t>(least + 2 * r), 3 + r),
                                  static_cast<std::uint64_t>(1000 * (r + 1))));
  for (const std::size_t per_window : {1, 2, 4})
    for (const bool sized : {true, false}) {
      CAPTURE(per_window);
      CAPTURE(sized);
      auto own = make<Net>(1);
      auto reference = make<Net>(1);
      const State start = weights(*reference);
      td::Trainer trainer{
          own, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
          td::policies(ddp<Use>(), td::accumulation::AccumulateOver{.batches = static_cast<std::int64_t>(per_window)})};
      oracle::Loop<Net> loop(reference, {.learning_rate = 0.01}, mean_cross_entropy, rows_of);
      const auto& mine = shares[static_cast<std::size_t>(world.rank)];
      const auto result = sized ? trainer.fit(mine, {.epochs = 2}) : trainer.fit(Stream{&mine}, {.epochs = 2});
      State want;
      std::int64_t steps = 0;
      double loss = 0;
      double count = 0;
      for (int epoch = 0; epoch < 2; ++epoch)
        for (std::size_t at = 0; at < shares.back().size(); at += per_window) {
          std::vector<td::Batch> window;
          double rows = 0;
          for (const auto& share : shares)
            for (std::size_t i = at; i < std::min(at + per_window, share.size()); ++i) {
              window.push_back(share[i]);
              rows += rows_of(share[i]);
            }
          const auto record = loop.step(window);
          want = record.weights;
          ++steps;
          if (epoch == 1) loss += record.loss * rows, count += rows;
        }
      CHECK(result.steps == steps);
      CHECK(same_on_all_ranks(trainer));
      CHECK(distance(masters(trainer), want, start) < 1e-4);
      CHECK(result.history[1].train["loss"] == doctest::Approx(loss / count).epsilon(1e-5));
      // Evaluation: the means over everything that the ranks have.
      std::vector<td::Batch> joined;
      for (const auto& share : shares) joined.insert(joined.end(), share.begin(), share.end());
      double sum = 0;
      double correct = 0;
      double all = 0;
      {
        const at::NoGradGuard no_grad;
        for (const auto& batch : joined) {
          const at::Tensor logits = own->forward(batch.data);
          sum += torch::nn::functional::cross_entropy(logits, batch.target).item<double>() * rows_of(batch);
          correct += logits.argmax(1).eq(batch.target).sum().item<double>();
          all += rows_of(batch);
        }
      }
      const auto metrics = trainer.evaluate(mine);
      CHECK(metrics["loss"] == doctest::Approx(sum / all).epsilon(1e-6));
      CHECK(metrics["accuracy"] == doctest::Approx(correct / all).epsilon(1e-12));
    }
}
const Role uneven_role("uneven", [](const td::World& world) { uneven<ParameterUse::Every, PlainNet>(world, 5); });
// From the first window on, in which a static graph reduces each micro-batch; `side` is never used.
const Role uneven_static_role("uneven static",
                              [](const td::World& world) { uneven<ParameterUse::Static, Sometimes>(world, 1); });

}  // namespace

TEST_CASE("ranks with fewer batches take part with nothing, and evaluation counts everything once") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) {
    CHECK(run_ranks(ranks, "uneven") == 0);
    CHECK(run_ranks(ranks, "uneven static") == 0);
  }
}

namespace {

void bad_rank(const td::World& world) {
  const auto all = normal();
  auto mine = dealt(all, world);
  mine.resize(6);
  if (world.rank == 1) mine[2] = poisoned(mine[2]);
  {  // Skip: the third step changes nothing on any rank
    auto net = make<TinyNet>(1);
    auto other = make<TinyNet>(1);
    reseed(11);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                        td::policies(ddp(), td::nonfinite::Skip{})};
    for (int i = 0; i < 2; ++i) trainer.accumulate(mine[static_cast<std::size_t>(i)]);
    const auto before = everything(trainer);
    const auto done = trainer.accumulate(mine[2]);
    CHECK(done->skipped.item<float>() == 1);
    const auto kept = [&](State state) {  // rank 0's buffers, which the others have been given before the window
      if (world.rank != 0) std::erase_if(state, [](const auto& one) { return one.first.starts_with("buffer/"); });
      return state;
    };
    CHECK(difference(kept(everything(trainer)), kept(before)) == "");
    trainer.accumulate(mine[3]);
    CHECK(finite(masters(trainer)));
    CHECK(trainer.skipped_steps().item<std::int64_t>() == 1);
    CHECK(same_on_all_ranks(trainer));
  }
  {  // the loss scale backs off everywhere
    auto net = make<TinyNet>(1);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{},
                        td::policies(ddp(), td::precision::Fp16{.initial_scale = 512})};
    for (int i = 0; i < 3; ++i) trainer.accumulate(mine[static_cast<std::size_t>(i)]);
    CHECK(trainer.precision().loss_scale().item<float>() == 256);
  }
  {  // Stop: all ranks, at the same step
    auto net = make<PlainNet>(1);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(ddp(), td::nonfinite::Stop{})};
    std::int64_t stopped = -1;
    try {
      trainer.fit(mine, {.epochs = 1, .log_every = 1});
    } catch (const td::NonFiniteError& error) {
      stopped = error.step();
    }
    CHECK(stopped == 2);
    CHECK(finite(masters(trainer)));
  }
}
const Role bad_rank_role("bad rank", bad_rank);

/// Asks to stop on rank 1 after its fourth step.
struct Impatient {
  static constexpr bool every_rank = true;
  bool on_step(const td::observe::StepEvent& event) { return !(mine && event.step == 4); }
  bool mine;
};
void stop_request(const td::World& world) {
  auto net = make<PlainNet>(1);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(ddp()),
                      td::observers(Impatient{world.rank == 1})};
  const auto result = trainer.fit(dealt(ragged(), world), {.epochs = 5, .log_every = 3});
  CHECK((result.stop_reason == td::StopReason::Requested));
  CHECK(result.steps == 6);  // the log point after the request
  CHECK(same_on_all_ranks(trainer));
}
const Role stop_request_role("stop request", stop_request);

void unused(const td::World& world) {
  const auto mine = dealt(ragged(), world);
  {  // Find: a rank that does not use it takes what the others have; one that nobody uses stays
    auto net = make<Sometimes>(1);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.1},
                        td::policies(ddp<ParameterUse::Find>())};
    const auto before = net->side->weight.detach().clone();
    trainer.accumulate(mine[0]);
    CHECK(before.equal(net->side->weight.detach()));
    net->uses_side = world.rank == 0;
    trainer.accumulate(mine[1]);
    CHECK(!before.equal(net->side->weight.detach()));
    CHECK(same_on_all_ranks(trainer));
  }
  {  // Every: named, on all ranks
    auto net = make<Sometimes>(1);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{}, td::policies(ddp())};
    CHECK_SAYS(td::ConfigError, "parameters 'side.weight', 'side.bias' got no gradient on this rank",
               trainer.accumulate(mine[0]));
  }
}
const Role unused_role("unused", unused);

struct WithBuffers : PlainNetImpl {
  explicit WithBuffers(bool mine) {
    const auto fill = [&](at::Tensor t) { return mine ? t : at::zeros_like(t); };
    register_buffer("short", fill(at::arange(6).to(at::kShort)));
    register_buffer("complex", fill(at::complex(at::ones({2, 3}), at::full({2, 3}, 2.0))));
    register_buffer("float8", fill(at::ones({})).to(at::kFloat8_e4m3fn));
    register_buffer("transposed", fill(at::arange(6).to(at::kShort).view({2, 3})).t());
    register_buffer("flag", fill(at::ones({}, at::kBool)));
    register_buffer("none", at::empty({0}, at::kShort));
  }
};
/// Buffers of dtypes that no backend sends.
const Role odd_buffers("odd buffers", [](const td::World& world) {
  auto net = std::make_shared<WithBuffers>(world.rank == 0);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(ddp())};
  trainer.accumulate(make_batch(4, 1));
  WithBuffers reference(true);
  const auto want = buffers(reference);
  CHECK(buffers(*net).size() == 6);
  for (const auto& item : buffers(*net)) {
    CAPTURE(item.first);
    const at::Tensor& wanted = want.at(item.first);
    CHECK((item.second.scalar_type() == wanted.scalar_type()));
    CHECK(at::equal(item.second.cpu().to(at::kComplexDouble), wanted.to(at::kComplexDouble)));
  }
});

void other_model(const td::World& world) {
  auto net = std::make_shared<PlainNetImpl>();
  if (world.rank == 1) net->last = net->replace_module("last", torch::nn::Linear(8, 4));
  const auto make_trainer = [&] { td::Trainer t{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(ddp())}; };
  CHECK_SAYS(td::ConfigError, "rank 0 has parameter 'last.weight': Float [5, 8] where rank 1 has parameter",
             make_trainer());
  // Buckets follow the layout in memory, so that the ranks would add up different elements.
  net = std::make_shared<PlainNetImpl>();
  if (world.rank == 1) {
    auto& weight = net->first->weight;
    weight.set_data(weight.detach().t().contiguous().t());
  }
  CHECK_SAYS(td::ConfigError, "rank 1 has parameter 'first.weight': Float [8, 6] with strides [1, 8]", make_trainer());
  net = std::make_shared<PlainNetImpl>();
  if (world.rank == 1) net->register_buffer("more", at::zeros({2}));
  CHECK_SAYS(td::ConfigError, "rank 0 has nothing more where rank 1 has buffer 'more': Float [2]", make_trainer());
  auto policy = ddp();
  policy.bucket_bytes = world.rank == 1 ? 100 : 200;
  const auto with_policy = [&] { td::Trainer t{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(policy)}; };
  net = std::make_shared<PlainNetImpl>();
  CHECK_SAYS(td::ConfigError, "rank 0 has bucket_bytes 200 where rank 1 has bucket_bytes 100", with_policy());
}
const Role other_model_role("other model", other_model);

void other_options(const td::World& world) {
  const auto mine = dealt(ragged(), world);
  auto net = make<PlainNet>(1);
  td::Trainer trainer{net,
                      CrossEntropy{},
                      td::optim::AdamW{},
                      td::policies(ddp()),
                      td::observers(),
                      td::TrainerOptions{.nominal_count = world.rank == 0 ? 0.0 : 100.0}};
  CHECK_SAYS(td::ConfigError, "log_every 1, evaluate_every 1 and no test loader where rank 1 has epochs 2",
             trainer.fit(mine, {.epochs = 2, .log_every = world.rank + 1}));
  CHECK(trainer.fit(mine, {.epochs = 1}).epochs == 1);  // nothing is lost
  CHECK(same_on_all_ranks(trainer));
}
const Role other_options_role("other options", other_options);

/// Collectives that a step makes, as the dispatcher sees them.
std::atomic<int> collectives{0};
void count_collectives(const td::World& world) {
  at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                          const std::string_view name = function.name();
                          if (name.starts_with("c10d::")) ++collectives;
                          return std::unique_ptr<at::ObserverContext>();
                        }).scopes({at::RecordScope::FUNCTION}));
  const auto mine = dealt(normal(), world);
  const auto of_step = [&](auto policy, auto net) {
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{},
                        td::policies(policy, td::accumulation::AccumulateOver{.batches = 2})};
    for (int i = 0; i < 4; ++i) trainer.accumulate(mine[static_cast<std::size_t>(i)]);  // two windows: buckets rebuilt
    const int before = collectives;
    trainer.accumulate(mine[4]);
    trainer.accumulate(mine[5]);
    return collectives - before;
  };
  CHECK(of_step(ddp(), make<PlainNet>()) == 1 + 1);     // one bucket, and the counts
  CHECK(of_step(ddp(), make<TinyNet>()) == 1 + 1 + 2);  // buffers: a broadcast a dtype
  auto small = ddp();
  small.bucket_bytes = small.first_bucket_bytes = 1;
  CHECK(of_step(small, make<PlainNet>()) == 4 + 1);  // a bucket a parameter
}
const Role count_role("count", count_collectives);

}  // namespace

TEST_CASE("what one rank cannot apply, none applies") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) CHECK(run_ranks(ranks, "bad rank") == 0);
}
TEST_CASE("a wish to stop ends all ranks at the same step") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) CHECK(run_ranks(ranks, "stop request") == 0);
}
TEST_CASE("unused parameters are searched for, or named") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(2)) CHECK(run_ranks(ranks, "unused") == 0);
}
TEST_CASE("ranks with different models are refused on all") {
  REQUIRE_DEVICE();
  CHECK(run_ranks(2, "other model") == 0);
  CHECK(run_ranks(2, "other options") == 0);
  CHECK(run_ranks(2, "odd buffers") == 0);
}
namespace {
/// Leaves a layer out.
struct SideEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.last(torch::tanh(net.first(batch.data))), batch.target);
  }
};
struct SideNetImpl : PlainNetImpl {
  SideNetImpl() : side(register_module("side", torch::nn::Linear(8, 8))) {}
  torch::nn::Linear side;
};
TORCH_MODULE(SideNet);

const Role empty_first_role("empty first", [](const td::World& world) {
  auto mine = dealt(ragged(), world);
  if (world.rank == 1) mine.clear();
  auto net = make<SideNet>(1);
  td::Trainer trainer{net, SideEntropy{}, td::optim::AdamW{}, td::policies(ddp<ParameterUse::Static>())};
  CHECK_SAYS(td::ConfigError, "parameter 'side.weight' is used on some ranks and not on others",
             trainer.fit(mine, {.epochs = 1}));
});
const Role frozen_role("frozen later", [](const td::World& world) {
  auto net = make<PlainNet>(1);
  td::Trainer trainer{net, SideEntropy{}, td::optim::AdamW{}, td::policies(ddp())};
  net->first->weight.requires_grad_(false);
  CHECK_SAYS(td::ConfigError, "parameter 'first.weight' was frozen after the trainer was made",
             trainer.fit(dealt(ragged(), world), {.epochs = 1}));
});
/// Running statistics are each rank's own in a step; what is evaluated is one model.
const Role one_model_role("one model", [](const td::World& world) {
  auto net = make<TinyNet>(1);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(ddp())};
  trainer.fit(dealt(normal(), world), {.epochs = 1});
  const auto statistics = [&] { return bits({{"mean", net->batch_norm->running_mean.clone()}}); };
  const auto before = trainer.parallelism().gather(statistics(), "the test");
  if (world.world_size > 1) CHECK(before[0] != before[1]);
  trainer.evaluate(std::vector<td::Batch>{normal()[0]});
  for (const auto& one : trainer.parallelism().gather(statistics(), "the test")) CHECK(one == before[0]);
});
}  // namespace

TEST_CASE("a static graph's ranks use the same parameters, and those that are frozen later are named") {
  REQUIRE_DEVICE();
  CHECK(run_ranks(2, "empty first") == 0);
  for (const int ranks : worlds(1)) CHECK(run_ranks(ranks, "frozen later") == 0);
}
TEST_CASE("evaluation is of one model, rank 0's") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(1)) CHECK(run_ranks(ranks, "one model") == 0);
}

TEST_CASE("a step makes a collective a bucket, and one more for the counts") {
  REQUIRE_DEVICE();
  CHECK(run_ranks(2, "count") == 0);
}
