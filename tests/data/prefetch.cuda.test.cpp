// SPDX-License-Identifier: Apache-2.0
// Batches brought to a device ahead of their use: the same ones, in their order, from any position on; on CUDA by
// calls that do not wait for the device, and with bounded memory.
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/prefetch.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/data/transforms.hpp>
#include <treadle/loader.hpp>
#include <treadle/runtime/rank_device.hpp>
#include <treadle/runtime/wait_meter.hpp>
#include <treadle/runtime/world.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <ranges>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/doctest.hpp"
#include "support/skip.hpp"
#include "support/throws.hpp"

#if TREADLE_HAS_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace td = treadle;
using td::data::Position;

namespace {

td::Batch numbered(std::int64_t rows, std::int64_t width = 3) {
  return {torch::arange(rows * width).reshape({rows, width}).to(torch::kFloat), torch::arange(rows)};
}
template <class Loader>
std::vector<td::Batch> all(Loader&& loader, std::int64_t most = 1'000'000) {
  std::vector<td::Batch> batches;
  for (const auto& batch : loader) {
    batches.push_back({batch.data.cpu(), batch.target.cpu()});
    if (--most == 0) break;
  }
  return batches;
}
bool same(const std::vector<td::Batch>& a, const std::vector<td::Batch>& b) {
  return std::ranges::equal(a, b, [](const td::Batch& x, const td::Batch& y) {
    return torch::equal(x.data, y.data) && torch::equal(x.target, y.target);
  });
}

struct Throwing {
  std::int64_t size() const { return 20; }
  td::data::Example get(std::int64_t i) const {
    if (i == 13) throw std::runtime_error("nothing there.");
    return {torch::full({1}, i), i};
  }
};
struct Counted {
  std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);
  std::int64_t size() const { return 100; }
  td::data::Example get(std::int64_t i) const {
    ++*made;
    return {torch::full({1}, i), i};
  }
};

/// What must hold on every device.
void behaves(at::Device device) {
  const auto data = numbered(50);
  const td::data::LoaderOptions options{.batch_size = 8, .shuffle = true, .seed = 3, .workers = 2};
  td::data::TensorLoader plain{data, options};
  const auto first = all(plain);
  const auto second = all(plain);
  for (const int depth : {1, 2, 5}) {
    CAPTURE(depth);
    auto fetched = td::data::prefetch(td::data::TensorLoader{data, options}, {.device = device, .depth = depth});
    using Fetched = decltype(fetched);
    static_assert(std::ranges::input_range<Fetched> && td::loader<Fetched> && td::sized_loader<Fetched> &&
                  td::reseedable_loader<Fetched> && td::data::resumable<Fetched>);
    CHECK(fetched.size() == 7);
    CHECK(same(all(fetched), first));
    CHECK((fetched.position() == Position{1, 0}));
    CHECK(same(all(fetched), second));
    for (std::int64_t stop = 1; stop <= 7; ++stop) {  // whatever was fetched ahead, the position is that of the user
      fetched.seek({0, 0});
      CHECK(same(all(fetched, stop), {first.begin(), first.begin() + stop}));
      const auto here = fetched.position();
      CHECK((here == (stop == 7 ? Position{1, 0} : Position{0, stop})));
      fetched.seek(here);
      if (stop < 7) CHECK(same(all(fetched), {first.begin() + stop, first.end()}));
      CHECK(same(all(fetched), second));
    }
    fetched.set_epoch(1);
    CHECK(same(all(fetched), second));
    CHECK(all(fetched, 1).size() == 1);
    fetched.set_epoch(0);
    CHECK(same(all(fetched), first));
    for (const auto& batch : fetched) CHECK(batch.data.device() == fetched.device());
  }
  {  // It begins where the loader itself would.
    td::data::TensorLoader used{data, options};
    CHECK(all(used, 3).size() == 3);
    auto fetched = td::data::prefetch(used, {.device = device});
    CHECK((fetched.position() == Position{1, 0}));
    CHECK(same(all(fetched), second));
    fetched.set_epoch(0);
    CHECK(same(all(fetched), first));
    used.seek({1, 2});
    auto sought = td::data::prefetch(used, {.device = device});
    CHECK((sought.sought() == Position{1, 2}));
    CHECK(same(all(sought), {second.begin() + 2, second.end()}));
  }
  // Functions of batches behind it draw the numbers that they would without it.
  const auto images =
      td::Batch{torch::arange(20 * 48).reshape({20, 3, 4, 4}).remainder(256).to(torch::kByte), torch::arange(20)};
  const td::data::LoaderOptions few{.batch_size = 6, .shuffle = true, .seed = 4, .workers = 1};
  const td::data::RandomCrop crop{.height = 4, .padding = 2};
  const td::data::Normalize normalize{{0.4, 0.5, 0.6}, {0.2, 0.3, 0.4}};
  td::data::TensorLoader host{images, few};
  td::data::TensorLoader source{images, few};
  auto sent = td::data::prefetch(source, {.device = device});
  const auto want = all(td::data::map_batches(host, crop, td::data::RandomFlip{}, normalize));
  const auto got = all(td::data::map_batches(sent, crop, td::data::RandomFlip{}, normalize));
  REQUIRE(got.size() == want.size());
  for (std::size_t k = 0; k < got.size(); ++k) CHECK(torch::allclose(got[k].data, want[k].data, 1e-6, 1e-6));
  // Any range.
  std::vector<td::Batch> vector{data, images};
  CHECK(same(all(td::data::prefetch(vector, {.device = device})), vector));
  std::vector<td::Batch> empty;
  CHECK(all(td::data::prefetch(empty, {.device = device})).empty());

  td::data::Loader throwing{Throwing{}, {.batch_size = 4, .workers = 1}};
  auto risky = td::data::prefetch(throwing, {.device = device});
  for (int again = 0; again < 2; ++again) {
    std::int64_t given = 0;
    const auto said = treadle_test::thrown<td::DataError>([&] {
      for (const auto& batch : risky) given += td::rows(batch);
    });
    CHECK(given == 12);
    CHECK(said.find("sample 13 (in batch 3 of epoch " + std::to_string(again)) != std::string::npos);
    CHECK((risky.position() == Position{again, 3}));
  }
  Counted counted;
  td::data::Loader loader{counted, {.batch_size = 1}};
  auto ahead = td::data::prefetch(loader, {.device = device, .depth = 3});
  auto it = ahead.begin();
  for (int tries = 0; tries < 500 && counted.made->load() < 1 + 3; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(counted.made->load() == 1 + 3);  // in use, and ahead
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(counted.made->load() == 1 + 3);
  for (int pass = 0; pass < 200; ++pass) CHECK(all(ahead, 2).size() == 2);  // left early
}

}  // namespace

TEST_CASE("prefetch gives a loader's batches, in order, from any position on") {
  behaves(at::kCPU);
  CHECK_SAYS(td::ConfigError, "depth must be at least 1", td::data::prefetch(std::vector<td::Batch>{}, {.depth = 0}));
}

namespace {
/// The second batch of 2000 takes 20 s.
struct Slow {
  std::int64_t size() const { return 10'000; }
  td::data::Example get(std::int64_t i) const {
    if (i >= 2000) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return {torch::full({1}, i), i};
  }
};
}  // namespace

TEST_CASE("leaving a prefetched pass does not wait for the loader's next batch") {
  for (const int workers : {0, 1}) {
    const td::data::Loader loader{Slow{}, {.batch_size = 2000, .workers = workers}};
    const auto seconds_to_leave = [](auto all) {
      auto it = all.begin();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time to ask for the next
      const auto begin = std::chrono::steady_clock::now();
      it = {};
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const td::data::PrefetchOptions options{.device = at::Device(at::kCPU)};
    auto inner = loader;
    CHECK(seconds_to_leave(td::data::prefetch(std::move(inner), options)) < 5);
    auto mapped = td::data::map_batches(td::data::Loader<Slow>(loader), [](td::Batch batch) { return batch; });
    CHECK(seconds_to_leave(td::data::prefetch(std::move(mapped), options)) < 5);
  }
}

TEST_CASE("a rank's device is the GPU of its local rank") {
  td::World world;
  world.world_size = 8;
  world.rank = 6;
  world.local_world_size = 4;
  world.local_rank = 2;
  CHECK(td::rank_device(world, 0) == at::Device(at::kCPU));
  CHECK(td::rank_device(world, 4) == at::Device(at::kCUDA, 2));
  CHECK_SAYS(td::ConfigError, "local rank 2 has no GPU", td::rank_device(world, 2));
  CHECK(td::rank_device(td::World{}, 4) == at::Device(at::kCUDA, 0));
}

TEST_CASE("prefetch does the same on a CUDA device") {
  TREADLE_REQUIRE_CUDA();
  behaves(at::Device(at::kCUDA, 0));
}

TEST_CASE("pinned batches are stacked where they are copied from") {
  TREADLE_REQUIRE_CUDA();
  td::data::Loader loader{Counted{}, {.batch_size = 10, .workers = 2, .pin_memory = true}};
  for (const auto& batch : loader) {
    CHECK(batch.data.is_pinned());
    CHECK(batch.target.is_pinned());
  }
  td::data::TensorLoader views{numbered(30), {.batch_size = 10, .pin_memory = true}};
  for (const auto& batch : views) CHECK(batch.data.is_pinned());
  td::data::Loader plain{Counted{}, {.batch_size = 10}};
  CHECK(same(all(td::data::prefetch(loader)), all(plain)));
}

#if TREADLE_HAS_CUDA
namespace {
/// Keeps the current stream busy.
void work(std::int64_t rounds) {
  auto x = torch::ones({4096, 4096}, torch::kCUDA);
  for (std::int64_t i = 0; i < rounds; ++i) x = torch::mm(x, x) * 1e-4;
}
}  // namespace

TEST_CASE("asking for a batch calls nothing that makes the host wait for the device") {
  TREADLE_REQUIRE_CUDA();
  td::data::TensorLoader loader{numbered(64, 1000), {.batch_size = 8, .shuffle = true, .workers = 1}};
  auto fetched = td::data::prefetch(loader);
  static_cast<void>(all(fetched));  // memory is taken the first time
  work(1);
  torch::cuda::synchronize();
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  std::int64_t rows = 0;
  std::vector<at::Tensor> sums;
  for (const auto& batch : fetched) {
    rows += td::rows(batch);
    sums.push_back(batch.data.sum());
  }
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  CHECK(rows == 64);
  CHECK(torch::stack(sums).to(torch::kDouble).sum().item<double>() ==
        doctest::Approx(numbered(64, 1000).data.to(torch::kDouble).sum().item<double>()));
}

TEST_CASE("batches are right while the device lags behind, are kept when kept, and take bounded memory") {
  TREADLE_REQUIRE_CUDA();
  constexpr std::int64_t width = 1 << 18;  // 8 rows are 8 MB
  const auto data = numbered(8 * 64, width).data.remainder(1000).contiguous();
  td::data::TensorLoader loader{td::Batch{data, torch::arange(8 * 64)}, {.batch_size = 8}};
  for (const int depth : {1, 3}) {
    auto fetched = td::data::prefetch(loader, {.depth = depth});
    torch::cuda::synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    const auto before = c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
    std::vector<at::Tensor> sums;
    td::Batch kept;
    std::int64_t k = 0;
    for (const auto& batch : fetched) {
      work(2);  // more than a copy takes
      sums.push_back(batch.data.to(torch::kDouble).sum().to(torch::kFloat));
      if (k++ == 5) kept = batch;
    }
    const auto want = data.view({64, -1}).to(torch::kDouble).sum(1);
    CHECK(torch::allclose(torch::stack(sums).cpu().to(torch::kDouble), want, 1e-6));
    CHECK(torch::equal(kept.data.cpu(), data.narrow(0, 40, 8)));
    const auto peak = c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].peak - before;
    const std::int64_t of_work = 3 * 64 * (1 << 20) + 2 * 8 * (1 << 20);  // products, and a batch in fp64
    CHECK(peak <= of_work + (depth + 3) * 8 * (1 << 20) + (8 << 20));
  }
}

namespace {
/// Batches that are made on the device by slow work, on the stream of whoever asks for them.
struct Made {
  std::int64_t size() const { return 64; }
  td::Batch get_batch(const td::data::Rows& rows) const {
    work(4);
    return {torch::full({1 << 16}, rows[0], torch::kCUDA), torch::full({1 << 16}, rows[0], torch::kCUDA)};
  }
};
}  // namespace

TEST_CASE("what other threads make on a device is waited for by the stream that uses it") {
  TREADLE_REQUIRE_CUDA();
  work(1);
  torch::cuda::synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, 0));
  const auto check = [](auto&& loader) {
    std::int64_t k = 0;
    std::vector<at::Tensor> right;
    for (const auto& batch : loader) right.push_back(batch.data.eq(8 * k++).all());
    CHECK(k == 8);
    CHECK(torch::stack(right).all().template item<bool>());
  };
  for (const int workers : {1, 3}) {
    const td::data::Loader<Made> loader{Made{}, {.batch_size = 8, .workers = workers}};
    check(td::data::Loader<Made>(loader));
    check(td::data::prefetch(td::data::Loader<Made>(loader)));
  }
  // Functions of batches that run on the device in the prefetching thread.
  check(
      td::data::prefetch(td::data::map_batches(td::data::Loader<Made>{Made{}, {.batch_size = 8}}, [](td::Batch batch) {
        work(4);
        return td::Batch{batch.data + 0, batch.target};
      })));
}

TEST_CASE("passes use one stream and one ring of page-locked memory, one after the other") {
  TREADLE_REQUIRE_CUDA();
  td::data::TensorLoader loader{numbered(80, 1 << 18), {.batch_size = 8}};
  auto fetched = td::data::prefetch(loader);
  const auto reserved = [] {
    torch::cuda::synchronize();
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[0].current;
  };
  for (int pass = 0; pass < 3; ++pass) static_cast<void>(all(fetched));
  const auto before = reserved();
  for (int pass = 0; pass < 20; ++pass) static_cast<void>(all(fetched, pass % 2 == 0 ? 3 : 100));
  CHECK(reserved() <= before + (16 << 20));  // a new stream each time would take 30 MB and more
}

TEST_CASE("pictures arrive with their channels where they were") {
  TREADLE_REQUIRE_CUDA();
  const auto pictures = torch::arange(4 * 3 * 5 * 6).reshape({4, 5, 6, 3}).permute({0, 3, 1, 2});
  for (const bool pinned : {false, true}) {
    std::vector<td::Batch> list{{pinned ? pictures.pin_memory() : pictures, torch::arange(4)}};
    for (const auto& batch : td::data::prefetch(list)) {
      CHECK(batch.data.is_contiguous(at::MemoryFormat::ChannelsLast));
      CHECK(torch::equal(batch.data.cpu(), pictures));
    }
  }
}

TEST_CASE("what functions of batches compute on the device is not a wait for data") {
  TREADLE_REQUIRE_CUDA();
  const at::Device device(at::kCUDA, 0);
  td::data::TensorLoader loader{numbered(800), {.batch_size = 1}};
  auto sent = td::data::prefetch(loader);
  auto slow = td::data::map_batches(sent, [](td::Batch batch) {
    work(1);
    return batch;
  });
  work(1);
  torch::cuda::synchronize();
  td::detail::WaitMeter meter(device);
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t given = 0;
  td::detail::for_each_batch<false>(
      slow, [&](const td::Batch& batch, bool) { return given += td::rows(batch), given < 200; }, meter);
  torch::cuda::synchronize();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  CHECK(meter.take() < 0.3 * seconds);
  // The same in the middle, where it is a wait; far more marks than are kept are made between two looks.
  const auto again = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i)
    meter([] {
      work(1);
      return 0;
    });
  torch::cuda::synchronize();
  const double all_of_it = std::chrono::duration<double>(std::chrono::steady_clock::now() - again).count();
  const double waited = meter.take();
  CHECK(waited > 0.6 * all_of_it);
  CHECK(waited <= all_of_it * 1.01);
}

TEST_CASE("the stream that asks is the one that waits") {
  TREADLE_REQUIRE_CUDA();
  td::data::TensorLoader loader{numbered(80, 100'000), {.batch_size = 8}};
  auto fetched = td::data::prefetch(loader);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, 0));
  std::int64_t k = 0;
  for (const auto& batch : fetched) {
    CHECK(torch::equal(batch.data.cpu(), numbered(80, 100'000).data.narrow(0, 8 * k, 8)));
    ++k;
  }
  CHECK(k == 10);
}
#endif
