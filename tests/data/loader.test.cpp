// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// The loader: the same batches for any number of workers and ranks, from any position on; and what becomes of slow,
// throwing, empty and odd data sets.
#include <treadle/data/loader.hpp>

#include <torch/torch.h>
#include <treadle/data/random.hpp>
#include <treadle/data/sampler.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/loader.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <ranges>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using td::data::KeyedGenerator;
using td::data::LoaderOptions;
using td::data::Position;
using treadle_test::thrown;

namespace {

using Order = std::vector<std::int64_t>;

/// Samples that tell who they are and what random numbers they were given.
struct Noisy {
  std::int64_t rows = 0;
  std::int64_t size() const { return rows; }
  td::data::Example get(std::int64_t i, KeyedGenerator& random) const {
    auto data = torch::empty({3});
    for (int k = 0; k < 3; ++k) data[k] = random.uniform();
    return {data + static_cast<double>(i), i};
  }
};

/// Samples that take a time of their own, and count those that are being made.
struct Slow {
  std::int64_t rows = 0;
  std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);
  std::int64_t size() const { return rows; }
  td::data::Example get(std::int64_t i) const {
    std::this_thread::sleep_for(std::chrono::microseconds(200 + 800 * (i % 7 == 0)));
    ++*made;
    return {torch::full({2}, i), i};
  }
};

/// Samples that tell how many threads LibTorch would use for an operation on them.
struct Teams {
  std::int64_t size() const { return 12; }
  td::data::Example get(std::int64_t i) const { return {torch::full({1}, at::get_num_threads()), i}; }
};

struct Throwing {
  std::int64_t rows = 0;
  std::int64_t bad = -1;
  std::int64_t size() const { return rows; }
  td::data::Example get(std::int64_t i) const {
    if (i == bad) throw std::invalid_argument("the picture is upside down.");
    if (i == -bad) throw 7;
    return {torch::full({2}, i), i};
  }
};

/// Batches as they were given, for comparisons bit by bit.
template <class Loader>
std::vector<td::Batch> all(Loader&& loader, std::int64_t most = INT64_MAX) {
  std::vector<td::Batch> batches;
  for (const auto& batch : loader) {
    batches.push_back(batch);
    if (--most == 0) break;
  }
  return batches;
}
bool same(const std::vector<td::Batch>& a, const std::vector<td::Batch>& b) {
  return std::ranges::equal(a, b, [](const td::Batch& x, const td::Batch& y) {
    return torch::equal(x.data, y.data) && torch::equal(x.target, y.target);
  });
}
Order targets(const std::vector<td::Batch>& batches) {
  Order order;
  for (const auto& batch : batches)
    for (std::int64_t i = 0; i < batch.target.numel(); ++i) order.push_back(batch.target[i].item<std::int64_t>());
  return order;
}
Order sorted(Order order) {
  std::ranges::sort(order);
  return order;
}
Order counting(std::int64_t size) {
  Order order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  return order;
}
int threads_of_this_process() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

constexpr std::array worker_counts{0, 1, 2, 4};

}  // namespace

TEST_CASE("any number of workers gives the same batches, bit by bit, and they are what the keys say") {
  using Loader = td::data::Loader<Noisy>;
  static_assert(std::ranges::input_range<Loader> && td::loader<Loader> && td::sized_loader<Loader> &&
                td::reseedable_loader<Loader> && td::data::resumable<Loader>);
  torch::manual_seed(3);
  const auto generator_before = at::detail::getDefaultCPUGenerator().get_state();
  const LoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 5};
  std::vector<std::vector<td::Batch>> want;  // by hand: the permutation and the keys
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    auto& batches = want.emplace_back();
    const auto order = td::data::permutation(77, 5, epoch);
    for (std::size_t begin = 0; begin < order.size(); begin += 8) {
      std::vector<torch::Tensor> data;
      const std::size_t end = std::min(begin + 8, order.size());
      for (std::size_t i = begin; i < end; ++i) {
        KeyedGenerator random(5, epoch, order[i]);
        data.push_back(Noisy{77}.get(order[i], random).data);
      }
      batches.push_back({torch::stack(data), torch::tensor(Order(order.begin() + static_cast<std::ptrdiff_t>(begin),
                                                                 order.begin() + static_cast<std::ptrdiff_t>(end)))});
    }
  }
  for (const int workers : worker_counts)
    for (const int prefetch : {0, 1, 3}) {
      CAPTURE(workers);
      CAPTURE(prefetch);
      auto told = options;
      told.workers = workers;
      told.prefetch = prefetch;
      Loader loader{Noisy{77}, told};
      CHECK(loader.size() == 10);
      CHECK(same(all(loader), want[0]));
      CHECK(same(all(loader), want[1]));
    }
  CHECK(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), generator_before));
}

TEST_CASE("ranks are given parts of the same batches, with the same random numbers, for any number of workers") {
  for (const int world : {1, 2, 3})
    for (const int workers : worker_counts) {
      CAPTURE(world);
      CAPTURE(workers);
      td::data::Loader whole{Noisy{50}, {.batch_size = 4 * world, .shuffle = true, .seed = 9}};
      whole.set_epoch(2);
      const auto job = all(whole);
      Order seen;
      for (int rank = 0; rank < world; ++rank) {
        td::data::Loader part{
            Noisy{50},
            {.batch_size = 4, .shuffle = true, .seed = 9, .workers = workers, .rank = rank, .world_size = world}};
        part.set_epoch(2);
        const auto own = all(part);
        for (std::size_t k = 0; k < own.size(); ++k) {
          using torch::indexing::Slice;
          CHECK(torch::equal(own[k].data, job[k].data.index({Slice(rank, torch::indexing::None, world)})));
          CHECK(torch::equal(own[k].target, job[k].target.index({Slice(rank, torch::indexing::None, world)})));
        }
        for (const auto i : targets(own)) seen.push_back(i);
      }
      CHECK(sorted(seen) == counting(50));
    }
}

TEST_CASE("a position is two integers, and every one is gone on from exactly") {
  const LoaderOptions options{.batch_size = 4, .shuffle = true, .seed = 1, .workers = 2};
  td::data::Loader reference{Noisy{30}, options};
  std::vector<td::Batch> want = all(reference);
  CHECK((reference.position() == Position{1, 0}));
  for (const auto& batch : all(reference)) want.push_back(batch);
  CHECK((reference.position() == Position{2, 0}));
  for (std::int64_t stop = 0; stop <= 8; ++stop) {
    CAPTURE(stop);
    td::data::Loader first{Noisy{30}, options};
    Position where = first.position();
    if (stop > 0) CHECK(same(all(first, stop), {want.begin(), want.begin() + stop}));
    where = first.position();
    CHECK((where == (stop == 8 ? Position{1, 0} : Position{0, stop})));
    for (const int workers : worker_counts) {
      auto told = options;
      told.workers = workers;
      td::data::Loader second{Noisy{30}, told};
      second.seek(where);
      CHECK(second.position() == where);
      second.set_epoch(where.epoch);  // as `fit` does before each epoch
      std::vector<td::Batch> rest = all(second);
      CHECK(same(rest, {want.begin() + stop, want.begin() + (stop == 8 ? 16 : 8)}));
      if (stop < 8) CHECK(same(all(second), {want.begin() + 8, want.end()}));
    }
  }
  td::data::Loader loader{Noisy{30}, options};
  loader.seek({.epoch = 3, .batch = 8});  // an epoch's end is the next one's beginning
  CHECK((loader.position() == Position{4, 0}));
  loader.seek({.epoch = 3, .batch = 5});
  loader.set_epoch(4);
  CHECK((loader.position() == Position{4, 0}));
  CHECK(all(loader, 1).size() == 1);  // left early: the next pass is the next epoch, or the same one if asked for
  CHECK((loader.position() == Position{4, 1}));
  loader.set_epoch(4);
  CHECK((loader.position() == Position{4, 0}));
  CHECK(all(loader).size() == 8);
  CHECK_SAYS(td::ConfigError, "batch 9 of epoch 0 was sought, and an epoch has 8 batches", loader.seek({0, 9}));
  CHECK_SAYS(td::ConfigError, "batch -1", loader.seek({0, -1}));
}

TEST_CASE("a loader says that it was sought, until a pass begins or another epoch is chosen") {
  td::data::Loader loader{Noisy{30}, {.batch_size = 4}};
  CHECK(!loader.sought());
  loader.seek({2, 3});
  CHECK((loader.sought() == Position{2, 3}));
  loader.set_epoch(2);
  const auto copy = loader;
  CHECK((copy.sought() == Position{2, 3}));
  auto it = loader.begin();
  CHECK(!loader.sought());
  CHECK((it.at() == Position{2, 3}));
  CHECK(!it.is_last());
  for (int k = 0; k < 4; ++k) ++it;
  CHECK((it.at() == Position{2, 7}));
  CHECK(it.is_last());
  loader.seek({2, 3});
  loader.set_epoch(3);
  CHECK(!loader.sought());
  // What a loader of a part of a job's rows is for.
  td::data::Loader half{Noisy{30}, {.rank = 1, .world_size = 2}};
  CHECK(td::detail::shard_text(half, 1, 2).empty());
  CHECK(td::detail::shard_text(std::vector<td::Batch>{}, 1, 2).empty());
  CHECK(td::detail::shard_text(loader, 0, 2).find("treadle::data::sharded(options)") != std::string::npos);
  CHECK(td::detail::shard_text(loader, 1, 2).empty());  // as the first rank says so
  CHECK(td::detail::shard_text(half, 0, 2).empty() == false);
}

TEST_CASE("a copy of a loader stands where the loader stood, and goes its own way") {
  td::data::Loader loader{Noisy{10}, {.batch_size = 2}};
  CHECK(all(loader, 2).size() == 2);
  auto copy = loader;
  CHECK((copy.position() == Position{0, 2}));
  CHECK(all(loader, 1).size() == 1);
  CHECK((loader.position() == Position{1, 1}));
  CHECK((copy.position() == Position{0, 2}));
  const auto other = loader.with({.batch_size = 5});
  CHECK(other.size() == 2);
}

TEST_CASE("ragged ends, an empty set, one sample, a batch larger than the set") {
  for (const int workers : worker_counts) {
    CAPTURE(workers);
    const auto sizes = [&](std::int64_t rows, LoaderOptions options) {
      options.workers = workers;
      td::data::Loader loader{Noisy{rows}, options};
      Order rows_of;
      for (const auto& batch : loader) rows_of.push_back(td::rows(batch));
      CHECK(loader.size() == static_cast<std::int64_t>(rows_of.size()));
      CHECK((loader.position() == Position{1, 0}));
      return rows_of;
    };
    CHECK((sizes(7, {.batch_size = 3}) == Order{3, 3, 1}));
    CHECK((sizes(7, {.batch_size = 3, .drop_last = true}) == Order{3, 3}));
    CHECK(sizes(0, {.batch_size = 3}).empty());
    CHECK(sizes(0, {.batch_size = 3, .shuffle = true}).empty());
    CHECK((sizes(1, {.batch_size = 3, .shuffle = true}) == Order{1}));
    CHECK((sizes(5, {.batch_size = INT64_MAX, .shuffle = true}) == Order{5}));
    CHECK(sizes(5, {.batch_size = 6, .drop_last = true}).empty());
    CHECK((sizes(5, {.batch_size = INT64_MAX, .rank = 1, .world_size = 2}) == Order{2}));
  }
}

TEST_CASE("slow samples neither reorder nor pile up") {
  Slow data{60};
  td::data::Loader loader{data, {.batch_size = 4, .workers = 3, .prefetch = 3}};
  Order order;
  std::int64_t taken = 0;
  for (const auto& batch : loader) {
    ++taken;
    if (taken == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // time to run ahead, if they could
    CHECK(data.made->load() <= 4 * (taken + 3));
    for (const auto i : targets({batch})) order.push_back(i);
  }
  CHECK(order == counting(60));
}

TEST_CASE("a worker computes on one thread, whatever the program has set for its own") {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  for (const auto& batch : td::data::Loader{Teams{}, {.batch_size = 4, .workers = 2}})
    CHECK(torch::equal(batch.data, torch::ones({4, 1}, batch.data.options())));
  CHECK(at::get_num_threads() == 3);
  at::set_num_threads(before);
}

TEST_CASE("a worker's exception arrives in its turn, with its text and the sample, and the loader stays usable") {
  for (const int workers : worker_counts) {
    CAPTURE(workers);
    td::data::Loader loader{Throwing{40, 21}, {.batch_size = 4, .workers = workers}};
    Order seen;
    std::string said;
    std::string nested;
    try {
      for (const auto& batch : loader)
        for (const auto i : targets({batch})) seen.push_back(i);
    } catch (const td::DataError& error) {
      said = error.what();
      try {
        std::rethrow_if_nested(error);
      } catch (const std::invalid_argument& original) {
        nested = original.what();
      }
    }
    CHECK(said == "data::Loader: sample 21 (in batch 5 of epoch 0) could not be loaded: the picture is upside down.");
    CHECK(nested == "the picture is upside down.");
    CHECK(seen == counting(20));
    CHECK((loader.position() == Position{0, 5}));
    loader.seek({0, 6});  // behind the batch that cannot be had
    CHECK((targets(all(loader)) == Order{24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39}));
    CHECK(targets(all(loader, 5)) == counting(20));  // a new epoch
    auto it = (loader.seek({0, 4}), loader.begin());
    CHECK_THROWS_AS(++it, td::DataError);
    CHECK(it == loader.end());
    ++it;
    CHECK(it == loader.end());
    CHECK((loader.position() == Position{0, 5}));  // still in front of it
    td::data::Loader first{Throwing{40, 0}, {.batch_size = 4, .workers = workers}};
    CHECK_SAYS(td::DataError, "sample 0 (in batch 0 of epoch 0)", first.begin());
    td::data::Loader odd{Throwing{40, -3}, {.batch_size = 4, .workers = workers}};
    CHECK_SAYS(td::DataError, "what was thrown is no std::exception", odd.begin());
  }
}

namespace {
struct Counted {
  std::shared_ptr<std::atomic<int>> alive;
  at::Tensor data = torch::zeros({64});
  explicit Counted(std::shared_ptr<std::atomic<int>> a) : alive(std::move(a)) { ++*alive; }
  Counted(const Counted& o) : alive(o.alive), data(o.data) { ++*alive; }
  Counted& operator=(const Counted&) = default;
  ~Counted() { --*alive; }
  void for_each_tensor(auto&& f) { f(data); }
  void for_each_tensor(auto&& f) const { f(data); }
};
struct CountedSet {
  std::shared_ptr<std::atomic<int>> alive;
  std::int64_t size() const { return 1000; }
  Counted get(std::int64_t) const { return Counted(alive); }
};
}  // namespace

TEST_CASE("1,000 passes that end early, by break and by exception, leave no thread and nothing ready behind") {
  const auto alive = std::make_shared<std::atomic<int>>(0);
  const int threads = threads_of_this_process();
  td::data::Loader loader{CountedSet{alive}, {.batch_size = 2, .shuffle = true, .workers = 2}};
  int seen = 0;
  for (int pass = 0; pass < 1000; ++pass) try {
      for (const auto& batch : loader) {
        REQUIRE(batch.data.size(0) == 2);
        if (++seen % 3 == 0) break;
        if (seen % 7 == 0) throw std::runtime_error("the caller's own");
      }
    } catch (const std::runtime_error&) {
    }
  CHECK((loader.position().epoch == 999));
  CHECK(alive->load() == 0);
  // The system may list a thread for a moment after it was joined.
  for (int tries = 0; tries < 500 && threads_of_this_process() > threads; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(threads_of_this_process() <= threads);
}

TEST_CASE("an iterator outlives its loader, and two passes at once do not disturb each other") {
  auto loader = std::make_unique<td::data::Loader<Noisy>>(Noisy{20}, LoaderOptions{.batch_size = 2, .workers = 2});
  auto one = loader->begin();
  auto two = loader->begin();
  ++one;
  ++one;
  ++two;
  CHECK((targets({*one}) == Order{4, 5}));
  CHECK((targets({*two}) == Order{2, 3}));
  loader.reset();
  for (int k = 0; k < 7; ++k) ++one;
  CHECK((targets({*one}) == Order{18, 19}));
  ++one;
  CHECK(one == std::default_sentinel);
}

namespace {
struct Pair {
  torch::Tensor left;
  std::vector<torch::Tensor> more;
};
struct Pairs {
  std::int64_t size() const { return 5; }
  Pair get(std::int64_t i) const { return {torch::full({2}, i), {torch::full({}, 10 * i), torch::full({1, 2}, i)}}; }
};
struct Ragged {
  bool types = false;
  std::int64_t size() const { return 6; }
  td::data::Example get(std::int64_t i) const {
    return {types ? torch::zeros({2}, i == 4 ? torch::kInt : torch::kFloat) : torch::zeros({i == 4 ? 3 : 2}), i};
  }
};
struct Word {
  std::int64_t letters = 0;
};
struct Sentence {
  at::Tensor lengths;
};
Sentence collate(std::span<const Word> words, const td::data::Placement& place) {
  Sentence sentence{place.empty({static_cast<std::int64_t>(words.size())}, at::kLong)};
  for (std::size_t i = 0; i < words.size(); ++i) sentence.lengths[static_cast<std::int64_t>(i)] = words[i].letters;
  return sentence;
}
struct Words {
  std::int64_t size() const { return 4; }
  Word get(std::int64_t i) const { return {i * i}; }
};
/// Gives whole batches; a loader never asks it for samples.
struct Whole {
  std::int64_t size() const { return 7; }
  td::Batch get_batch(const td::data::Rows& rows) const {
    if (rows[0] == 6) throw std::runtime_error("no more.");
    Order numbers;
    for (std::int64_t i = 0; i < rows.size(); ++i) numbers.push_back(rows[i]);
    return {torch::tensor(numbers), torch::tensor(numbers)};
  }
};
}  // namespace

TEST_CASE("samples become batches: by type, by the type's own function, by the loader's") {
  for (const auto& batch : td::data::Loader{Pairs{}, {.batch_size = 5}}) {
    CHECK((batch.left.sizes() == at::IntArrayRef{5, 2}));
    CHECK(torch::equal(batch.more[0], torch::arange(5) * 10));
    CHECK((batch.more[1].sizes() == at::IntArrayRef{5, 1, 2}));
  }
  for (const auto& sentence : td::data::Loader{Words{}, {.batch_size = 4, .workers = 1}})
    CHECK(torch::equal(sentence.lengths, torch::tensor({0, 1, 4, 9})));
  const auto sum = [](std::span<const Word> words, const td::data::Placement&) {
    return td::Batch{torch::tensor(words[0].letters + words[1].letters), {}};
  };
  for (const auto& batch : td::data::Loader{Words{}, {.batch_size = 2, .drop_last = true}, td::data::EveryRow{}, sum}) {
    CHECK(batch.data.item<std::int64_t>() == 1);
    break;
  }
  td::data::Loader whole{Whole{}, {.batch_size = 3, .workers = 2}};
  CHECK((targets(all(whole, 2)) == Order{0, 1, 2, 3, 4, 5}));
  CHECK_SAYS(td::DataError, "batch 2 of epoch 1 could not be loaded: no more.", all(whole));
  for (const int workers : worker_counts) {
    td::data::Loader ragged{Ragged{}, {.batch_size = 3, .workers = workers}};
    CHECK_SAYS(
        td::DataError,
        "sample 4 (in batch 1 of epoch 0) does not fit into its batch: it has a tensor Float [3] where the first "
        "one's is Float [2]",
        all(ragged));
  }
  CHECK_SAYS(td::DataError, "a tensor Int [2] where the first one's is Float [2]",
             all(td::data::Loader{Ragged{true}, {.batch_size = 6}}));
  // Views and transposed samples are stacked by value.
  const auto images = torch::arange(24.0).reshape({4, 2, 3});
  const auto stacked = td::data::stack(4, [&](std::int64_t i) { return images[i].t(); });
  CHECK(torch::equal(stacked, images.transpose(1, 2)));
  CHECK(stacked.is_contiguous());
  // Pictures with their channels last stay so; one that has them first among them is copied by value.
  const auto pictures = torch::arange(2 * 3 * 4 * 5).reshape({2, 4, 5, 3}).permute({0, 3, 1, 2});
  for (const bool mixed : {false, true}) {
    const auto one = [&](std::int64_t i) { return mixed && i == 1 ? pictures[i].contiguous() : pictures[i]; };
    const auto last = td::data::stack(2, one);
    CHECK(torch::equal(last, pictures));
    CHECK(last.is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

TEST_CASE("a weighted sampler draws as the weights say, and each draw has random numbers of its own") {
  td::data::Loader loader{
      Noisy{4}, {.batch_size = 1000, .seed = 2, .workers = 2}, td::data::Weighted({1, 0, 3, 6}, 100'000)};
  CHECK(loader.size() == 100);
  std::map<std::int64_t, double> times;
  std::set<float> noise;
  for (const auto& batch : loader) {
    const auto* target = batch.target.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < 1000; ++i) ++times[target[i]];
    noise.insert(batch.data[0][0].item<float>());
  }
  CHECK(noise.size() > 90);
  CHECK(times.count(1) == 0);
  CHECK(times[0] == doctest::Approx(10'000).epsilon(0.04));  // 4 deviations
  CHECK(times[2] == doctest::Approx(30'000).epsilon(0.02));
  CHECK(times[3] == doctest::Approx(60'000).epsilon(0.011));
  Order joined(60);  // over ranks, the draws of one process
  td::data::Loader whole{Noisy{4}, {.batch_size = 60, .seed = 2}, td::data::Weighted({1, 0, 3, 6}, 60)};
  const auto job = all(whole);
  for (int rank = 0; rank < 3; ++rank) {
    td::data::Loader part{Noisy{4},
                          {.batch_size = 20, .seed = 2, .workers = 2, .rank = rank, .world_size = 3},
                          td::data::Weighted({1, 0, 3, 6}, 60)};
    const auto own = all(part);
    CHECK(torch::equal(own[0].data, job[0].data.index({torch::indexing::Slice(rank, torch::indexing::None, 3)})));
  }
  CHECK_SAYS(td::ConfigError, "a weight is -1", td::data::Weighted({1, -1}));
  CHECK_SAYS(td::ConfigError, "finite sum above 0", td::data::Weighted({0, 0}));
  CHECK_SAYS(td::ConfigError, "3 weights for 4 rows",
             all(td::data::Loader{Noisy{4}, {}, td::data::Weighted({1, 2, 3})}));
}

TEST_CASE("length buckets give every row once, in batches of similar length, with the short batch last") {
  Order lengths(203);
  KeyedGenerator random(1, 1);
  for (auto& length : lengths) length = static_cast<std::int64_t>(random.below(1000));
  const auto spread = [&](const std::vector<td::Batch>& batches) {
    double waste = 0;
    for (const auto& batch : batches) {
      Order own;
      for (const auto i : targets({batch})) own.push_back(lengths[static_cast<std::size_t>(i)]);
      waste += static_cast<double>(std::ranges::max(own) - std::ranges::min(own));
    }
    return waste / static_cast<double>(batches.size());
  };
  const LoaderOptions options{.batch_size = 10, .shuffle = true, .seed = 3};
  td::data::Loader plain{Noisy{203}, options};
  td::data::Loader bucketed{Noisy{203}, options, td::data::LengthBuckets(lengths)};
  const auto first = all(bucketed);
  CHECK(sorted(targets(first)) == counting(203));
  CHECK(first.back().target.numel() == 3);
  CHECK(spread(first) < spread(all(plain)) / 5);
  const auto second = all(bucketed);
  CHECK(targets(first) != targets(second));
  CHECK(sorted(targets(second)) == counting(203));
  td::data::Loader sorted_ones{Noisy{203}, {.batch_size = 10}, td::data::LengthBuckets(lengths)};
  Order in_turn;
  for (const auto i : targets(all(sorted_ones))) in_turn.push_back(-lengths[static_cast<std::size_t>(i)]);
  CHECK(std::ranges::is_sorted(in_turn));
  // Ranks share a batch's lengths: of each batch of the job, the short one included, rank r has rows r, r + W, ...
  for (const int world : {2, 5})
    for (int rank = 0; rank < world; ++rank) {
      CAPTURE(world);
      CAPTURE(rank);
      td::data::Loader part{
          Noisy{203},
          {.batch_size = 10 / world, .shuffle = true, .seed = 3, .workers = 1, .rank = rank, .world_size = world},
          td::data::LengthBuckets(lengths)};
      for (const auto& job : {first, second}) {
        const auto own = all(part);
        REQUIRE(own.size() == job.size() - (rank >= 3));  // 3 rows are left for the last batch
        for (std::size_t k = 0; k < own.size(); ++k)
          CHECK(torch::equal(own[k].data,
                             job[k].data.index({torch::indexing::Slice(rank, torch::indexing::None, world)})));
      }
    }
  CHECK_SAYS(td::ConfigError, "2 lengths for 203 rows",
             all(td::data::Loader{Noisy{203}, {}, td::data::LengthBuckets({1, 2})}));
}

namespace {
struct OutOfRange {
  std::int64_t draws(std::int64_t rows) const { return rows; }
  Order order(const td::data::EpochRequest& r) const { return Order(static_cast<std::size_t>(r.rows), r.rows); }
};
struct TooFew {
  std::int64_t draws(std::int64_t rows) const { return rows; }
  Order order(const td::data::EpochRequest&) const { return {0}; }
};
}  // namespace

TEST_CASE("options and samplers that cannot be are refused in a sentence") {
  CHECK_SAYS(td::ConfigError, "batch_size must be at least 1", td::data::Loader{Noisy{5}, {.batch_size = 0}});
  CHECK_SAYS(td::ConfigError, "workers must be 0 to 1024", td::data::Loader{Noisy{5}, {.workers = -1}});
  CHECK_SAYS(td::ConfigError, "prefetch must not be negative", td::data::Loader{Noisy{5}, {.prefetch = -1}});
  CHECK_SAYS(td::ConfigError, "rank 2 of a world_size of 2", td::data::Loader{Noisy{5}, {.rank = 2, .world_size = 2}});
  CHECK_SAYS(td::ConfigError, "row 5 of a data set of 5 rows", all(td::data::Loader{Noisy{5}, {}, OutOfRange{}}));
  CHECK_SAYS(td::ConfigError, "an order of 1 rows for its 5 draws", all(td::data::Loader{Noisy{5}, {}, TooFew{}}));
}

TEST_CASE("keyed random numbers are fixed for ever and uniform") {
  KeyedGenerator one(1, 2, 3);
  KeyedGenerator again(1, 2, 3);
  CHECK(one() == again());
  std::set<std::uint64_t> firsts;  // neighbors in seed, epoch and sample are all different
  for (std::uint64_t seed = 0; seed < 10; ++seed)
    for (std::int64_t epoch = 0; epoch < 10; ++epoch)
      for (std::int64_t sample = 0; sample < 100; ++sample) firsts.insert(KeyedGenerator(seed, epoch, sample)());
  CHECK(firsts.size() == 10'000);
  double mean = 0;
  double square = 0;
  double tenth = 0;
  for (std::int64_t i = 0; i < 100'000; ++i) {
    KeyedGenerator random(7, 0, i);  // the first number of each sample
    tenth += random.happens(0.1);
    const double normal = random.normal();
    mean += normal;
    square += normal * normal;
  }
  CHECK(tenth / 1e5 == doctest::Approx(0.1).epsilon(0.04));
  CHECK(std::abs(mean / 1e5) < 0.013);
  CHECK(square / 1e5 == doctest::Approx(1).epsilon(0.02));
}
