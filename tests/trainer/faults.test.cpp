// SPDX-License-Identifier: Apache-2.0
// Faults that were found in use, each with the smallest scene that showed it.
#include <doctest/doctest.h>
#include <torch/torch.h>

#include <treadle/treadle.hpp>

// LibTorch has a CHECK of its own, which ends the program.
#undef CHECK
#define CHECK DOCTEST_CHECK

namespace td = treadle;

namespace {

struct Net : torch::nn::Module {
  Net() : fc(register_module("fc", torch::nn::Linear(4, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};

std::vector<td::Batch> batches(int count = 4) {
  torch::manual_seed(1);
  std::vector<td::Batch> all;
  for (int i = 0; i < count; ++i) all.push_back({torch::randn({8, 4}), torch::randint(0, 3, {8})});
  return all;
}

struct CrossEntropy {
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

/// Looks at gradients and keeps one.
struct Keeper {
  static constexpr bool wants_gradients = true;
  void on_step(const td::observe::StepEvent& event) {
    if (event.step == 2) kept = net->fc->weight.grad();
  }
  Net* net;
  at::Tensor kept{};
};

const auto on_cpu = td::parallelism::SingleDevice{.device = at::Device(at::kCPU)};

}  // namespace

TEST_CASE("a gradient that no rule takes stops one step, not all that follow") {
  struct Sparse : torch::nn::Module {
    Sparse()
        : table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)))),
          fc(register_module("fc", torch::nn::Linear(4, 3))) {}
    torch::nn::Embedding table;
    torch::nn::Linear fc;
  };
  Sparse net;
  const auto loss = [](Sparse& n, const td::Batch& batch) {
    return td::mean_loss(n.fc(n.table(batch.data)), batch.target);
  };
  td::Trainer trainer{net, loss, td::optim::AdamW{}, td::policies(on_cpu)};
  const td::Batch batch{torch::randint(0, 5, {6}), torch::randint(0, 3, {6})};
  CHECK_THROWS_AS(trainer.accumulate(batch), td::ConfigError);
  net.table->weight.set_requires_grad(false);
  const auto before = net.fc->weight.detach().clone();
  trainer.accumulate(batch);
  CHECK(!net.fc->weight.detach().equal(before));
}

TEST_CASE("gradients that an observer looked at are let go") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu),
                      td::observers(Keeper{.net = &net})};
  trainer.fit(batches(), {.epochs = 2});
  CHECK(trainer.observers().get<Keeper>().kept.use_count() == 1);
}

TEST_CASE("an evaluation within a prediction leaves the weights as they were") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.1},
                      td::policies(on_cpu, td::averaging::ExponentialAverage{.decay = 0.5})};
  const auto data = batches();
  trainer.fit(data);
  const auto before = net.fc->weight.detach().clone();
  trainer.predict(data, [&](Net& n, const td::Batch& batch) {
    trainer.evaluate(data);
    return n.forward(batch.data);
  });
  CHECK(net.fc->weight.detach().equal(before));
}

TEST_CASE("a mean over nothing counts nothing, in a window and in an evaluation") {
  const auto masked = [](Net& n, const td::Batch& batch) {
    const auto rows = batch.data.select(1, 0).gt(0).nonzero().flatten();
    const auto logits = n.forward(batch.data).index_select(0, rows);
    return td::Loss::mean(at::cross_entropy_loss(logits, batch.target.index_select(0, rows)), rows.numel());
  };
  auto data = batches(2);
  data[1].data.select(1, 0).fill_(-1);
  Net net;
  td::Trainer trainer{net, masked, td::optim::AdamW{},
                      td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 2})};
  trainer.accumulate(data[0]);
  const auto done = trainer.accumulate(data[1]);
  CHECK(std::isfinite(done->loss.item<double>()));
  CHECK(at::isfinite(net.fc->weight).all().item<bool>());
  CHECK(std::isfinite(trainer.evaluate(data)["loss"]));
}

TEST_CASE("recorded truth values are added, not or-ed") {
  const auto objective = [](Net& n, const td::Batch& batch, auto& step) {
    step.record("hit", torch::ones({}, torch::kBool), 1);
    return td::mean_loss(n.forward(batch.data), batch.target);
  };
  Net net;
  td::Trainer trainer{net, objective, td::optim::AdamW{},
                      td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 4})};
  const auto result = trainer.fit(batches());
  CHECK(result.history.back().train["hit"] == 1.0);
}

TEST_CASE("an epoch of skipped steps is nothing to stop early for") {
  auto data = batches();
  for (auto& batch : data) batch.data.fill_(std::numeric_limits<float>::quiet_NaN());
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu, td::nonfinite::Skip{})};
  CHECK(trainer.fit(data, {.epochs = 3, .early_stop = td::EarlyStop{}}).skipped == 12);
}
