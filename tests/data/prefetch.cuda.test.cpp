// SPDX-License-Identifier: Apache-2.0
// Batches brought to a device ahead of their use: the same ones, in their order, from any position on; on CUDA without
// making the host wait for the device, and with bounded memory.
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/prefetch.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/data/transforms.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <ranges>
#include <stdexcept>
#include <string>
#include <thread>
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
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(counted.made->load() <= 1 + 3 + 1);  // in use, ahead, and the one that begin() of the loader made
  CHECK(counted.made->load() >= 1 + 3);
  for (int pass = 0; pass < 200; ++pass) CHECK(all(ahead, 2).size() == 2);  // left early
}

}  // namespace

TEST_CASE("prefetch gives a loader's batches, in order, from any position on") {
  behaves(at::kCPU);
  CHECK_SAYS(td::ConfigError, "depth must be at least 1", td::data::prefetch(std::vector<td::Batch>{}, {.depth = 0}));
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

TEST_CASE("asking for a batch never makes the host wait for the device") {
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
