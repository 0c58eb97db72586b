// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 900
// DistributedDataParallel over NCCL: all ranks on the first GPU, which NCCL allows where each calls itself another
// host.
#include <ATen/Context.h>

#if TREADLE_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

#include "support/one_gpu.hpp"
#include "support/skip.hpp"
#define REQUIRE_DEVICE() TREADLE_REQUIRE_CUDA()
#include "distributed/failures.hpp"
#include "distributed/training.hpp"

namespace {
const bool on_first = [] {
  if (torch::cuda::is_available()) chosen_device() = at::Device(at::kCUDA, 0);
  return true;
}();
}  // namespace

namespace {
const Role stays_role("stays", [](const td::World& world) {
  const auto mine = dealt(ragged(), world);
  std::string said;
  const double taken = seconds_of([&] {
    said = told(world, "", seconds(60), [&](auto& trainer) {
      try {
        trainer.fit(BrokenLoader{{&mine}, world.rank == 1}, {.epochs = 1});
      } catch (const td::DataError&) {
        std::this_thread::sleep_for(seconds(20));  // and the trainer lives on
        throw;
      }
    });
  });
  CAPTURE(said);
  if (world.rank == 0) {
    CHECK(said.find("rank 1: the file ends in the middle") != said.npos);
    CHECK(taken < 15);
  }
});
}  // namespace

TEST_CASE("a throw between steps is told through the store, while the one who threw lives on") {
  REQUIRE_DEVICE();
  CHECK(run_ranks(2, "stays", seconds(40)) == 0);
}

namespace {
#if TREADLE_HAS_CUDA
/// While it lives, anything in LibTorch that makes the host wait for the device throws.
struct NoSync {
  NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

template <class Net, class Objective, class... Policies>
void steps_without_sync(const std::vector<td::Batch>& mine, Objective objective, Policies... policies) {
  auto net = make<Net>(1);
  at::globalContext().setDeterministicAlgorithms(false, false);
  td::Trainer trainer{net, objective, td::optim::AdamW{.schedule = td::schedule::cosine({.steps = 1000, .warmup = 3})},
                      td::policies(policies...)};
  for (const auto& batch : mine) trainer.accumulate(batch);  // lazy state, kernels, workspaces, the second buckets
  std::vector<td::StepResult> kept;
  {
    const NoSync no_sync;
    for (int round = 0; round < 2; ++round)
      for (const auto& batch : mine)
        if (auto done = trainer.accumulate(batch)) kept.push_back(std::move(*done));
  }
  CHECK(kept.size() >= 4);
  CHECK(finite(masters(trainer)));
  CHECK(same_on_all_ranks(trainer));
}
#endif

const Role no_sync_role("no sync", []([[maybe_unused]] const td::World& world) {
#if TREADLE_HAS_CUDA
  const auto x = torch::ones({}, device());
  {
    const NoSync no_sync;
    CHECK_THROWS(x.item<float>());  // the check catches one
  }
  auto mine = dealt(normal(), world);
  mine.resize(6);
  steps_without_sync<TinyNet>(mine, CrossEntropy{}, ddp());
  steps_without_sync<TinyNet>(mine, CrossEntropy{}, ddp<ParameterUse::Static>(), td::precision::Bf16{},
                              td::nonfinite::Skip{});
  steps_without_sync<TinyNet>(mine, CrossEntropy{}, ddp(), td::precision::Fp16{.growth_interval = 4},
                              td::accumulation::AccumulateOver{.batches = 3}, td::clipping::ClipNorm{.max_norm = 1},
                              td::averaging::ExponentialAverage{});
  steps_without_sync<PlainNet>(mine, TokenLoss{}, ddp(), td::precision::Bf16Weights{},
                               td::accumulation::AccumulateOver{.batches = 2}, td::nonfinite::Stop{});
#endif
});
}  // namespace

TEST_CASE("a step over 1 and 2 ranks makes the host wait as often as one on a single device: never") {
  REQUIRE_DEVICE();
  for (const int ranks : worlds(1)) CHECK(run_ranks(ranks, "no sync") == 0);
}
