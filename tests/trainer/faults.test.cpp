// SPDX-License-Identifier: Apache-2.0
// Faults that were found in use, each with the smallest scene that showed it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <new>
#include <sstream>
#include <vector>

#include <treadle/treadle.hpp>

#include "support/doctest.hpp"

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

namespace {

/// Batches of unknown number that are all one batch, refilled in place, as a loader with a fixed buffer gives them.
class Refilled {
 public:
  explicit Refilled(const std::vector<td::Batch>& source) : source_(&source), here_{source[0].data.clone(), {}} {}
  class Iterator {
   public:
    Iterator(Refilled* owner, std::size_t i) : owner_(owner), i_(i) {}
    const td::Batch& operator*() const { return owner_->here_; }
    Iterator& operator++() { return ++i_, fill(), *this; }
    bool operator!=(const Iterator& other) const { return i_ != other.i_; }

    void fill() {
      if (i_ >= owner_->source_->size()) {
        owner_->here_.data.fill_(std::nan(""));  // what it held is gone
        return;
      }
      owner_->here_.data.copy_((*owner_->source_)[i_].data);
      owner_->here_.target = (*owner_->source_)[i_].target;
    }

   private:
    Refilled* owner_;
    std::size_t i_;
  };
  Iterator begin() {
    Iterator first(this, 0);
    first.fill();
    return first;
  }
  Iterator end() { return {this, source_->size()}; }

 private:
  const std::vector<td::Batch>* source_;
  td::Batch here_;
};

/// Notes the epochs that it is told.
struct Reseeded : std::vector<td::Batch> {
  using std::vector<td::Batch>::vector;
  void set_epoch(std::int64_t epoch) { epochs.push_back(epoch); }
  std::vector<std::int64_t> epochs{};
};

struct NormNet : torch::nn::Module {
  NormNet()
      : norm(register_module("norm", torch::nn::BatchNorm1d(4))), fc(register_module("fc", torch::nn::Linear(4, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear fc{nullptr};
};

}  // namespace

TEST_CASE("a loader may refill one batch in place, whatever the window") {
  const auto source = batches(5);
  const auto train = [&](auto&& feed) {
    torch::manual_seed(3);
    auto net = std::make_shared<Net>();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.1},
                        td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 3})};
    feed(trainer);
    CHECK(trainer.steps() == 2);
    return net->fc->weight.detach().clone();
  };
  const auto want = train([&](auto& trainer) { trainer.fit(source, {.epochs = 1}); });
  CHECK(at::isfinite(want).all().item<bool>());
  CHECK(want.equal(train([&](auto& trainer) { trainer.fit(Refilled(source), {.epochs = 1}); })));
  CHECK(want.equal(train([&](auto& trainer) { trainer.step(Refilled(source)); })));
  CHECK(want.equal(train([&](auto& trainer) { trainer.step(source); })));
}

TEST_CASE("a loop of fits goes on to the next epoch's order") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu)};
  Reseeded loader;
  for (auto& batch : batches()) loader.push_back(batch);
  trainer.fit(loader, {.epochs = 2});
  trainer.fit(loader, {.epochs = 1});
  trainer.fit(loader, {.epochs = 1});
  CHECK(loader.epochs == std::vector<std::int64_t>{0, 1, 2, 3});
}

TEST_CASE("a short second fit may follow where the warm-up is over") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.schedule = td::schedule::constant({.warmup = 5})},
                      td::policies(on_cpu)};
  CHECK_THROWS_AS(trainer.fit(batches(), {.epochs = 1}), td::ConfigError);
  trainer.fit(batches(), {.epochs = 2});
  CHECK(trainer.fit(batches(), {.epochs = 1}).steps == 4);
}

TEST_CASE("a parameter may be unfrozen later only where nothing was made for those that train") {
  const auto unfreeze = [](auto policies) {
    Net net;
    net.fc->bias.set_requires_grad(false);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.1}, policies};
    trainer.accumulate(batches()[0]);
    const auto before = net.fc->bias.detach().clone();
    net.fc->bias.set_requires_grad(true);
    trainer.check();
    trainer.accumulate(batches()[0]);
    return !before.equal(net.fc->bias.detach());
  };
  CHECK(unfreeze(td::policies(on_cpu)));
  CHECK_THROWS_WITH_AS(unfreeze(td::policies(on_cpu, td::averaging::ExponentialAverage{})),
                       doctest::Contains("parameter 'fc.bias' was frozen when the trainer was made"), td::ConfigError);
  CHECK_THROWS_AS(unfreeze(td::policies(on_cpu, td::precision::Bf16Weights{})), td::ConfigError);
}

TEST_CASE("two trainers of one model that skip both put its buffers back") {
  NormNet net;
  const auto loss = [](NormNet& n, const td::Batch& b) { return td::mean_loss(n.forward(b.data), b.target); };
  const auto policies = td::policies(on_cpu, td::nonfinite::Skip{});
  td::Trainer first{net, loss, td::optim::AdamW{}, policies};
  td::Trainer second{net, loss, td::optim::AdamW{}, policies};
  auto bad = batches()[0];
  bad.data[0][0] = std::nan("");
  const auto skips = [&](auto& trainer) {
    trainer.accumulate(batches()[1]);
    const auto mean = net.norm->running_mean.clone();
    const auto seen = net.norm->num_batches_tracked.clone();
    const auto done = trainer.accumulate(bad);
    return done->skipped.template item<float>() == 1 && mean.equal(net.norm->running_mean) &&
           seen.equal(net.norm->num_batches_tracked);
  };
  for (int i = 0; i < 2; ++i) {
    CHECK(skips(first));
    CHECK(skips(second));
  }
  CHECK(net.norm->num_batches_tracked.item<std::int64_t>() == 4);
}

TEST_CASE("a model that was loaded after its trainer was made is refused at the next window") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu)};
  trainer.accumulate(batches()[0]);
  Net other;
  std::stringstream file;
  {
    torch::serialize::OutputArchive out;
    other.save(out);
    out.save_to(file);
  }
  torch::serialize::InputArchive in;
  in.load_from(file);
  net.load(in);
  CHECK(net.fc->weight.equal(other.fc->weight));
  CHECK_THROWS_WITH_AS(trainer.accumulate(batches()[0]), doctest::Contains("given other memory"), td::ConfigError);
}

namespace {

struct Scaled : torch::nn::Module {
  Scaled() : fc(register_module("fc", torch::nn::Linear(4, 3))), s(register_parameter("s", torch::zeros({1}))) {}
  torch::nn::Linear fc{nullptr};
  at::Tensor s;
};

}  // namespace

TEST_CASE("a parameter of one element that is added to the loss does not get the trainer's own seed for a gradient") {
  const auto loss = [](Scaled& n, const td::Batch& b) {
    return td::mean_loss(n.fc(b.data), b.target).value + n.s.squeeze();
  };
  const auto data = batches(16);
  const auto run = [&](auto policies, double rate) {
    torch::manual_seed(5);
    Scaled net;
    td::Trainer trainer{net, loss, td::optim::Sgd{.learning_rate = rate}, policies};
    for (const auto& batch : data) trainer.accumulate(batch);
    return net.s.item<double>();
  };
  CHECK(run(td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 4}), 0.01) ==
        doctest::Approx(-0.04).epsilon(1e-5));
  CHECK(run(td::policies(on_cpu), 0.01) == doctest::Approx(-0.16).epsilon(1e-5));
  CHECK(run(td::policies(on_cpu, td::accumulation::SplitBatch{.micro_batches = 2}), 0.01) ==
        doctest::Approx(-0.16).epsilon(1e-5));
  Scaled net;
  td::Trainer half{net, loss, td::optim::Sgd{.learning_rate = 0.01},
                   td::policies(on_cpu, td::precision::Fp16{.initial_scale = 256})};
  half.accumulate(data[0]);
  half.accumulate(data[1]);
  CHECK(half.precision().loss_scale().item<float>() == 256);
}

TEST_CASE("a parameter with gaps in its memory is refused") {
  struct Sliced : torch::nn::Module {
    Sliced() : w(register_parameter("w", torch::zeros({4, 8}).slice(1, 0, 8, 2))) {}
    at::Tensor w;
  };
  Sliced net;
  const auto loss = [](Sliced& n, const td::Batch& b) { return n.w.sum() * b.data.sum(); };
  const auto make = [&] { td::Trainer trainer{net, loss, td::optim::Sgd{}, td::policies(on_cpu)}; };
  CHECK_THROWS_WITH_AS(make(), doctest::Contains("parameter 'w' is a view with gaps"), td::ConfigError);
}

TEST_CASE("gradients of other backward passes are not added to a step") {
  const auto data = batches(3);
  const auto run = [&](bool strays) {
    torch::manual_seed(5);
    Net net;
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.1}, td::policies(on_cpu)};
    for (const auto& batch : data) {
      if (strays) net.forward(batch.data).square().sum().backward();
      trainer.accumulate(batch);
    }
    return net.fc->weight.detach().clone();
  };
  CHECK(run(true).equal(run(false)));
}

TEST_CASE("a recorded parameter is the value of its step") {
  Scaled net;
  const auto loss = [](Scaled& n, const td::Batch& b, auto& step) {
    step.record("s", n.s, 1);
    step.record("detached", n.s.detach().squeeze(), 1);
    return td::mean_loss(n.fc(b.data), b.target).value + n.s.sum() * 2;
  };
  td::Trainer trainer{net, loss, td::optim::Sgd{.learning_rate = 0.5}, td::policies(on_cpu)};
  const auto done = trainer.accumulate(batches()[0]);
  CHECK(net.s.item<float>() == -1);
  CHECK(done->records.find("s")->sum.item<float>() == 0);
  CHECK(done->records.find("detached")->sum.item<float>() == 0);
}

TEST_CASE("counts on the device are added up in a dtype that holds them") {
  for (const auto dtype : {at::kBool, at::kByte, at::kBFloat16}) {
    Net net;
    const auto loss = [dtype](Net& n, const td::Batch& b) {
      const auto each = torch::nn::functional::cross_entropy(
          n.forward(b.data), b.target, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      return td::Loss(each * (dtype == at::kBool ? 0.125 : 25.0), torch::full({}, dtype == at::kBool ? 1 : 200, dtype));
    };
    td::Trainer trainer{net, loss, td::optim::Sgd{.learning_rate = 0},
                        td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 4})};
    const td::Batch batch = batches()[0];
    std::optional<td::StepResult> done;
    for (int i = 0; i < 4; ++i) done = trainer.accumulate(batch);
    const double want = torch::nn::functional::cross_entropy(net.forward(batch.data), batch.target).item<double>();
    CHECK(done->loss.item<double>() == doctest::Approx(want).epsilon(1e-3));
  }
}

TEST_CASE("rows are those of the first tensor that is there") {
  struct Masked {
    at::Tensor mask, x;
  };
  CHECK(td::rows(Masked{{}, torch::ones({5, 2})}) == 5);
}

TEST_CASE("any tensor of a model that was given other memory is noticed before long") {
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu)};
  trainer.accumulate(batches()[0]);
  net.fc->bias.set_data(net.fc->bias.detach().clone());
  const auto go_on = [&] {
    for (int i = 0; i < 65; ++i) trainer.accumulate(batches()[0]);
  };
  CHECK_THROWS_WITH_AS(go_on(), doctest::Contains("parameter 'fc.bias' was given other memory"), td::ConfigError);
}

TEST_CASE("buffers that share memory stay together under Skip") {
  struct Shared : torch::nn::Module {
    Shared()
        : fc(register_module("fc", torch::nn::Linear(4, 3))),
          stats(register_buffer("stats", torch::zeros({4}))),
          head(register_buffer("head", stats.narrow(0, 0, 2))) {}
    torch::nn::Linear fc{nullptr};
    at::Tensor stats, head;
  };
  Shared net;
  const auto loss = [](Shared& n, const td::Batch& b) {
    n.stats.add_(1);
    return td::mean_loss(n.fc(b.data), b.target);
  };
  td::Trainer trainer{net, loss, td::optim::Sgd{}, td::policies(on_cpu, td::nonfinite::Skip{})};
  trainer.accumulate(batches()[0]);
  CHECK(net.head.equal(torch::ones({2})));
  auto bad = batches()[0];
  bad.data[0][0] = std::nan("");
  trainer.accumulate(bad);
  CHECK(net.head.equal(torch::ones({2})));
  CHECK(net.stats.equal(torch::ones({4})));
}

TEST_CASE("an update that throws is not counted as a step") {
  struct Changing : torch::nn::Module {
    Changing() : table(register_parameter("table", torch::randn({5, 3}))) {}
    at::Tensor table;
    bool sparse = false;
  };
  Changing net;
  const auto loss = [](Changing& n, const td::Batch& b) {
    return td::mean_loss(torch::embedding(n.table, b.data, -1, false, n.sparse), b.target);
  };
  td::Trainer trainer{net, loss, td::optim::AdamW{}, td::policies(on_cpu)};
  const td::Batch batch{torch::randint(0, 5, {6}), torch::randint(0, 3, {6})};
  trainer.accumulate(batch);
  net.sparse = true;
  CHECK_THROWS_WITH_AS(trainer.accumulate(batch), doctest::Contains("'table' has a sparse gradient"), td::ConfigError);
  double steps = 0;
  trainer.rule().for_each_state([&](const auto& name, at::Tensor& tensor) {
    if (std::string(name) == "step/table") steps = tensor.item<double>();
  });
  CHECK(steps == 1);
}

TEST_CASE("a long window's loss keeps its digits in bfloat16") {
  Net net;
  const auto loss = [](Net& n, const td::Batch& b) { return td::mean_loss(n.forward(b.data), b.target); };
  td::Trainer trainer{
      net, loss, td::optim::Sgd{.learning_rate = 0},
      td::policies(on_cpu, td::precision::Bf16Weights{}, td::accumulation::AccumulateOver{.batches = 512})};
  const td::Batch batch = batches()[0];
  std::optional<td::StepResult> done;
  for (int i = 0; i < 512; ++i) done = trainer.accumulate(batch);
  const double want = trainer.evaluate(std::vector<td::Batch>{batch})["loss"];
  CHECK(done->loss.item<double>() == doctest::Approx(want).epsilon(1e-4));
}

TEST_CASE("a loader that throws leaves no open window, and its batches no trace in the buffers") {
  NormNet net;
  const auto loss = [](NormNet& n, const td::Batch& b) { return td::mean_loss(n.forward(b.data), b.target); };
  td::Trainer trainer{net, loss, td::optim::Sgd{.learning_rate = 0.1},
                      td::policies(on_cpu, td::nonfinite::Skip{}, td::accumulation::AccumulateOver{.batches = 4})};
  auto data = batches(3);
  data[2].target = data[2].target.narrow(0, 0, 5);  // fewer than its data
  const auto mean = net.norm->running_mean.clone();
  CHECK_THROWS_AS(trainer.fit(data, {.epochs = 1}), td::DataError);
  CHECK(mean.equal(net.norm->running_mean));
  CHECK_FALSE(trainer.flush());
}

TEST_CASE("an epoch that makes no step is refused instead of gone through for ever") {
  Net net;
  td::Trainer trainer{
      net, CrossEntropy{}, td::optim::AdamW{},
      td::policies(on_cpu, td::accumulation::AccumulateOver{.batches = 8, .tail = td::accumulation::Tail::Drop})};
  const auto data = batches(5);
  CHECK_THROWS_WITH_AS(trainer.fit(data, {.epochs = 0, .max_steps = 100}), doctest::Contains("makes no step"),
                       td::DataError);
}

TEST_CASE("a model that Bf16Weights has rounded can be trained by another trainer") {
  const auto data = batches();
  Net net;
  {
    td::Trainer first{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu, td::precision::Bf16Weights{})};
    first.accumulate(data[0]);
  }
  const auto by_hand = [&] {
    auto weight = net.fc->weight.detach().clone().requires_grad_();
    auto bias = net.fc->bias.detach().clone().requires_grad_();
    const auto logits = torch::addmm(bias, data[1].data.to(torch::kBFloat16), weight.t());
    torch::nn::functional::cross_entropy(logits, data[1].target).to(torch::kFloat).backward();
    return weight.detach().to(torch::kFloat) - 0.5 * weight.grad().to(torch::kFloat);
  }();
  td::Trainer second{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.5},
                     td::policies(on_cpu, td::precision::Bf16Weights{})};
  for (const auto& p : second.parameters()) {
    CHECK((p.master.scalar_type() == torch::kFloat));
    CHECK(p.master.equal(p.model.detach().to(torch::kFloat)));
  }
  second.accumulate(data[1]);
  CHECK(second.parameters()[0].master.equal(by_hand));
  CHECK(net.fc->weight.detach().equal(by_hand.to(torch::kBFloat16)));

  td::Trainer windowed{
      net, CrossEntropy{}, td::optim::AdamW{},
      td::policies(on_cpu, td::precision::Bf16Weights{}, td::clipping::ClipNorm{.max_norm = 1},
                   td::averaging::ExponentialAverage{}, td::accumulation::AccumulateOver{.batches = 2})};
  CHECK(at::isfinite(windowed.step(data).loss).item<bool>());
  CHECK(windowed.steps() == 2);
}

TEST_CASE("Bf16Weights asks for what it can keep") {
  const auto make = [](at::ScalarType dtype, td::precision::Bf16Weights precision) {
    Net net;
    net.to(dtype);
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}, td::policies(on_cpu, precision)};
  };
  CHECK_THROWS_WITH_AS(make(torch::kBFloat16, {.keep_fp32 = {"*.bias"}}),
                       doctest::Contains("keep_fp32 names parameter 'fc.bias', which is bfloat16 already"),
                       td::ConfigError);
  CHECK_THROWS_WITH_AS(make(torch::kHalf, {}), doctest::Contains("parameter 'fc.weight' is float16"), td::ConfigError);
}

namespace {

/// The CPU's memory, which has run out for blocks of `refused` bytes.
struct Scarce : c10::Allocator {
  explicit Scarce(std::size_t refused) : refused(refused), real(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  Scarce(const Scarce&) = delete;
  Scarce& operator=(const Scarce&) = delete;
  ~Scarce() override { c10::SetCPUAllocator(real); }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == refused) throw std::bad_alloc();
    return real->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { real->copy_data(to, from, bytes); }
  std::size_t refused;
  c10::Allocator* real;
};

}  // namespace

TEST_CASE("an evaluation that finds no memory for the averages leaves the next one as it should be") {
  const auto data = batches();
  const td::averaging::ExponentialAverage half{.decay = 0.5};
  Net net;
  td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 1.0}, td::policies(on_cpu, half)};
  trainer.fit(data);
  const auto averaged = trainer.evaluate(data)["loss"];
  const auto before = net.fc->weight.detach().clone();
  CHECK(averaged != trainer.evaluate(data, {.use_average = false})["loss"]);
  {
    const Scarce memory(3 * sizeof(float));  // what the copy of the bias takes
    CHECK_THROWS_AS(trainer.evaluate(data), std::bad_alloc);
  }
  CHECK(net.fc->weight.detach().equal(before));
  CHECK(trainer.evaluate(data)["loss"] == averaged);
  CHECK(net.fc->weight.detach().equal(before));
}
