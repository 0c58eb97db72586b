// SPDX-License-Identifier: Apache-2.0
// What users bring: batches of their own, loaders of every kind, objectives and models that are not torch::nn.
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/oracle.hpp"

namespace user {

/// Points of several clouds in one tensor; cloud `i` is rows `offsets[i]` to `offsets[i + 1]`.
struct Clouds {
  at::Tensor points;
  std::vector<std::int64_t> offsets;
  at::Tensor labels;
  std::string source;
};

template <class B, class F>
requires std::same_as<std::remove_const_t<B>, Clouds>
void for_each_tensor(B& clouds, F&& f) {
  f(clouds.points);
  f(clouds.labels);
}
std::int64_t rows(const Clouds& clouds) {
  return static_cast<std::int64_t>(clouds.offsets.size()) - 1;
}
Clouds slice_rows(const Clouds& clouds, std::int64_t begin, std::int64_t end) {
  const auto first = clouds.offsets[static_cast<std::size_t>(begin)];
  Clouds part{clouds.points.slice(0, first, clouds.offsets[static_cast<std::size_t>(end)]),
              {},
              clouds.labels.slice(0, begin, end),
              clouds.source};
  for (auto i = begin; i <= end; ++i) part.offsets.push_back(clouds.offsets[static_cast<std::size_t>(i)] - first);
  return part;
}

/// The mean of each cloud's points is classified.
template <class Net>
at::Tensor logits(Net& net, const Clouds& clouds) {
  std::vector<at::Tensor> means;
  for (std::size_t i = 0; i + 1 < clouds.offsets.size(); ++i)
    means.push_back(clouds.points.slice(0, clouds.offsets[i], clouds.offsets[i + 1]).mean(0));
  return net.forward(torch::stack(means));
}

}  // namespace user

using namespace treadle_test;  // NOLINT

namespace {

constexpr double lr = 1e-2;

user::Clouds clouds(const std::vector<std::int64_t>& sizes, std::uint64_t seed) {
  user::Clouds batch;
  batch.offsets = {0};
  for (const auto size : sizes) batch.offsets.push_back(batch.offsets.back() + size);
  batch.points = make_batch(batch.offsets.back(), seed).data;
  batch.labels = make_batch(static_cast<std::int64_t>(sizes.size()), seed + 1).target;
  batch.source = "seed " + std::to_string(seed);
  return batch;
}
struct CloudLoss {
  at::Tensor operator()(PlainNetImpl& net, const user::Clouds& batch) const {
    return torch::nn::functional::cross_entropy(user::logits(net, batch), batch.labels);
  }
};

}  // namespace

TEST_CASE("a batch type with customization points of its own") {
  const std::vector<user::Clouds> batches{clouds({3, 1, 4, 1}, 1), clouds({5, 9, 2}, 3), clouds({6, 5}, 5),
                                          clouds({3, 5, 8, 9}, 7)};
  const auto check = [&](auto policies, std::size_t per_window) {
    td::Trainer trainer{make<PlainNet>(), CloudLoss{}, td::optim::AdamW{.learning_rate = lr}, policies};
    const auto got = oracle::run(trainer, batches);
    oracle::Loop<PlainNet, user::Clouds> loop(
        make<PlainNet>(), {.learning_rate = lr},
        [](PlainNet& n, const user::Clouds& b) {
          return torch::nn::functional::cross_entropy(user::logits(*n, b), b.labels);
        },
        [](const user::Clouds& b) { return static_cast<double>(b.labels.size(0)); });
    oracle::check_same(got, oracle::run_windows(loop, batches, per_window), weights(*make<PlainNet>()), 0, 1e-4);
  };
  SUBCASE("whole") {
    check(td::policies(), 1);
  }
  SUBCASE("in slices") {
    check(td::policies(td::accumulation::SplitBatch{.micro_batches = 3}), 1);
  }
  SUBCASE("in windows") {
    check(td::policies(td::accumulation::AccumulateOver{.batches = 2}), 2);
  }
}

namespace {
/// Counts up through a few batches and then ends, as a coroutine would.
struct Generator {
  std::int64_t count;
  struct iterator {
    std::int64_t i;
    td::Batch operator*() const { return make_batch(8, 100 + static_cast<std::uint64_t>(i)); }
    iterator& operator++() {
      ++i;
      return *this;
    }
    bool operator!=(const iterator& other) const { return i != other.i; }
  };
  iterator begin() const { return {0}; }
  iterator end() const { return {count}; }
};

struct RowsOfTensors : torch::data::Dataset<RowsOfTensors> {
  explicit RowsOfTensors(const std::vector<td::Batch>& batches) {
    std::vector<at::Tensor> d;
    std::vector<at::Tensor> t;
    for (const auto& batch : batches) {
      d.push_back(batch.data.cpu());
      t.push_back(batch.target.cpu());
    }
    data = at::cat(d);
    target = at::cat(t);
  }
  torch::data::Example<> get(std::size_t i) override {
    return {data[static_cast<std::int64_t>(i)], target[static_cast<std::int64_t>(i)]};
  }
  torch::optional<std::size_t> size() const override { return static_cast<std::size_t>(data.size(0)); }
  at::Tensor data;
  at::Tensor target;
};
/// For batches that have `data` and `target`, of whatever type.
struct AnyCrossEntropy {
  template <class Batch>
  td::Loss operator()(PlainNetImpl& net, const Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
at::Tensor plain_loss(PlainNetImpl& net, const td::Batch& batch) {
  return torch::nn::functional::cross_entropy(net.forward(batch.data), batch.target);
}
}  // namespace

TEST_CASE("a vector, a generator and a torch::data loader are loaders") {
  std::vector<td::Batch> batches;
  for (std::uint64_t i = 0; i < 6; ++i) batches.push_back(make_batch(8, 100 + i));
  auto loop = oracle::classifier(make<PlainNet>(), {.learning_rate = lr});
  for (int epoch = 0; epoch < 2; ++epoch) oracle::run_windows(loop, batches, 1);
  const auto want = weights(*loop.net());
  td::Trainer trainer{make<PlainNet>(), AnyCrossEntropy{}, td::optim::AdamW{.learning_rate = lr}};
  SUBCASE("vector") {
    CHECK(trainer.fit(batches, {.epochs = 2}).steps == 12);
  }
  SUBCASE("generator") {
    CHECK(trainer.fit(Generator{6}, {.epochs = 2}).steps == 12);
  }
  SUBCASE("torch::data, by its unique_ptr") {
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        RowsOfTensors(batches).map(torch::data::transforms::Stack<>()), torch::data::DataLoaderOptions(8));
    CHECK(trainer.fit(loader, {.epochs = 2}).steps == 12);
    const auto metrics = trainer.evaluate(*loader);
    CHECK(std::isfinite(metrics["loss"]));
  }
  CHECK(difference(weights(trainer.model()), want) == "");
}

TEST_CASE("a plain function as the objective") {
  const auto batches = make_batches({8, 5, 8});
  td::Trainer trainer{make<PlainNet>(), td::fn<plain_loss>{}, td::optim::AdamW{.learning_rate = lr}};
  const auto got = oracle::run(trainer, batches);
  auto loop = oracle::classifier(make<PlainNet>(), {.learning_rate = lr});
  const auto want = oracle::run_windows(loop, batches, 1);
  oracle::check_same(got, want, weights(*make<PlainNet>()), want.size(), 0);
}

namespace {
torch::jit::Module scripted() {
  reseed(5);
  torch::jit::Module part("Part");
  part.register_parameter("weight", torch::randn({6, 8}).mul_(0.4).to(device()).requires_grad_(true), false);
  part.register_buffer("calls", torch::zeros({}, device()));
  part.register_attribute("training", c10::BoolType::get(), true);
  part.define(R"(
    def forward(self, x):
        self.calls.add_(1)
        return torch.tanh(torch.dropout(x.matmul(self.weight), 0.25, self.training))
  )");
  torch::jit::Module net("Net");
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_module("part", part);
  net.register_parameter("head", torch::randn({8, 5}).mul_(0.4).to(device()).requires_grad_(true), false);
  net.define("def forward(self, x):\n    return self.part.forward(x).matmul(self.head)\n");
  return net;
}
struct ScriptedLoss {
  td::Loss operator()(torch::jit::Module& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward({batch.data}).toTensor(), batch.target);
  }
};
}  // namespace

TEST_CASE("a scripted module can be fine-tuned") {
  const auto batches = make_batches({8, 8, 8, 8});
  auto net = scripted();
  td::Trainer trainer{net, ScriptedLoss{}, td::optim::Sgd{.learning_rate = 0.125, .momentum = 0.5},
                      td::policies(td::nonfinite::Skip{})};
  CHECK(trainer.parameters().size() == 2);
  CHECK(trainer.buffers().size() == 1);
  reseed(7);
  trainer.accumulate(batches[0]);
  trainer.accumulate(poisoned(batches[1]));
  trainer.accumulate(batches[2]);

  auto by_hand = scripted();
  reseed(7);
  std::map<std::string, at::Tensor> momentum;
  for (int i = 0; i < 3; ++i) {
    auto loss = torch::nn::functional::cross_entropy(
        by_hand.forward({i == 1 ? poisoned(batches[1]).data : batches[static_cast<std::size_t>(i)].data}).toTensor(),
        batches[static_cast<std::size_t>(i)].target);
    if (i == 1) continue;  // drew its dropout, and is skipped
    loss.backward();
    const torch::NoGradGuard no_grad;
    for (const auto& item : by_hand.named_parameters()) {
      auto p = item.value;
      auto& buffer = momentum[item.name];
      buffer = buffer.defined() ? buffer * 0.5 + p.grad() : p.grad().clone();
      p.sub_(buffer, 0.125);
      p.mutable_grad().reset();
    }
  }
  for (const auto& item : by_hand.named_parameters())
    for (const auto& parameter : trainer.parameters())
      if (parameter.name == item.name)
        CHECK_MESSAGE(same_bits(parameter.model.detach(), item.value.detach()), item.name);
  CHECK(trainer.buffers()[0].tensor.item<float>() == 2);  // the skipped call's count was put back

  CHECK(net.is_training());
  const auto metrics = trainer.evaluate(batches);
  CHECK(std::isfinite(metrics["loss"]));
  CHECK(net.is_training());
  CHECK(net.attr("part").toModule().is_training());
}
