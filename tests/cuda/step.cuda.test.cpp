// SPDX-License-Identifier: Apache-2.0
// What holds on a CUDA device only: a step that never makes the host wait.
#include <torch/torch.h>

#include <treadle/treadle.hpp>

#include "support/doctest.hpp"
#include "support/skip.hpp"

#if TREADLE_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace td = treadle;

namespace {

struct Net : torch::nn::Module {
  Net()
      : hidden(register_module("hidden", torch::nn::Linear(32, 64))),
        norm(register_module("norm", torch::nn::BatchNorm1d(64))),
        drop(register_module("drop", torch::nn::Dropout(0.1))),
        output(register_module("output", torch::nn::Linear(64, 10))) {}
  at::Tensor forward(const at::Tensor& x) { return output(drop(torch::relu(norm(hidden(x))))); }
  torch::nn::Linear hidden;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout drop;
  torch::nn::Linear output;
};

struct Objective {
  template <class Step>
  td::Loss operator()(Net& net, const td::Batch& batch, Step& step) const {
    const auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target, {.ignore_index = ignored});
  }
  std::int64_t ignored = td::MeanLossOptions::none;
};

std::vector<td::Batch> batches(at::Device device, bool bad = false) {
  torch::manual_seed(3);
  std::vector<td::Batch> all;
  for (int i = 0; i < 8; ++i) {
    auto x = torch::randn({i == 5 ? 7 : 16, 32});
    if (bad && i == 2) x.fill_(std::numeric_limits<float>::quiet_NaN());
    all.push_back({x.to(device), torch::randint(0, 10, {x.size(0)}).to(device)});
  }
  return all;
}

#if TREADLE_HAS_CUDA
/// While it lives, anything in LibTorch that makes the host wait for the device throws.
struct NoSync {
  NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

template <class Policies>
void run_without_sync(const Policies& policies, const td::optim::AdamW& rule, const Objective& objective,
                      const std::vector<td::Batch>& data) {
  Net net;
  td::Trainer trainer{net, objective, rule, policies};
  for (const auto& batch : data) trainer.accumulate(batch);  // lazy state, kernels and workspaces
  std::vector<td::StepResult> kept;
  {
    const NoSync no_sync;
    for (int round = 0; round < 3; ++round)
      for (const auto& batch : data)
        if (auto done = trainer.accumulate(batch)) kept.push_back(std::move(*done));
  }
  CHECK(kept.size() >= 6);
  for (const auto& p : net.parameters()) CHECK(at::isfinite(p).all().item<bool>());
}
#endif

const td::optim::AdamW scheduled{.schedule = td::schedule::cosine({.steps = 1000, .warmup = 3})};

}  // namespace

TEST_CASE("the check for host synchronizations catches one") {
  TREADLE_REQUIRE_CUDA();
#if TREADLE_HAS_CUDA
  const auto x = torch::ones({}, torch::kCUDA);
  const NoSync no_sync;
  CHECK_THROWS(x.item<float>());
#endif
}

TEST_CASE("a step with everything on makes the host wait never") {
  TREADLE_REQUIRE_CUDA();
#if TREADLE_HAS_CUDA
  const auto device = at::Device(at::kCUDA, 0);
  const auto everything =
      td::policies(td::precision::Fp16{.growth_interval = 4}, td::accumulation::AccumulateOver{.batches = 4},
                   td::clipping::ClipNorm{1.0}, td::averaging::ExponentialAverage{});
  SUBCASE("batches on the device") {
    run_without_sync(everything, scheduled, {}, batches(device));
  }
  SUBCASE("batches in pageable host memory") {
    run_without_sync(everything, scheduled, {}, batches(at::kCPU));
  }
  SUBCASE("a batch of NaN in each round") {
    run_without_sync(everything, scheduled, {}, batches(device, true));
  }
  SUBCASE("counts on the device") {
    run_without_sync(everything, scheduled, {.ignored = 3}, batches(device));
  }
#endif
}

TEST_CASE("no other policy makes the host wait either") {
  TREADLE_REQUIRE_CUDA();
#if TREADLE_HAS_CUDA
  const auto data = batches(at::Device(at::kCUDA, 0));
  SUBCASE("defaults") {
    run_without_sync(td::policies(), {}, {}, data);
  }
  SUBCASE("Stop, ClipValue, SplitBatch") {
    run_without_sync(td::policies(td::nonfinite::Stop{}, td::clipping::ClipValue{1.0},
                                  td::accumulation::SplitBatch{.micro_batches = 3}),
                     scheduled, {}, data);
  }
  SUBCASE("Bf16") {
    run_without_sync(td::policies(td::precision::Bf16{}, td::nonfinite::Skip{}), scheduled, {}, data);
  }
  SUBCASE("Bf16Weights in windows") {
    run_without_sync(td::policies(td::precision::Bf16Weights{}, td::accumulation::AccumulateOver{.batches = 2},
                                  td::clipping::ClipNorm{1.0}, td::nonfinite::Skip{}),
                     scheduled, {}, data);
  }
#endif
}

TEST_CASE("fit reads from the device at its log points only") {
  TREADLE_REQUIRE_CUDA();
#if TREADLE_HAS_CUDA
  struct Guarded {
    void on_step(const td::observe::StepEvent& event) {
      // Between two log points of 4 steps: from after the first step to before the fourth.
      const auto phase = event.step % 4;
      c10::cuda::warning_state().set_sync_debug_mode(phase == 1 || phase == 2 ? c10::cuda::SyncDebugMode::L_ERROR
                                                                              : c10::cuda::SyncDebugMode::L_DISABLED);
    }
  };
  const auto data = batches(at::Device(at::kCUDA, 0));
  Net net;
  td::Trainer trainer{net, Objective{}, scheduled, td::policies(td::precision::Fp16{}), td::observers(Guarded{})};
  CHECK_NOTHROW(trainer.fit(data, {.epochs = 3, .log_every = 4}));
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
#endif
}
