// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 600
// The rows of each rank: dealt out in one process with made-up ranks, and in real jobs, whose metrics must be those of
// one process.
#include <treadle/data/sharding.hpp>

#include <torch/torch.h>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/parallelism/distributed_data_parallel.hpp>
#include <treadle/treadle.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/doctest.hpp"
#include "support/ranks.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using td::data::LoaderOptions;
using td::data::RaggedEnds;
using td::data::TensorLoader;

namespace {

using Rows = std::vector<std::int64_t>;
using Batches = std::vector<Rows>;

td::Batch numbered(std::int64_t rows) {
  return {torch::arange(rows * 3, torch::kDouble).reshape({rows, 3}), torch::arange(rows)};
}

/// The row numbers of one pass, batch by batch.
template <class Loader>
Batches pass(Loader&& loader) {
  Batches batches;
  for (const auto& batch : loader) {
    REQUIRE(torch::equal(batch.data.select(1, 0).to(torch::kLong), batch.target * 3));
    const auto target = batch.target.contiguous();
    batches.emplace_back(target.template const_data_ptr<std::int64_t>(),
                         target.template const_data_ptr<std::int64_t>() + target.numel());
  }
  return batches;
}

Rows joined(const Batches& batches) {
  Rows rows;
  for (const auto& batch : batches) rows.insert(rows.end(), batch.begin(), batch.end());
  return rows;
}

Rows sorted(Rows rows) {
  std::ranges::sort(rows);
  return rows;
}

/// What the ranks must get, dealt by hand, one card after the other.
std::vector<Rows> dealt(Rows order, int ranks, RaggedEnds ends) {
  const auto want = static_cast<std::size_t>(ranks);
  const std::size_t first = order.size();
  if (ends == RaggedEnds::Pad)
    for (std::size_t i = 0; first > 0 && order.size() % want != 0; ++i) order.push_back(order[i]);
  if (ends == RaggedEnds::Drop)
    while (order.size() % want != 0) order.pop_back();
  std::vector<Rows> parts(want);
  for (std::size_t i = 0; i < order.size(); ++i) parts[i % want].push_back(order[i]);
  return parts;
}

constexpr std::array worlds{1, 2, 3, 5};
constexpr std::array all_ends{RaggedEnds::Join, RaggedEnds::Pad, RaggedEnds::Drop};

}  // namespace

TEST_CASE("ranks are dealt the epoch's order like cards, by hand") {
  const auto part = [](int rank, RaggedEnds ends, bool drop_last = false) {
    return pass(TensorLoader{numbered(7),
                             {.batch_size = 2, .drop_last = drop_last, .rank = rank, .world_size = 3, .ends = ends}});
  };
  CHECK((part(0, RaggedEnds::Join) == Batches{{0, 3}, {6}}));
  CHECK((part(1, RaggedEnds::Join) == Batches{{1, 4}}));
  CHECK((part(2, RaggedEnds::Join) == Batches{{2, 5}}));
  CHECK((part(0, RaggedEnds::Pad) == Batches{{0, 3}, {6}}));
  CHECK((part(1, RaggedEnds::Pad) == Batches{{1, 4}, {0}}));
  CHECK((part(2, RaggedEnds::Pad) == Batches{{2, 5}, {1}}));
  CHECK((part(0, RaggedEnds::Drop) == Batches{{0, 3}}));
  CHECK((part(2, RaggedEnds::Drop) == Batches{{2, 5}}));
  for (const auto ends : all_ends) CHECK((part(0, ends, true) == Batches{{0, 3}}));
  // Fewer rows than ranks.
  TensorLoader none{numbered(2), {.rank = 2, .world_size = 3}};
  CHECK(none.size() == 0);
  CHECK(none.own_rows() == 0);
  CHECK(none.rows() == 2);
  CHECK(pass(none).empty());
  CHECK((pass(TensorLoader{numbered(2), {.rank = 2, .world_size = 5, .ends = RaggedEnds::Pad}}) == Batches{{0}}));
}

TEST_CASE("over all ranks: union, no overlap, counts, and batches of the job") {
  for (const int world : worlds)
    for (std::int64_t rows = 0; rows <= 13; ++rows)
      for (const std::int64_t batch_size : {1, 2, 3, 4, 20})
        for (const auto ends : all_ends)
          for (const bool shuffle : {false, true})
            for (const bool drop_last : {false, true}) {
              CAPTURE(world);
              CAPTURE(rows);
              CAPTURE(batch_size);
              CAPTURE(static_cast<int>(ends));
              CAPTURE(shuffle);
              CAPTURE(drop_last);
              LoaderOptions options{
                  .batch_size = batch_size, .shuffle = shuffle, .seed = 5, .drop_last = drop_last, .ends = ends};
              TensorLoader whole{numbered(rows), {.batch_size = batch_size * world, .shuffle = shuffle, .seed = 5}};
              constexpr std::int64_t epoch = 3;
              whole.set_epoch(epoch);
              const Batches job = pass(whole);
              const auto want = dealt(joined(job), world, ends);
              std::size_t fewest = want[0].size();
              for (const auto& part : want) fewest = std::min(fewest, part.size());

              std::vector<Batches> parts;
              for (int rank = 0; rank < world; ++rank) {
                options.rank = rank;
                options.world_size = world;
                TensorLoader loader{numbered(rows), options};
                loader.set_epoch(epoch);
                parts.push_back(pass(loader));
                const auto& mine = want[static_cast<std::size_t>(rank)];
                const Rows got = joined(parts.back());
                REQUIRE(loader.rows() == rows);
                REQUIRE(loader.own_rows() == static_cast<std::int64_t>(mine.size()));
                REQUIRE(loader.size() == static_cast<std::int64_t>(parts.back().size()));
                for (std::size_t k = 0; k < parts.back().size(); ++k) {
                  const bool last = k + 1 == parts.back().size();
                  const auto size = static_cast<std::int64_t>(parts.back()[k].size());
                  REQUIRE((size == batch_size || (last && !drop_last && size > 0 && size < batch_size)));
                }
                if (drop_last) {
                  REQUIRE(parts.back().size() == fewest / static_cast<std::size_t>(batch_size));
                  REQUIRE(std::equal(got.begin(), got.end(), mine.begin()));
                } else {
                  REQUIRE(got == mine);
                }
              }

              Rows all;
              for (const auto& part : parts) {
                const Rows own = joined(part);
                all.insert(all.end(), own.begin(), own.end());
              }
              all = sorted(all);
              const bool twice = std::ranges::adjacent_find(all) != all.end();
              Rows every(static_cast<std::size_t>(rows));
              for (std::int64_t row = 0; row < rows; ++row) every[static_cast<std::size_t>(row)] = row;
              if (!drop_last && ends == RaggedEnds::Join) REQUIRE(all == every);
              if (ends != RaggedEnds::Pad) REQUIRE(!twice);
              if (!drop_last && ends == RaggedEnds::Pad) {
                REQUIRE(twice == (rows % world != 0));
                REQUIRE(std::ranges::includes(all, every));
              }
              if (!drop_last && ends == RaggedEnds::Drop)
                REQUIRE(static_cast<std::int64_t>(all.size()) == rows - rows % world);
              const auto [least, most] =
                  std::ranges::minmax(parts, {}, [](const Batches& part) { return part.size(); });
              REQUIRE(most.size() - least.size() <= (ends == RaggedEnds::Join && !drop_last ? 1U : 0U));
              // Batch k of the job is the union of the ranks' batch k.
              if (ends != RaggedEnds::Pad)
                for (std::size_t k = 0; k < most.size(); ++k) {
                  Rows together;
                  for (const auto& part : parts)
                    if (k < part.size()) together.insert(together.end(), part[k].begin(), part[k].end());
                  const bool whole_one = ends == RaggedEnds::Join || (k + 1 < job.size());
                  if (whole_one) REQUIRE(sorted(together) == sorted(job[k]));
                }
            }
}

TEST_CASE("the order is a function of seed and epoch, on each rank") {
  const auto part = [](std::uint64_t seed, std::int64_t epoch, int rank) {
    TensorLoader loader{numbered(31), {.batch_size = 4, .shuffle = true, .seed = seed, .rank = rank, .world_size = 2}};
    loader.set_epoch(epoch);
    return pass(loader);
  };
  CHECK(part(1, 0, 1) == part(1, 0, 1));
  CHECK(part(1, 0, 1) != part(1, 1, 1));
  CHECK(part(1, 0, 1) != part(2, 0, 1));
  TensorLoader loader{numbered(31), {.batch_size = 4, .shuffle = true, .seed = 1, .rank = 1, .world_size = 2}};
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) CHECK(pass(loader) == part(1, epoch, 1));
  CHECK(loader.order(0).numel() == 15);
  // From the numbers that tests/data pins: permutation(10, 1, 0).
  const auto of_ten = [](int rank) {
    return joined(pass(TensorLoader{numbered(10), {.shuffle = true, .seed = 1, .rank = rank, .world_size = 2}}));
  };
  CHECK((of_ten(0) == Rows{4, 5, 8, 0, 9}));
  CHECK((of_ten(1) == Rows{7, 3, 1, 6, 2}));
}

TEST_CASE("a job of one process loads as if nothing were sharded") {
  const auto data = numbered(10);
  TensorLoader plain{data, td::data::sharded({.batch_size = 4}, td::World{})};
  CHECK(!plain.order(0).defined());
  for (const auto& batch : plain) CHECK(batch.data.is_alias_of(data.data));  // still views
  for (const auto ends : all_ends) {
    TensorLoader loader{data, {.batch_size = 4, .shuffle = true, .seed = 1, .ends = ends}};
    CHECK((pass(loader) == Batches{{4, 7, 5, 3}, {8, 1, 0, 6}, {9, 2}}));
  }
  td::World world;
  world.rank = 2;
  world.world_size = 4;
  const auto options = td::data::sharded({.batch_size = 7, .shuffle = true, .ends = RaggedEnds::Drop}, world);
  CHECK(options.rank == 2);
  CHECK(options.world_size == 4);
  CHECK(options.batch_size == 7);
  CHECK(options.shuffle);
  CHECK((options.ends == RaggedEnds::Drop));
}

TEST_CASE("ranks that cannot be are refused") {
  for (const auto& pair : {std::pair{3, 3}, {-1, 3}, {0, 0}, {0, -2}}) {
    const int rank = pair.first;
    const int world = pair.second;
    CHECK_SAYS(td::ConfigError, "rank " + std::to_string(rank) + " of a world_size of " + std::to_string(world),
               TensorLoader{numbered(5), {.rank = rank, .world_size = world}});
  }
}

// ---- Real jobs.
namespace {

using treadle_test::Role;
using treadle_test::run_ranks;

struct LineImpl : torch::nn::Module {
  LineImpl(std::int64_t in, std::int64_t out) {
    register_module("line", line = torch::nn::Linear(in, out));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    line->weight.copy_(torch::arange(in * out, torch::kDouble).reshape({out, in}).remainder(5).sub(2));
    line->bias.fill_(1);
  }
  at::Tensor forward(const at::Tensor& x) { return line(x); }
  torch::nn::Linear line{nullptr};
};
TORCH_MODULE(Line);

/// Every number is a small integer, so that sums are exact in whatever order they come about.
struct Integers {
  td::Loss operator()(LineImpl& net, const td::Batch& batch, auto& step) const {
    step.record("target", batch.target.sum(), batch.target.numel());
    return td::Loss(net.forward(batch.data).sum(), batch.target.numel());
  }
};
struct Classify {
  td::Loss operator()(LineImpl& net, const td::Batch& batch, auto& step) const {
    const auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};
Line integer_net() {
  return Line(3, 1);
}
Line class_net() {
  return Line(6, 3);
}

td::Batch classes_of(std::int64_t rows) {
  auto generator = at::detail::createCPUGenerator(7);
  return {at::randn({rows, 6}, generator, at::kDouble), at::randint(0, 3, {rows}, generator, at::kLong)};
}

const td::parallelism::DistributedDataParallel<> parallel{
    .device = at::Device(at::kCPU), .start_timeout = std::chrono::seconds(60), .timeout = std::chrono::seconds(20)};
const td::parallelism::SingleDevice alone{.device = at::Device(at::kCPU)};

/// What was recorded must be equal, the loss within `tolerance` of itself.
void check_metrics(const td::Metrics& ours, const td::Metrics& one, double tolerance) {
  REQUIRE(ours.size() == one.size());
  for (const auto& [key, mean] : one) {
    const auto& name = key;  // clang 14 lets no lambda, and so no CAPTURE, take a structured binding
    const auto& value = mean;
    CAPTURE(name);
    CAPTURE(std::abs(ours[name] - value));
    CHECK(std::abs(ours[name] - value) <= (name == "loss" ? tolerance * std::abs(value) : 0.0));
  }
}

/// Trains the same with sharded loaders and as one process, and compares all that both tell.
template <class MakeNet, class Objective, class Rule, class Accumulation>
void fits_as_one(const td::World& world, const td::Batch& data, const MakeNet& make, Objective objective,
                 const Rule& rule, const Accumulation& accumulation, std::int64_t batch_size, double tolerance) {
  CAPTURE(data.target.numel());
  CAPTURE(batch_size);
  CAPTURE(rule.learning_rate);
  auto ours_net = make();
  auto one_net = make();
  td::Trainer job{ours_net, objective, rule, td::policies(parallel, accumulation)};
  td::Trainer one{one_net, objective, rule, td::policies(alone, accumulation)};
  const std::int64_t job_batch = batch_size * world.world_size;
  TensorLoader part{data, td::data::sharded({.batch_size = batch_size, .shuffle = true, .seed = 9}, world)};
  TensorLoader whole{data, {.batch_size = job_batch, .shuffle = true, .seed = 9}};
  TensorLoader test_part{data, td::data::sharded({.batch_size = batch_size}, world)};
  TensorLoader test_whole{data, {.batch_size = batch_size}};
  const auto ours = job.fit(part, test_part, {.epochs = 3, .log_every = 2});
  const auto theirs = one.fit(whole, test_whole, {.epochs = 3, .log_every = 2});
  CHECK(ours.steps == theirs.steps);
  REQUIRE(ours.history.size() == 3);
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    CAPTURE(epoch);
    check_metrics(ours.history[epoch].train, theirs.history[epoch].train, tolerance);
    check_metrics(*ours.history[epoch].test, *theirs.history[epoch].test, rule.learning_rate > 0 ? tolerance : 0);
  }
  for (std::size_t i = 0; i < ours_net->parameters().size(); ++i)
    CHECK(at::allclose(ours_net->parameters()[i], one_net->parameters()[i], tolerance, tolerance));
}

// Over numbers of any kind the job's sums are one process's in another order, of fp64 numbers that were divided by
// fp32 ones (window.hpp): 5e-9 apart was measured.
constexpr double reordered = 5e-8;

const Role evaluates("evaluates", [](const td::World& world) {
  td::Trainer job{integer_net(), Integers{}, td::optim::Sgd{}, td::policies(parallel)};
  td::Trainer one{integer_net(), Integers{}, td::optim::Sgd{}, td::policies(alone)};
  for (const std::int64_t rows : {1, 2, 4, 7, 13, 29})
    for (const std::int64_t batch_size : {1, 2, 5}) {
      CAPTURE(rows);
      CAPTURE(batch_size);
      TensorLoader part{numbered(rows), td::data::sharded({.batch_size = batch_size}, world)};
      TensorLoader whole{numbered(rows), {.batch_size = batch_size}};
      CHECK((part.size() == 0) == (rows <= world.rank));
      const auto ours = job.evaluate(part);
      check_metrics(ours, one.evaluate(whole), 0);
      double loss = 0;
      for (std::int64_t row = 0; row < rows; ++row)  // weights -2, -1 and 0, and 1 for the bias
        loss += -2 * (3.0 * static_cast<double>(row)) - (3.0 * static_cast<double>(row) + 1) + 1;
      CHECK(ours["loss"] == loss / static_cast<double>(rows));
      CHECK(ours["target"] == static_cast<double>(rows - 1) / 2);
    }
});

const Role fits("fits", [](const td::World& world) {
  const td::accumulation::NoAccumulation each;
  const td::accumulation::AccumulateOver windows{.batches = 2};
  for (const std::int64_t rows : {13, 10, 5})  // ranks differ by a row, by a batch and by a window
    for (const std::int64_t batch_size : {1, 2, 4}) {
      const td::optim::Sgd sgd{.learning_rate = 0.1};
      fits_as_one(world, classes_of(rows), class_net, Classify{}, sgd, each, batch_size, reordered);
      const td::optim::AdamW adamw{.learning_rate = 0.01};
      fits_as_one(world, classes_of(rows), class_net, Classify{}, adamw, windows, batch_size, reordered);
      const td::optim::Sgd still{.learning_rate = 0};
      fits_as_one(world, numbered(rows), integer_net, Integers{}, still, each, batch_size, reordered);
    }
});

const Role goes_on("goes on", [](const td::World& world) {
  const td::accumulation::AccumulateOver windows{.batches = 2};
  for (const std::int64_t rows : {13, 24, 9})  // ranks differ by a batch, by none, by one that is all there is left
    for (std::int64_t batch = 0; batch * 2 * world.world_size < rows; ++batch) {
      CAPTURE(rows);
      CAPTURE(batch);
      const auto data = classes_of(rows);
      auto ours_net = class_net();
      auto one_net = class_net();
      const td::optim::Sgd sgd{.learning_rate = 0.1, .schedule = td::schedule::one_cycle()};
      td::Trainer job{ours_net, Classify{}, sgd, td::policies(parallel, windows)};
      td::Trainer one{one_net, Classify{}, sgd, td::policies(alone, windows)};
      TensorLoader part{data, td::data::sharded({.batch_size = 2, .shuffle = true, .seed = 9}, world)};
      TensorLoader whole{data, {.batch_size = 2 * world.world_size, .shuffle = true, .seed = 9}};
      part.seek({1, std::min(batch, part.size())});  // a rank without this batch stands behind its last one
      whole.seek({1, batch});
      const auto ours = job.fit(part, {.epochs = 2});
      const auto theirs = one.fit(whole, {.epochs = 2});
      CHECK(ours.steps == theirs.steps);
      for (std::size_t epoch = 0; epoch < 2; ++epoch)
        check_metrics(ours.history[epoch].train, theirs.history[epoch].train, reordered);
      for (std::size_t i = 0; i < ours_net->parameters().size(); ++i)
        CHECK(at::allclose(ours_net->parameters()[i], one_net->parameters()[i], reordered, reordered));
    }
  td::Trainer job{class_net(), Classify{}, td::optim::Sgd{}, td::policies(parallel)};
  TensorLoader part{classes_of(24), td::data::sharded({.batch_size = 2}, world)};
  part.seek({0, world.rank + 1});
  CHECK_SAYS(td::ConfigError, "was told to begin at another batch than those of other ranks", job.fit(part, {}));
  part.set_epoch(1);
  if (world.rank == 1) part.seek({0, 0});
  CHECK_SAYS(td::ConfigError, "was told to begin at another batch", job.fit(part, {}));
});

const Role forgets("forgets", [](const td::World& world) {
  std::vector<std::string> warnings;
  const td::Sink before = td::set_sink([&](td::Severity severity, std::string_view text) {
    if (severity == td::Severity::Warning) warnings.emplace_back(text);
  });
  td::Trainer job{class_net(), Classify{}, td::optim::Sgd{}, td::policies(parallel)};
  job.fit(TensorLoader{classes_of(8), {.batch_size = 2}}, {});
  CHECK(warnings.size() == (world.rank == 0));
  if (!warnings.empty()) {
    CHECK(warnings[0].find("gives the rows of rank 0 of 1") != std::string::npos);
    CHECK(treadle_test::is_sentence(warnings[0]));
  }
  warnings.clear();
  job.fit(TensorLoader{classes_of(8), td::data::sharded({.batch_size = 2}, world)}, {});
  CHECK(warnings.empty());
  td::set_sink(before);
});

const Role nothing("a rank without a batch", [](const td::World& world) {
  const td::optim::Sgd sgd{.learning_rate = 0.1};
  for (std::int64_t rows = 1; rows < world.world_size; ++rows) {
    fits_as_one(world, classes_of(rows), class_net, Classify{}, sgd, td::accumulation::NoAccumulation{}, 2, reordered);
    const td::accumulation::AccumulateOver windows{.batches = 2};
    fits_as_one(world, classes_of(rows), class_net, Classify{}, sgd, windows, 2, reordered);
  }
});

}  // namespace

TEST_CASE("evaluate over sharded loaders gives exactly one process's metrics, also where a rank has no batch") {
  for (const int ranks : {2, 3}) CHECK(run_ranks(ranks, "evaluates") == 0);
}

TEST_CASE("fit over sharded loaders trains and counts as one process does") {
  for (const int ranks : {2, 3}) CHECK(run_ranks(ranks, "fits") == 0);
}

TEST_CASE("fit goes on from the middle of an epoch, also on ranks that have nothing left of it") {
  for (const int ranks : {2, 3}) CHECK(run_ranks(ranks, "goes on") == 0);
}

TEST_CASE("fit says so where a loader gives every rank all rows") {
  CHECK(run_ranks(2, "forgets") == 0);
}

TEST_CASE("fit lets a rank without any batch take part") {
  for (const int ranks : {2, 3}) CHECK(run_ranks(ranks, "a rank without a batch") == 0);
}
