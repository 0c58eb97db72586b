// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 600
// Recomputing policies on ranks: bitwise the same ranks without, in every mode of the Reducer.
#include "treadle/checkpointing/checkpoint_every_block.hpp"
#include "treadle/checkpointing/checkpoint_every_n.hpp"
#include "treadle/checkpointing/checkpoint_selective.hpp"
#include "treadle/checkpointing/offload_activations.hpp"
#include "treadle/nn/sync_batch_norm.hpp"
#include "treadle/parallelism/distributed_data_parallel.hpp"

#include <chrono>
#include <string>
#include <vector>

#include "checkpointing/block_net.hpp"
#include "support/one_gpu.hpp"
#include "support/ranks.hpp"

namespace {

using namespace treadle_test;
using std::chrono::seconds;
using td::ParameterUse;
using td::checkpointing::CheckpointEveryBlock;
using td::checkpointing::CheckpointEveryN;
using td::checkpointing::CheckpointSelective;
using td::checkpointing::NoCheckpointing;
using td::checkpointing::OffloadActivations;

/// A block that some micro-batches pass over, on some ranks: only a search finds that.
template <bool Varies>
struct VaryingEntropy {
  td::Loss operator()(auto& net, const td::Batch& batch, auto& step) const {
    auto y = net.first(batch.data);
    for (std::size_t i = 0; i < net.blocks.size(); ++i)
      if (!Varies || i != 3 || batch.data.size(0) % 2 == 0) y = step.checkpoint(net.blocks[i], y);
    y = step.checkpoint.cheap("norm", net.between, y);
    y = step.checkpoint.cheap(
        "gelu", [](const at::Tensor& z) { return at::gelu(z); }, y);
    return td::mean_loss(net.last(net.batch_norm(y)), batch.target);
  }
};

template <ParameterUse Use>
void matrix(const td::World& world) {
  const auto batches = make_batches({8, 6, 5, 7, 8, 4, 4, 6}, 100 + 50 * static_cast<std::uint64_t>(world.rank));
  const auto run = [&](auto checkpointing, auto objective, auto... others) {
    auto net = make<BlockNet>(1);
    td::Trainer trainer{
        net, objective, td::optim::AdamW{.learning_rate = 0.01},
        td::policies(
            checkpointing, others...,
            td::parallelism::DistributedDataParallel<Use>{
                .device = device(), .bucket_bytes = 512, .first_bucket_bytes = 256, .start_timeout = seconds(60)})};
    return left_by(trainer, batches);
  };
  const auto check = [&](auto objective, auto... others) {
    const auto plain = run(NoCheckpointing{}, objective, others...);
    CHECK(difference(run(CheckpointEveryBlock{}, objective, others...), plain) == "");
    CHECK(difference(run(CheckpointEveryN{}, objective, others...), plain) == "");
    const CheckpointSelective selective;  // outside of CHECK: g++ 12 fails on its default member there
    CHECK(difference(run(selective, objective, others...), plain) == "");
    const OffloadActivations offload{.min_bytes = 0, .recompute_blocks = Use == ParameterUse::Find};
    CHECK(difference(run(offload, objective, others...), plain) == "");
  };
  constexpr td::accumulation::AccumulateOver over{.batches = 3};
  if constexpr (Use == ParameterUse::Find)
    check(VaryingEntropy<true>{}, over);
  else
    check(VaryingEntropy<false>{}, over, td::precision::Bf16{});
  check(BlockEntropy{});
  check(BlockEntropy{}, td::precision::Bf16Weights{}, td::accumulation::SplitBatch{.micro_batches = 2},
        td::nonfinite::Skip{});
  if constexpr (Use == ParameterUse::Every) check(BlockEntropy{}, td::precision::Fp16{.initial_scale = 64}, over);
}
/// Blocks whose batch norms share their statistics over ranks: a recompute shares them again.
struct SyncNetImpl : torch::nn::Module {
  SyncNetImpl() {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module(
          "block" + std::to_string(i),
          torch::nn::Sequential(torch::nn::Linear(6, 6), td::nn::SyncBatchNorm(6), torch::nn::Dropout(0.1))));
  }
  at::Tensor forward(const at::Tensor& x, auto& step) {
    auto y = x;
    for (auto& block : blocks) y = step.checkpoint(block, y).tanh();
    return y.slice(1, 0, 5);
  }
  std::vector<torch::nn::Sequential> blocks;
};
TORCH_MODULE(SyncNet);

void sync(const td::World& world) {
  const auto batches = make_batches({8, 6, 5, 7}, 100 + 50 * static_cast<std::uint64_t>(world.rank));
  const auto run = [&](auto checkpointing) {
    auto net = make<SyncNet>(1);
    td::Trainer trainer{
        net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
        td::policies(checkpointing, td::parallelism::DistributedDataParallel<>{
                                        .device = device(), .bucket_bytes = 256, .start_timeout = seconds(60)})};
    td::nn::synchronize(*net, trainer.parallelism().group());
    return left_by(trainer, batches);
  };
  CHECK(difference(run(CheckpointEveryBlock{}), run(NoCheckpointing{})) == "");
}
const Role synchronized("sync", sync);
const Role every("every", matrix<ParameterUse::Every>);
const Role find("find", matrix<ParameterUse::Find>);
const Role fixed("static", matrix<ParameterUse::Static>);

}  // namespace

TEST_CASE("two ranks that recompute are bitwise two that do not") {
  for (const char* role : {"every", "find", "static", "sync"}) {
    CAPTURE(role);
    CHECK(run_ranks(2, role) == 0);
  }
}
