// SPDX-License-Identifier: Apache-2.0
// DataParallel where replicas are on CUDA devices. The other tests of it run on cuda:0 as well where there is one; here
// is what a CPU cannot show.
#include <algorithm>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "support/skip.hpp"
#include "treadle/parallelism/data_parallel.hpp"

#if TREADLE_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

using namespace treadle_test;

struct MakeTiny {
  TinyNet operator()() const { return TinyNet(); }
};
struct MakePlain {
  PlainNet operator()() const { return PlainNet(); }
};
std::vector<at::Device> cuda(std::vector<int> indices) {
  std::vector<at::Device> devices;
  for (const auto i : indices) devices.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(i));
  return devices;
}
/// Each replica on a thread and with memory of its own, though the device is one.
struct Apart : td::parallelism::BasicDataParallel<MakePlain> {
  struct State : BasicDataParallel<MakePlain>::State {
    explicit State(const Apart& policy) : BasicDataParallel<MakePlain>::State(policy, /*apart=*/true) {}
  };
};

template <class Net, class Parallel>
std::vector<oracle::Record> train(const Parallel& parallel, const std::vector<td::Batch>& batches) {
  td::Trainer trainer{make<Net>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 1e-2},
                      td::policies(parallel, td::accumulation::AccumulateOver{.batches = 2})};
  reseed(7);
  return oracle::run(trainer, batches);
}
/// The shards by hand, one after the other on the first device.
std::vector<oracle::Record> by_hand(const std::vector<td::Batch>& batches, std::int64_t parts) {
  auto loop = oracle::classifier(make<PlainNet>(), {});
  std::vector<oracle::Record> records;
  for (std::size_t i = 0; i < batches.size(); i += 2) {
    std::vector<td::Batch> window;
    for (std::size_t k = i; k < std::min(i + 2, batches.size()); ++k) {
      const auto rows = batches[k].data.size(0);
      const auto n = std::min(rows, parts);
      for (std::int64_t s = 0; s < n; ++s)
        window.push_back({batches[k].data.slice(0, rows * s / n, rows * (s + 1) / n),
                          batches[k].target.slice(0, rows * s / n, rows * (s + 1) / n)});
    }
    records.push_back(loop.step(window));
  }
  return records;
}

const std::vector<std::int64_t> sizes{9, 8, 1, 2, 3, 7, 9};

}  // namespace

TEST_CASE("replicas on one GPU: as by hand, repeatable with dropout, and alike with threads of their own") {
  TREADLE_REQUIRE_CUDA();
  const auto batches = make_batches(sizes);
  const auto start = weights(*make<PlainNet>());
  const auto plain = td::parallelism::data_parallel(cuda({0, 0}), MakePlain{});
  const auto want = by_hand(batches, 2);
  oracle::check_same(train<PlainNet>(plain, batches), want, start, 0, 5e-4);
  oracle::check_same(train<PlainNet>(Apart{{cuda({0, 0}), MakePlain{}}}, batches), want, start, 0, 5e-4);

  const auto tiny = td::parallelism::data_parallel(cuda({0, 0}), MakeTiny{});
  const auto even = make_batches({8, 8, 9, 7, 6, 5});
  const auto first = train<TinyNet>(tiny, even);
  const auto second = train<TinyNet>(tiny, even);
  for (std::size_t i = 0; i < first.size(); ++i) {
    CHECK(difference(first[i].weights, second[i].weights) == "");
    CHECK(difference(first[i].buffers, second[i].buffers) == "");
  }
}

TEST_CASE("several GPUs: as by hand on one") {
  TREADLE_REQUIRE_CUDA_DEVICES(2);
  const auto batches = make_batches(sizes);
  const auto start = weights(*make<PlainNet>());
  for (const auto& devices : {cuda({0, 1}), cuda({0, 1, 0, 1})}) {
    const auto parallel = td::parallelism::data_parallel(devices, MakePlain{});
    oracle::check_same(train<PlainNet>(parallel, batches), by_hand(batches, static_cast<std::int64_t>(devices.size())),
                       start, 0, 5e-4);
  }
  // By default every device has a replica.
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{},
                      td::policies(td::parallelism::data_parallel({}, MakePlain{}))};
  CHECK(trainer.accumulate(make_batch(64, 1))->micro_batches == td::cuda_device_count());
}

#if TREADLE_HAS_CUDA
TEST_CASE("a step makes the host wait never, and follows the caller's stream") {
  TREADLE_REQUIRE_CUDA();
  const auto batches = make_batches(std::vector<std::int64_t>(8, 8));
  const auto check = [&](auto parallel) {
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 1e-2},
                        td::policies(parallel, td::accumulation::AccumulateOver{.batches = 2}, td::nonfinite::Skip{})};
    oracle::run(trainer, make_batches({8, 8}));  // lazy state, kernels and workspaces
    const auto start = masters(trainer);
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
    for (const auto& batch : batches) trainer.accumulate(batch);
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
    CHECK(difference(masters(trainer), start) != "");
    CHECK(finite(masters(trainer)));
  };
  check(td::parallelism::data_parallel(cuda({0, 0}), MakePlain{}));
  check(Apart{{cuda({0, 0}), MakePlain{}}});
}
#endif
