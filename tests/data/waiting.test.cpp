// SPDX-License-Identifier: Apache-2.0
// What `fit` makes of a loader: where it begins, what is said of one that is too slow; and how many workers it is told
// to have.
// treadle-test: SERIAL
#include <treadle/data/bench.hpp>
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/prefetch.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/treadle.hpp>

#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;

namespace {

struct Sleepy {
  std::int64_t rows = 0;
  std::chrono::milliseconds each{5};
  std::int64_t size() const { return rows; }
  td::data::Example get(std::int64_t i) const {
    std::this_thread::sleep_for(each);
    return {torch::full({4}, 0.01 * static_cast<double>(i)), i % 2};
  }
};

struct Classify {
  td::Loss operator()(torch::nn::LinearImpl& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

/// Catches warnings and lines while it lives.
struct Listening {
  std::vector<std::string> warnings;
  std::vector<std::string> lines;
  td::Sink before = td::set_sink([this](td::Severity severity, std::string_view text) {
    if (severity == td::Severity::Warning) warnings.emplace_back(text);
    if (severity == td::Severity::Info) lines.emplace_back(text);
  });
  ~Listening() { td::set_sink(before); }
};

template <class Loader>
td::FitResult fit(Loader&& loader, td::FitOptions options) {
  td::Trainer trainer{torch::nn::Linear(4, 2), Classify{}, td::optim::Sgd{},
                      td::policies(td::parallelism::SingleDevice{.device = at::Device(at::kCPU)})};
  return trainer.fit(loader, options);
}

}  // namespace

TEST_CASE("waiting for data is measured, and said once where it is too much, with what to change") {
  {
    Listening listening;
    const auto result = fit(td::data::Loader{Sleepy{220}, {.batch_size = 20}}, {.epochs = 2});
    for (const auto& epoch : result.history) {
      CHECK(epoch.data_wait > 0.5);
      CHECK(epoch.data_wait <= 1);
    }
    REQUIRE(listening.warnings.size() == 1);
    const std::string& said = listening.warnings[0];
    CAPTURE(said);
    CHECK(said.find(" % of the training time was spent waiting for the loader: give the loader workers") !=
          std::string::npos);
    CHECK(treadle_test::is_sentence(said));
  }
  {
    Listening listening;
    td::data::Loader loader{Sleepy{440}, {.batch_size = 20, .workers = 2}};
    fit(td::data::map_batches(loader, [](td::Batch batch) { return batch; }), {});
    REQUIRE(listening.warnings.size() == 1);
    CHECK(listening.warnings[0].find("more than its 2 workers may help") != std::string::npos);
  }
  {
    Listening listening;
    fit(td::data::Loader{Sleepy{220}, {.batch_size = 20}}, {.warn_data_wait = 1});
    fit(td::data::Loader{Sleepy{20}, {.batch_size = 20}}, {});  // too short an epoch to judge by
    CHECK(listening.warnings.empty());
  }
}

TEST_CASE("training is the same, bit by bit, however its batches are made") {
  const td::Batch data{torch::linspace(-1, 1, 240).reshape({60, 4}), torch::arange(60).remainder(2)};
  const auto train = [&](auto&& loader) {
    torch::manual_seed(2);
    torch::nn::Linear net(4, 2);
    td::Trainer trainer{net, Classify{}, td::optim::AdamW{},
                        td::policies(td::parallelism::SingleDevice{.device = at::Device(at::kCPU)},
                                     td::accumulation::AccumulateOver{.batches = 2})};
    trainer.fit(loader, {.epochs = 3});
    return net->weight.detach().clone();
  };
  const td::data::LoaderOptions options{.batch_size = 7, .shuffle = true, .seed = 5};
  auto threads = options;
  threads.workers = 2;
  const auto want = train(td::data::TensorLoader{data, options});
  CHECK(torch::equal(train(td::data::TensorLoader{data, threads}), want));
  const auto by_sample = td::data::map(td::data::Tensors(data), [](td::Batch sample) { return sample; });
  CHECK(torch::equal(train(td::data::Loader{by_sample, threads}), want));
  td::data::Loader loader{by_sample, threads};
  CHECK(torch::equal(train(td::data::prefetch(loader, {.device = at::Device(at::kCPU), .depth = 3})), want));
  CHECK(!torch::equal(train(td::data::TensorLoader{data, {.batch_size = 7, .shuffle = true, .seed = 6}}), want));
}

namespace {
/// The first target of each batch that was trained on.
struct Seen {
  std::vector<std::int64_t>* firsts;
  td::Loss operator()(torch::nn::LinearImpl& net, const td::Batch& batch) const {
    firsts->push_back(batch.target[0].item<std::int64_t>());
    return td::mean_loss(net.forward(batch.data), batch.target.remainder(2));
  }
};
struct Plan {
  std::int64_t* steps;
  void on_fit_begin(const td::observe::RunInfo& info) { *steps = info.total_steps; }
};
template <class Accumulation = td::accumulation::NoAccumulation>
auto seeing(std::vector<std::int64_t>& firsts, std::int64_t& planned, Accumulation accumulation = {}) {
  return td::Trainer{torch::nn::Linear(4, 2), Seen{&firsts}, td::optim::Sgd{},
                     td::policies(td::parallelism::SingleDevice{.device = at::Device(at::kCPU)}, accumulation),
                     td::observers(Plan{&planned})};
}
}  // namespace

TEST_CASE("fit goes on where the loader was sought, and plans what is left") {
  const td::Batch data{torch::linspace(-1, 1, 160).reshape({40, 4}), torch::arange(40)};
  const td::data::TensorLoader loader{data, {.batch_size = 4, .shuffle = true, .seed = 5}};
  std::int64_t planned = 0;
  std::vector<std::int64_t> want;  // 4 epochs of 10 batches
  {
    auto trainer = seeing(want, planned);
    auto all = loader;
    trainer.fit(all, {.epochs = 4});
    REQUIRE(want.size() == 40);
    REQUIRE(planned == 40);
    // Only `seek` is heard: a loader that another trainer has used up begins as ever.
    std::vector<std::int64_t> firsts;
    auto other = seeing(firsts, planned);
    other.fit(all, {});
    CHECK(firsts == std::vector(want.begin(), want.begin() + 10));
  }
  const auto goes_on = [&](auto&& sought) {
    std::vector<std::int64_t> firsts;
    auto trainer = seeing(firsts, planned);
    sought.seek({1, 6});
    auto result = trainer.fit(sought, {.epochs = 2});
    CHECK(planned == 14);
    CHECK(result.steps == 14);
    CHECK(result.epochs == 2);
    CHECK(firsts == std::vector(want.begin() + 16, want.begin() + 30));
    CHECK((sought.position() == td::data::Position{3, 0}));
    trainer.fit(sought, {});  // which is the next epoch
    CHECK(planned == 10);
    CHECK(firsts == std::vector(want.begin() + 16, want.end()));
  };
  goes_on(td::data::TensorLoader(loader));
  goes_on(td::data::map_batches(td::data::TensorLoader(loader), [](td::Batch batch) { return batch; }));
  goes_on(td::data::prefetch(td::data::TensorLoader(loader), {.device = at::Device(at::kCPU)}));
  for (const auto tail : {td::accumulation::Tail::Step, td::accumulation::Tail::Drop}) {
    std::vector<std::int64_t> firsts;
    auto trainer = seeing(firsts, planned, td::accumulation::AccumulateOver{.batches = 3, .tail = tail});
    auto sought = loader;
    sought.seek({0, 5});
    CHECK(trainer.fit(sought, {.epochs = 2}).steps == (tail == td::accumulation::Tail::Step ? 6 : 4));
    CHECK(planned == (tail == td::accumulation::Tail::Step ? 6 : 4));
    sought.seek({2, 8});  // less than a window is left, which may well be
    CHECK(trainer.fit(sought, {.epochs = 2}).steps == (tail == td::accumulation::Tail::Step ? 5 : 3));
  }
}

TEST_CASE("bench counts samples by workers, picks the fewest that do, and leaves the loader alone") {
  Listening listening;
  td::data::Loader loader{Sleepy{1000, std::chrono::milliseconds(2)}, {.batch_size = 5, .shuffle = true}};
  const auto result = td::data::bench(loader, {.workers = {0, 1, 4, 5}, .seconds = 0.4});
  REQUIRE(result.rows.size() == 4);
  CHECK(result.rows[0].workers == 0);
  CHECK(result.rows[0].samples_per_second > 100);
  CHECK(result.rows[0].samples_per_second < 500);
  CHECK(result.rows[2].samples_per_second > 2 * result.rows[0].samples_per_second);
  CHECK(result.workers >= 4);
  REQUIRE(listening.lines.size() == 1);
  CHECK(listening.lines[0].find("workers  samples/s\n      0  ") == 0);
  CHECK(listening.lines[0].find("\nUse workers = " + std::to_string(result.workers) + ": ") != std::string::npos);
  CHECK((loader.position() == td::data::Position{0, 0}));
  const auto tiny =
      td::data::bench(td::data::Loader{Sleepy{1, std::chrono::milliseconds(1)}, {}}, {.workers = {0}, .seconds = 0.05});
  CHECK(tiny.rows[0].samples_per_second > 20);
  td::data::TensorLoader tensors{td::Batch{torch::ones({8, 2}), torch::zeros({8}, at::kLong)}, {.batch_size = 4}};
  const auto mapped = td::data::bench(td::data::map_batches(tensors, [](const at::Tensor& data) { return data * 2; }),
                                      {.workers = {0}, .seconds = 0.05});
  CHECK(mapped.rows[0].samples_per_second > 20);
  CHECK_SAYS(td::DataError, "gave no batch", td::data::bench(td::data::Loader{Sleepy{0}, {}}, {.seconds = 0.1}));
}
