// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// Checkpointing x precision x accumulation x non-finite, with dropout and batch norm in and around the blocks: bitwise
// the plain run.
#include "treadle/checkpointing/checkpoint_every_block.hpp"
#include "treadle/checkpointing/checkpoint_every_n.hpp"
#include "treadle/checkpointing/checkpoint_selective.hpp"
#include "treadle/checkpointing/offload_activations.hpp"
#include "treadle/checkpointing/sequential.hpp"
#include "treadle/parallelism/data_parallel.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "checkpointing/block_net.hpp"
#include "support/skip.hpp"
#include "support/throws.hpp"

namespace {

using namespace treadle_test;
using td::checkpointing::CheckpointEveryBlock;
using td::checkpointing::CheckpointEveryN;
using td::checkpointing::CheckpointSelective;
using td::checkpointing::NoCheckpointing;
using td::checkpointing::OffloadActivations;

std::vector<td::Batch> batches_of(bool poison) {
  auto batches = make_batches({8, 8, 8, 8, 6, 4, 8, 7});
  if (poison) batches[0] = poisoned(batches[0]), batches[5] = poisoned(batches[5]);
  return batches;
}

template <class Checkpointing, class... Policies>
State train(Checkpointing checkpointing, bool poison, Policies... others) {
  auto net = make<BlockNet>(1);
  td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                      td::policies(checkpointing, others...)};
  return left_by(trainer, batches_of(poison));
}

template <class... Policies>
void cross(bool poison, Policies... others) {
  const auto plain = train(NoCheckpointing{}, poison, others...);
  CHECK(plain.size() > 30);
  CHECK(plain.contains("step1/mean"));
  CHECK(difference(train(CheckpointEveryBlock{}, poison, others...), plain) == "");
  const CheckpointSelective selective;  // outside of CHECK: g++ 12 fails on its default member there
  CHECK(difference(train(selective, poison, others...), plain) == "");
  OffloadActivations offload{.min_bytes = 0};
  CHECK(difference(train(offload, poison, others...), plain) == "");
  offload.recompute_blocks = true;
  CHECK(difference(train(offload, poison, others...), plain) == "");
  for (const std::int64_t n : {0, 2, 100}) {
    CAPTURE(n);
    CHECK(difference(train(CheckpointEveryN{.n = n}, poison, others...), plain) == "");
  }
}

constexpr td::accumulation::AccumulateOver over{.batches = 3};
constexpr td::accumulation::SplitBatch split{.micro_batches = 2};
constexpr td::precision::Fp16 fp16{.initial_scale = 64};

}  // namespace

TEST_CASE("recomputing policies x precision x accumulation, with skipped steps") {
  using td::nonfinite::Skip;
  SUBCASE("Fp32") {
    cross(false);
    cross(true, Skip{}, over);
  }
  SUBCASE("Bf16") {
    cross(true, td::precision::Bf16{}, Skip{}, split);
    cross(false, td::precision::Bf16{});
  }
  SUBCASE("Fp16") {
    cross(true, fp16, over);
  }
  SUBCASE("Bf16Weights") {
    cross(true, td::precision::Bf16Weights{}, Skip{});
    cross(false, td::precision::Bf16Weights{}, split, td::averaging::ExponentialAverage{.decay = 0.9});
  }
#if TREADLE_NIGHTLY
  SUBCASE("the others") {
    const auto all = [](auto precision) {
      cross(false, precision, Skip{});
      cross(true, precision, Skip{}, over);
      cross(true, precision, Skip{}, split);
    };
    all(td::precision::Fp32{});
    all(td::precision::Tf32{});
    all(td::precision::Bf16{});
    all(fp16);
    all(td::precision::Bf16Weights{});
  }
#endif
}

namespace {
struct MakeBlockNet {
  BlockNet operator()() const { return BlockNet(); }
};
/// Blocks without chance: threads draw from one generator in no order.
struct PlainBlocksImpl : torch::nn::Module {
  PlainBlocksImpl() {
    for (int i = 0; i < 4; ++i) blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(6, 6)));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
  }
  at::Tensor forward(const at::Tensor& x, auto& step) {
    auto y = step.checkpoint(norm, x);
    for (auto& block : blocks) y = step.checkpoint([block](const at::Tensor& z) mutable { return block(z).tanh(); }, y);
    return y.slice(1, 0, 5);
  }
  std::vector<torch::nn::Linear> blocks;
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(PlainBlocks);
struct MakePlainBlocks {
  PlainBlocks operator()() const { return PlainBlocks(); }
};
/// Every replica on a thread of its own, as if each device were another one.
template <class Factory>
struct Apart : td::parallelism::BasicDataParallel<Factory> {
  struct State : td::parallelism::BasicDataParallel<Factory>::State {
    explicit State(const Apart& policy) : td::parallelism::BasicDataParallel<Factory>::State(policy, /*apart=*/true) {}
  };
};
}  // namespace

TEST_CASE("recomputing policies under DataParallel") {
  const auto both = std::vector<at::Device>(2, device());
  SUBCASE("replicas of one device, one after the other, with dropout") {
    const auto parallel = td::parallelism::data_parallel(both, MakeBlockNet{});
    cross(false, parallel, over);
    cross(true, parallel, td::precision::Bf16{}, td::nonfinite::Skip{});
  }
  SUBCASE("replicas in threads at once") {
    const auto parallel = Apart<MakePlainBlocks>{{both, MakePlainBlocks{}}};
    const auto run = [&](auto checkpointing, auto... others) {
      auto net = make<PlainBlocks>(1);
      td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                          td::policies(checkpointing, parallel, others...)};
      return left_by(trainer, batches_of(false));
    };
    const auto plain = run(NoCheckpointing{}, over);
    for (int i = 0; i < 20; ++i) {
      CHECK(difference(run(CheckpointEveryBlock{}, over), plain) == "");
      CHECK(difference(run(CheckpointEveryN{}, over), plain) == "");
      CHECK(difference(run(OffloadActivations{.min_bytes = 0}, over), plain) == "");
    }
  }
}

namespace {
/// A block that is a function object, and reads the buffer which it writes: each replica its own.
struct CountingNetImpl : torch::nn::Module {
  CountingNetImpl()
      : count(register_buffer("count", at::ones({1}))),
        norm(register_module("norm", torch::nn::BatchNorm1d(6))),
        fc(register_module("fc", torch::nn::Linear(6, 5))) {}
  at::Tensor forward(const at::Tensor& x, auto& step) {
    const auto block = [this](const at::Tensor& y) {
      const auto scale = count * 0.5;
      count.add_(1);
      return (norm(y) * scale).tanh();
    };
    return fc(step.checkpoint(block, step.checkpoint(block, x)));
  }
  at::Tensor count;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear fc;
};
TORCH_MODULE(CountingNet);
struct MakeCountingNet {
  CountingNet operator()() const { return CountingNet(); }
};
}  // namespace

TEST_CASE("function objects of replicas have the buffers of their replica") {
  const auto both = std::vector<at::Device>(2, device());
  const auto run = [&](auto checkpointing, auto parallel) {
    auto net = make<CountingNet>(1);
    td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                        td::policies(checkpointing, parallel)};
    return left_by(trainer, batches_of(false));
  };
  const auto check = [&](auto parallel) {
    const auto plain = run(NoCheckpointing{}, parallel);
    CHECK(difference(run(CheckpointEveryBlock{}, parallel), plain) == "");
    CHECK(difference(run(CheckpointEveryN{.n = 2}, parallel), plain) == "");
  };
  check(td::parallelism::data_parallel(both, MakeCountingNet{}));
  check(Apart<MakeCountingNet>{{both, MakeCountingNet{}}});
}

TEST_CASE("replicas of two GPUs recompute with the random numbers of their own") {
  TREADLE_REQUIRE_CUDA_DEVICES(2);
  const auto parallel =
      td::parallelism::data_parallel({at::Device(at::kCUDA, 0), at::Device(at::kCUDA, 1)}, MakeBlockNet{});
  for (int i = 0; i < 5; ++i) {
    cross(false, parallel, over);
    cross(true, parallel, td::precision::Bf16{}, td::nonfinite::Skip{});
  }
}

namespace {
/// The other form: a model that holds the policy's state itself, with an ordinary forward.
template <class Checkpointing>
struct HoldingImpl : torch::nn::Module {
  HoldingImpl() {
    for (int i = 0; i < 4; ++i) {
      auto net = torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.2));
      blocks.push_back(register_module("block" + std::to_string(i), net));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (auto& block : blocks) y = checkpoint(block, y);
    return y.slice(1, 0, 5);
  }
  std::vector<torch::nn::Sequential> blocks;
  typename Checkpointing::State checkpoint{Checkpointing{}};
};
template <class Checkpointing>
struct Holding : torch::nn::ModuleHolder<HoldingImpl<Checkpointing>> {
  using torch::nn::ModuleHolder<HoldingImpl<Checkpointing>>::ModuleHolder;
};
}  // namespace

TEST_CASE("a model may hold the policy's state and keep ordinary signatures") {
  const auto run = [](auto checkpointing) {
    auto net = make<Holding<decltype(checkpointing)>>(1);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01}, td::policies(over)};
    auto left = left_by(trainer, batches_of(false));
    const auto metrics = trainer.evaluate(batches_of(false));
    left["evaluated"] = at::full({}, metrics["loss"], at::kDouble);
    return left;
  };
  const auto plain = run(NoCheckpointing{});
  CHECK(difference(run(CheckpointEveryBlock{}), plain) == "");
  CHECK(difference(run(CheckpointEveryN{}), plain) == "");
}

namespace {
struct Forgetful {
  td::Loss operator()(auto& net, const td::Batch& batch, auto& /*step*/) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
}  // namespace

namespace {
struct ListNetImpl : torch::nn::Cloneable<ListNetImpl> {
  ListNetImpl() { reset(); }
  void reset() override {
    layers = register_module("layers", td::checkpointing::Sequential());
    layers->push_back(torch::nn::Linear(6, 12));
    layers->push_back(torch::nn::BatchNorm1d(12));
    layers->push_back(torch::nn::Functional(torch::gelu, "none"));
    layers->push_back(torch::nn::Dropout(0.2));
    layers->push_back(torch::nn::Linear(12, 5));
  }
  at::Tensor forward(const at::Tensor& x, auto& step) { return layers->forward(x, step); }
  td::checkpointing::Sequential layers{nullptr};
};
TORCH_MODULE(ListNet);
}  // namespace

TEST_CASE("a sequential model is a list of blocks") {
  const auto run = [](auto checkpointing, auto... others) {
    auto net = make<ListNet>(1);
    td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                        td::policies(checkpointing, others...)};
    return left_by(trainer, batches_of(false));
  };
  const auto plain = run(NoCheckpointing{});
  CHECK(difference(run(CheckpointEveryBlock{}), plain) == "");
  CHECK(difference(run(CheckpointEveryN{}), plain) == "");
  {  // outside of a step
    auto net = make<ListNet>(1);
    td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{}, td::policies(CheckpointEveryBlock{})};
    td::PlainStep step;
    step.record("anything", at::ones({}), 1);
    CHECK(!step.training());
    const auto batches = batches_of(false);
    const auto got =
        trainer.predict(batches, [&](auto& model, const td::Batch& batch) { return model.forward(batch.data, step); });
    CHECK(got.sizes() == at::IntArrayRef({57, 5}));
  }
  const td::parallelism::DataParallel copies{.devices = std::vector<at::Device>(2, device()), .factory = {}};
  CHECK(difference(run(CheckpointEveryN{}, copies), run(NoCheckpointing{}, copies)) == "");
  // Without a step, and with one that only calls, it computes what LibTorch's own computes of the same elements.
  auto own = make<ListNet>(1)->layers;
  torch::nn::Sequential theirs;
  for (const auto& element : *own) theirs->push_back(element);
  const auto x = at::randn({4, 6}, at::TensorOptions().device(device()));
  for (const bool training : {true, false}) {
    own->train(training);
    const auto of = [&](auto&& forward) {
      reseed(3);
      const auto y = forward();
      return State{{"y", y.detach()}, {"random", at::rand({3})}};
    };
    td::PlainStep step;
    const auto want = of([&] { return theirs->forward(x); });
    CHECK(difference(of([&] { return own->forward(x); }), want) == "");
    CHECK(difference(of([&] { return own->forward(x, step); }), want) == "");
  }
}

namespace {
/// Bytes of tensors on the device, on a CPU of everything that malloc has given.
std::int64_t bytes_now() {
  if (device().is_cpu()) return static_cast<std::int64_t>(::mallinfo2().uordblks);
  td::synchronize(device());
  return c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(device().index()).allocated_bytes[0].current;
}
}  // namespace

TEST_CASE("200 steps leave memory flat, and so do 100 dropped graphs") {
  const auto check = [](auto checkpointing) {
    auto net = make<BlockNet>(1);
    td::Trainer trainer{net, BlockEntropy{}, td::optim::AdamW{.learning_rate = 0.01}, td::policies(checkpointing)};
    const auto batch = make_batch(256, 1);  // an activation has 12 KiB or more
    const auto flat = [&](int times, auto&& f) {
      for (int i = 0; i < 10; ++i) f();
      const auto before = bytes_now();
      for (int i = 0; i < times; ++i) f();
      CHECK(std::abs(bytes_now() - before) < 64 * 1024);  // one activation a step would be 20 times as much or more
    };
    flat(200, [&] { trainer.accumulate(batch); });
    flat(100, [&] {
      [[maybe_unused]] const auto scope = trainer.checkpointing().pass(*net);
      typename decltype(trainer)::Context context(trainer.checkpointing(), trainer.names());
      BlockEntropy{}(*net, batch, context);  // and nobody wants its gradient
    });
  };
  check(NoCheckpointing{});
  check(CheckpointEveryBlock{});
  check(CheckpointEveryN{.n = 2});
  const CheckpointSelective selective;
  check(selective);
  check(OffloadActivations{.min_bytes = 0});
}

TEST_CASE("a policy that is never used is named, before anything is changed") {
  const auto check = [](auto policy, const char* name) {
    auto net = make<PlainNet>(1);
    const auto before = weights(*net);
    td::Trainer trainer{net, Forgetful{}, td::optim::AdamW{}, td::policies(policy, over)};
    const auto batches = batches_of(false);
    trainer.accumulate(batches[0]);
    trainer.accumulate(batches[1]);
    CHECK_SAYS(td::ConfigError, name, trainer.accumulate(batches[2]));
    CHECK(difference(weights(*net), before) == "");
    trainer.evaluate(batches);  // nothing to recompute there
  };
  check(CheckpointEveryBlock{}, "checkpointing::CheckpointEveryBlock: the objective made a step without one call");
  check(CheckpointEveryN{}, "checkpointing::CheckpointEveryN: the objective made a step without one call");
  check(OffloadActivations{}, "checkpointing::OffloadActivations: the objective made a step without one call");
  check(CheckpointSelective{}, "checkpointing::CheckpointSelective: the objective made a step without one call");
}

namespace {
int left = -1;  // calls until it throws
struct Failing {
  td::Loss operator()(auto& net, const td::Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data, step);
    logits = step.checkpoint(
        [](const at::Tensor& x) {
          if (left >= 0 && left-- == 0) throw std::runtime_error("on purpose");
          return x.tanh() * 2;
        },
        logits);
    return td::mean_loss(logits, batch.target);
  }
};
}  // namespace

TEST_CASE("a step that throws in a recompute drops its window and leaves the trainer usable") {
  for (const int at : {0, 1, 2, 3}) {  // forward and backward of both micro-batches
    CAPTURE(at);
    left = -1;
    auto net = make<BlockNet>(1);
    td::Trainer trainer{
        net, Failing{}, td::optim::AdamW{},
        td::policies(CheckpointEveryN{.n = 3}, td::nonfinite::Skip{}, td::accumulation::AccumulateOver{.batches = 2})};
    const auto batches = batches_of(false);
    trainer.step(std::vector{batches[0], batches[1]});
    const auto before = everything(trainer);
    left = at;
    CHECK_THROWS_WITH(trainer.step(std::vector{batches[0], batches[1]}), "on purpose");
    left = -1;
    CHECK(difference(everything(trainer), before) == "");
    reseed(3);
    trainer.step(std::vector{batches[0], batches[1]});
    auto other = make<BlockNet>(1);
    td::Trainer undisturbed{other, Failing{}, td::optim::AdamW{},
                            td::policies(td::nonfinite::Skip{}, td::accumulation::AccumulateOver{.batches = 2})};
    undisturbed.step(std::vector{batches[0], batches[1]});
    reseed(3);
    undisturbed.step(std::vector{batches[0], batches[1]});
    CHECK(difference(everything(trainer), everything(undisturbed)) == "");
  }
}
