// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 600
// SyncBatchNorm over Gloo against torch::nn::BatchNorm in one process that sees the rows of all ranks.
#include "treadle/nn/sync_batch_norm.hpp"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/skip.hpp"
#include "support/throws.hpp"
#include "support/tiny.hpp"
#include "treadle/distributed/process_group.hpp"
#include "treadle/parallelism/distributed_data_parallel.hpp"

namespace {

using namespace treadle_test;
using std::chrono::seconds;

/// The rows of each rank, in their order: ragged, and in step 1 the first of several ranks has none.
std::vector<std::int64_t> rows_of(int ranks, int step) {
  if (ranks == 1) return {6 + step};
  std::vector<std::int64_t> rows{step == 1 ? 0 : 3 + step};
  for (int r = 1; r < ranks; ++r) rows.push_back(2 * r + (step == 2 && r == 2 ? -4 : 1));
  return rows;
}

struct Case {
  std::vector<std::int64_t> sizes;  // behind the rows: channels and what follows
  at::ScalarType dtype = at::kFloat;
  bool affine = true;
  bool track = true;
  std::optional<double> momentum = 0.1;
  bool channels_last = false;
  bool input_gradient = true;
};

/// Batch norm of all rows by LibTorch's own functional.
struct Joined {
  explicit Joined(const Case& c, at::Device where) : c(c) {
    const auto options = at::TensorOptions().device(where).dtype(c.dtype == at::kDouble ? at::kDouble : at::kFloat);
    if (c.affine) {
      weight = torch::linspace(0.5, 1.5, c.sizes[0], options).requires_grad_(true);
      bias = torch::linspace(-1, 1, c.sizes[0], options).requires_grad_(true);
    }
    if (c.track) {
      mean = torch::zeros({c.sizes[0]}, options);
      variance = torch::ones({c.sizes[0]}, options);
    }
  }
  at::Tensor forward(const at::Tensor& x, bool training) {
    if (training) ++steps;
    const double momentum = c.momentum ? *c.momentum : 1.0 / steps;
    return torch::batch_norm(x, weight, bias, mean, variance, training || !c.track, momentum, 1e-5, false);
  }
  Case c;
  int steps = 0;
  at::Tensor weight, bias, mean, variance;
};

bool close(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  // LibTorch's own CUDA kernels differ by up to 0.06 from the exact sums of such bfloat16 gradients, on either side.
  const double narrow = a.is_cuda() ? 1e-1 : 2e-2;
  const double tolerance = dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 2e-5 : narrow;
  return a.sizes() == b.sizes() && at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance);
}

void compare(const Case& c, const td::World& world, td::ProcessGroup& group, at::Device where) {
  CAPTURE(c.sizes);
  CAPTURE(std::string(c10::toString(c.dtype)));
  reseed(11);
  Joined joined(c, where);
  td::nn::SyncBatchNorm norm(
      torch::nn::BatchNormOptions(c.sizes[0]).affine(c.affine).track_running_stats(c.track).momentum(c.momentum));
  norm->to(where, c.dtype == at::kDouble ? at::kDouble : at::kFloat);
  if (c.affine) {
    const at::NoGradGuard no_grad;
    norm->weight.copy_(joined.weight);
    norm->bias.copy_(joined.bias);
  }
  CHECK(td::nn::synchronize(*norm, group) == 1);
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    const auto rows = rows_of(world.world_size, step);
    std::int64_t begin = 0;
    std::int64_t total = 0;
    for (int r = 0; r < world.world_size; ++r) {
      if (r < world.rank) begin += rows[static_cast<std::size_t>(r)];
      total += rows[static_cast<std::size_t>(r)];
    }
    const auto mine = rows[static_cast<std::size_t>(world.rank)];
    std::vector<std::int64_t> sizes{total};
    sizes.insert(sizes.end(), c.sizes.begin(), c.sizes.end());
    std::vector<std::int64_t> by_row(sizes.size(), 1);
    by_row[0] = total;  // ranks are far from each other
    auto x = (torch::randn(sizes) + torch::arange(total, at::kFloat).view(by_row) + 5).to(where, c.dtype);
    const auto dy = torch::randn(sizes).to(where, c.dtype);
    if (c.channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);

    auto all = x.clone().requires_grad_(c.input_gradient);
    const auto want = joined.forward(all, true);
    auto part = x.slice(0, begin, begin + mine).clone().requires_grad_(c.input_gradient);
    const auto got = norm->forward(part);
    CHECK((got.scalar_type() == c.dtype));
    CHECK(close(got, want.slice(0, begin, begin + mine), c.dtype));
    if (c.track) {
      CHECK(close(norm->running_mean, joined.mean, c.dtype));
      CHECK(close(norm->running_var, joined.variance, c.dtype));
      CHECK(norm->num_batches_tracked.item<std::int64_t>() == step + 1);
    }
    if (!c.affine && !c.input_gradient) continue;
    want.backward(dy);
    got.backward(dy.slice(0, begin, begin + mine));
    if (c.input_gradient) CHECK(close(part.grad(), all.grad().slice(0, begin, begin + mine), c.dtype));
    if (c.affine) {  // each rank has its rows' share
      auto of_weight = norm->weight.grad().clone();
      auto of_bias = norm->bias.grad().clone();
      group.sum(of_weight);
      group.sum(of_bias);
      CHECK(close(of_weight, joined.weight.grad(), c.dtype));
      CHECK(close(of_bias, joined.bias.grad(), c.dtype));
      for (const auto& tensor : {norm->weight, norm->bias, joined.weight, joined.bias}) tensor.mutable_grad().reset();
    }
  }
  norm->eval();  // no collective: ranks may do so alone
  const at::NoGradGuard no_grad;
  auto sizes = c.sizes;
  sizes.insert(sizes.begin(), 4);
  const auto x = torch::randn(sizes).to(where, c.dtype);
  if (c.track) CHECK(close(norm->forward(x), joined.forward(x, false), c.dtype));
}

void compare_all(const td::World& world, at::Device where) {
  td::ProcessGroup group(world, where, seconds(60));
  const auto run = [&](const Case& c) { compare(c, world, group, where); };
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    run({.sizes = {7}, .dtype = dtype});
    run({.sizes = {5, 4, 3}, .dtype = dtype});
  }
  run({.sizes = {5, 4}});
  run({.sizes = {3, 2, 3, 2}});
  run({.sizes = {5, 4, 3}, .channels_last = true});
  run({.sizes = {5, 4, 3}, .affine = false});
  run({.sizes = {5, 4, 3}, .track = false});
  run({.sizes = {5, 4, 3}, .momentum = std::nullopt});
  run({.sizes = {5, 4, 3}, .input_gradient = false});
}
const Role on_cpu("on the CPU", [](const td::World& world) { compare_all(world, at::kCPU); });
const Role on_cuda("on CUDA", [](const td::World& world) {  // all ranks on the first GPU
  ::setenv("NCCL_HOSTID", std::to_string(world.rank).c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  compare_all(world, at::Device(at::kCUDA, 0));
});

/// On CUDA the host does not know how many rows the others have.
const Role too_small_on_cuda("too small on CUDA", [](const td::World& world) {
  ::setenv("NCCL_HOSTID", std::to_string(world.rank).c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  const at::Device where(at::kCUDA, 0);
  td::ProcessGroup group(world, where, seconds(60));
  td::nn::SyncBatchNorm norm(4);
  norm->to(where);
  td::nn::synchronize(*norm, group);
  norm->forward(torch::randn({3, 4}, where));
  const auto mean = norm->running_mean.clone();
  const auto variance = norm->running_var.clone();
  CHECK((norm->forward(torch::randn({0, 4}, where)).sizes() == at::IntArrayRef({0, 4})));
  norm->forward(torch::randn({world.rank == 0 ? 1 : 0, 4}, where));  // no variance of one value
  CHECK(same_bits(norm->running_mean, mean));
  CHECK(same_bits(norm->running_var, variance));
  norm->forward(torch::randn({1, 4}, where));  // a value a rank are two
  CHECK(!same_bits(norm->running_mean, mean));
  CHECK(at::isfinite(norm->running_var).all().item<bool>());
});

/// TinyNet without chance, with either kind of batch norm.
template <class Norm>
struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(this->register_module("first", torch::nn::Linear(torch::nn::LinearOptions(6, 16).bias(false)))),
        norm(this->register_module("norm", Norm(16))),
        last(this->register_module("last", torch::nn::Linear(16, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  torch::nn::Linear first;
  Norm norm;
  torch::nn::Linear last;
};
template <class Norm>
torch::nn::ModuleHolder<NetImpl<Norm>> net() {
  reseed(1);
  return torch::nn::ModuleHolder<NetImpl<Norm>>(std::make_shared<NetImpl<Norm>>());
}

const Role training("training", [](const td::World& world) {
  chosen_device() = at::Device(at::kCPU);
  const auto run = [&](auto precision, double tolerance, oracle::Recipe recipe, auto accumulation, std::size_t window) {
    auto mine = net<td::nn::SyncBatchNorm>();
    td::Trainer trainer{mine, CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 1e-2},
                        td::policies(td::parallelism::DistributedDataParallel<>{.device = at::Device(at::kCPU)},
                                     precision, accumulation)};
    td::nn::synchronize(*mine, trainer.parallelism().group());
    auto loop = oracle::classifier(net<torch::nn::BatchNorm1d>(), recipe);
    const State start = weights(*mine);
    std::vector<oracle::Record> got;
    std::vector<oracle::Record> want;
    std::vector<td::Batch> open;
    for (std::uint64_t step = 0; step < 6; ++step) {
      std::int64_t total = 0;
      for (int r = 0; r < world.world_size; ++r) total += 4 + 2 * r;
      const auto whole = make_batch(total, 70 + step);
      std::int64_t begin = 0;
      for (int r = 0; r < world.rank; ++r) begin += 4 + 2 * r;
      const auto rows = 4 + 2 * world.rank;
      open.push_back(whole);
      if (auto done =
              trainer.accumulate(td::Batch{whole.data.narrow(0, begin, rows), whole.target.narrow(0, begin, rows)})) {
        auto record = oracle::record_of(trainer, *done);
        want.push_back(loop.step(open));
        record.loss = want.back().loss;  // a rank knows the loss of its own rows only
        got.push_back(record);
        open.clear();
      }
    }
    CHECK(got.size() == 6 / window);
    oracle::check_same(got, want, start, 0, tolerance);
  };
  run(td::precision::Fp32{}, 1e-3, {}, td::accumulation::NoAccumulation{}, 1);
  run(td::precision::Fp32{}, 1e-3, {}, td::accumulation::AccumulateOver{.batches = 2}, 2);
  run(td::precision::Bf16{}, 5e-2, {.precision = oracle::Precision::Bf16}, td::accumulation::NoAccumulation{}, 1);
});

const Role lost("lost", [](const td::World& world) {
  td::ProcessGroup group(world, at::kCPU, seconds(60));
  td::nn::SyncBatchNorm norm(4);
  td::nn::synchronize(*norm, group);
  norm->forward(torch::randn({3, 4}));
  group.set_timeout(seconds(1));
  if (world.rank == 0)
    CHECK_SAYS(td::DistributedError, "all ranks must run the model equally often", norm->forward(torch::randn({3, 4})));
});

const Role without_rows("without rows", [](const td::World& world) {
  const td::parallelism::DistributedDataParallel<> parallel{.device = at::Device(at::kCPU),
                                                            .timeout = std::chrono::milliseconds(2000)};
  auto mine = net<td::nn::SyncBatchNorm>();
  td::Trainer trainer{mine, CrossEntropy{}, td::optim::AdamW{}, td::policies(parallel)};
  td::nn::synchronize(*mine, trainer.parallelism().group());
  trainer.accumulate(make_batch(4, 1));
  const auto batch = make_batch(world.rank == 0 ? 4 : 0, 2);
  const char* part = world.rank == 0 ? "give each rank rows for every micro-batch" : "lost the others";
  CHECK_SAYS(td::DistributedError, part, trainer.accumulate(batch));
});

const Role too_small("too small", [](const td::World& world) {
  td::ProcessGroup group(world, at::kCPU, seconds(60));
  td::nn::SyncBatchNorm norm(4);
  td::nn::synchronize(*norm, group);
  norm->forward(torch::randn({3, 4}));
  const auto mean = norm->running_mean.clone();
  const auto variance = norm->running_var.clone();
  CHECK_SAYS(td::DataError, "1 value a channel", norm->forward(torch::randn({world.rank == 0 ? 1 : 0, 4})));
  CHECK((norm->forward(torch::randn({0, 4})).sizes() == at::IntArrayRef({0, 4})));  // nobody has rows
  CHECK(same_bits(norm->running_mean, mean));
  CHECK(same_bits(norm->running_var, variance));
  const auto x = torch::randn({2, 4}).requires_grad_(true);
  CHECK_SAYS(td::ConfigError, "gradients of its gradients",
             norm->forward(x).sum().backward({}, true, /*create_graph=*/true));
});

}  // namespace

TEST_CASE("values, gradients and statistics are those of the joined rows, with 1, 2 and 3 ranks") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    CHECK(run_ranks(ranks, "on the CPU") == 0);
  }
}

TEST_CASE("the same over NCCL") {
  TREADLE_REQUIRE_CUDA();
  CHECK(run_ranks(2, "on CUDA") == 0);
  CHECK(run_ranks(2, "too small on CUDA") == 0);
}

TEST_CASE("two ranks train as one process with batch norm over both ranks' rows") {
  CHECK(run_ranks(2, "training") == 0);
}

TEST_CASE("a rank that does not take part, and too few rows, are said in a sentence") {
  CHECK(run_ranks(2, "lost") == 0);
  CHECK(run_ranks(2, "too small") == 0);
  CHECK(run_ranks(2, "without rows") == 0);
}

TEST_CASE("without a group it is batch norm, bit by bit") {
  reseed(5);
  td::nn::SyncBatchNorm sync(torch::nn::BatchNormOptions(3).momentum(0.3));
  torch::nn::BatchNorm2d plain(torch::nn::BatchNormOptions(3).momentum(0.3));
  for (int step = 0; step < 3; ++step) {
    auto x = torch::randn({4, 3, 2, 2}).requires_grad_(true);
    auto y = x.detach().clone().requires_grad_(true);
    const auto got = sync(x);
    const auto want = plain(y);
    CHECK(same_bits(got, want));
    got.square().sum().backward();
    want.square().sum().backward();
    CHECK(same_bits(x.grad(), y.grad()));
    CHECK(same_bits(sync->weight.grad(), plain->weight.grad()));
  }
  CHECK(same_bits(sync->running_var, plain->running_var));
  CHECK(same_bits(sync->num_batches_tracked, plain->num_batches_tracked));
  CHECK(sync->named_parameters().keys() == plain->named_parameters().keys());
  CHECK(sync->named_buffers().keys() == plain->named_buffers().keys());
  CHECK_SAYS(td::DataError, "with C = 3", sync(torch::randn({4, 2})));
  CHECK_SAYS(td::DataError, "it must be [N, C]", sync(torch::randn({3})));
  const auto copy = std::dynamic_pointer_cast<td::nn::SyncBatchNormImpl>(sync->clone());
  REQUIRE(copy);
  CHECK(same_bits(copy->running_var, sync->running_var));
}

namespace {
struct BlocksImpl : torch::nn::Module {
  BlocksImpl()
      : stem(register_module("stem", torch::nn::Sequential(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4)))),
        head(register_module(
            "head", torch::nn::Sequential(torch::nn::Linear(16, 8),
                                          torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(8).affine(false))))) {}
  at::Tensor forward(const at::Tensor& x) { return head->forward(stem->forward(x).flatten(1)); }
  torch::nn::Sequential stem, head;
};
TORCH_MODULE(Blocks);
}  // namespace

TEST_CASE("children of Sequentials are converted in place, others refused by name") {
  const c10::intrusive_ptr<c10d::ProcessGroup> nobody;
  reseed(5);
  Blocks model;
  model->stem[1]->eval();
  model->stem[1]->as<torch::nn::BatchNorm2d>()->weight.requires_grad_(false);
  const auto x = torch::randn({5, 3, 4, 4});
  const auto want = model->forward(x);
  const auto state = weights(*model);
  const auto parameters = model->named_parameters();
  const auto held = model->named_buffers();

  CHECK(td::nn::convert_sync_batch_norm(*model, nobody) == 2);
  REQUIRE(model->stem[1]->as<td::nn::SyncBatchNorm>() != nullptr);
  REQUIRE(model->head[1]->as<td::nn::SyncBatchNorm>() != nullptr);
  CHECK(!model->stem[1]->is_training());
  CHECK(model->head[1]->is_training());
  CHECK(!model->stem[1]->as<td::nn::SyncBatchNorm>()->weight.requires_grad());
  CHECK(model->named_parameters().keys() == parameters.keys());
  CHECK(model->named_buffers().keys() == held.keys());
  for (const auto& item : parameters) CHECK(model->named_parameters()[item.key()].is_same(item.value()));
  for (const auto& item : held) CHECK(model->named_buffers()[item.key()].is_same(item.value()));
  CHECK(difference(weights(*model), state) == "");
  CHECK(same_bits(model->forward(x), want));
  model->train();
  CHECK(model->stem[1]->is_training());

  auto owner = net<torch::nn::BatchNorm1d>();
  torch::nn::Sequential outer(torch::nn::BatchNorm1d(6), owner);
  CHECK_SAYS(td::ConfigError, "'1.norm' is no child of a torch::nn::Sequential",
             td::nn::convert_sync_batch_norm(*outer, nobody));
  CHECK(outer[0]->as<torch::nn::BatchNorm1d>() != nullptr);  // nothing was changed
  CHECK_SAYS(td::ConfigError, "has no nn::SyncBatchNorm", td::nn::synchronize(*owner, nobody));
}
