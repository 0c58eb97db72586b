// SPDX-License-Identifier: Apache-2.0
// What surrounds the step: records, observers, evaluation and prediction, and parameters of every kind.
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/oracle.hpp"

using namespace treadle_test;  // NOLINT
using td::accumulation::AccumulateOver;
using td::averaging::ExponentialAverage;

namespace {
constexpr double lr = 1e-2;

/// The gradients that the last step left in the parameters, and the records of each step.
struct GradientKeeper {
  static constexpr bool wants_gradients = true;
  std::vector<std::pair<std::string, at::Tensor>>* parameters;
  std::vector<State>* kept;
  void on_step(const td::observe::StepEvent&) {
    State state;
    for (const auto& [name, tensor] : *parameters) state[name] = tensor.grad().clone();
    kept->push_back(state);
  }
};
}  // namespace

TEST_CASE("records are weighted by their counts over a window") {
  const auto batches = make_batches({8, 3, 5, 1});
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(AccumulateOver{.batches = 4})};
  std::int64_t correct = 0;
  double loss = 0;
  {
    const torch::NoGradGuard no_grad;
    for (const auto& batch : batches) {
      const auto logits = trainer.model().forward(batch.data);
      correct += (logits.argmax(1) == batch.target).sum().item<std::int64_t>();
      loss += torch::nn::functional::cross_entropy(
                  logits, batch.target, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
                  .item<double>();
    }
  }
  const auto done = trainer.step(batches);
  const auto* accuracy = done.records.find("accuracy");
  REQUIRE(accuracy != nullptr);
  CHECK(accuracy->count == 17);
  CHECK(accuracy->sum.item<std::int64_t>() == correct);
  CHECK(done.count == 17);
  CHECK(done.loss.item<double>() == doctest::Approx(loss / 17));
  CHECK(done.records.size() == 1);
  CHECK(trainer.step(batches).records.find("accuracy")->count == 17);  // the next window starts from nothing
}

TEST_CASE("observers that want gradients see true ones") {
  // Three ragged batches under a loss scale: unscaled and averaged, they are those of the whole.
  const auto batches = make_batches({8, 3, 5});
  const td::Batch whole{at::cat({batches[0].data, batches[1].data, batches[2].data}),
                        at::cat({batches[0].target, batches[1].target, batches[2].target})};
  std::vector<State> kept;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  const auto check = [&](auto policies, double clip_value, double tolerance) {
    kept.clear();
    parameters.clear();
    auto net = make<PlainNet>();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.5}, policies,
                        td::observers(GradientKeeper{&parameters, &kept})};
    for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value());
    trainer.fit(batches, {.epochs = 2});
    REQUIRE(kept.size() == 2);
    auto by_hand = make<PlainNet>();
    for (int step = 0; step < 2; ++step) {
      by_hand->zero_grad();
      torch::nn::functional::cross_entropy(by_hand->forward(whole.data), whole.target).backward();
      const torch::NoGradGuard no_grad;
      for (const auto& item : by_hand->named_parameters()) {
        auto gradient = item.value().grad();
        if (clip_value > 0) gradient.clamp_(-clip_value, clip_value);
        CHECK_MESSAGE(at::allclose(kept[static_cast<std::size_t>(step)].at(item.key()).to(at::kFloat), gradient,
                                   tolerance, tolerance),
                      item.key());
        item.value().sub_(gradient, 0.5);
      }
    }
  };
  const AccumulateOver three{.batches = 3};
  SUBCASE("Fp32") {
    check(td::policies(three), 0, 1e-5);
  }
  SUBCASE("Fp16 and ClipValue") {
    check(td::policies(three, td::precision::Fp16{.initial_scale = 1024}, td::clipping::ClipValue{.max_value = 0.05}),
          0.05, 5e-3);
  }
  SUBCASE("Bf16Weights") {
    check(td::policies(three, td::precision::Bf16Weights{}), 0, 2e-2);
  }
}

TEST_CASE("evaluation inside an open window changes nothing") {
  const auto batches = make_batches({8, 5, 8, 8, 4, 8});
  const auto test = make_batches({8, 3}, 500);
  const auto run = [&](auto policies, bool evaluates) {
    td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr}, policies};
    reseed(7);
    for (const auto& batch : batches) {
      trainer.accumulate(batch);
      if (!evaluates) continue;
      State gradients;
      for (const auto& p : trainer.parameters())
        if (p.model.grad().defined()) gradients[p.name] = p.model.grad().clone();
      const auto before = everything(trainer);
      const bool open = trainer.accumulation().open();
      trainer.evaluate(test);
      trainer.predict(test);
      trainer.evaluate(test, {.use_average = false});
      CHECK(difference(everything(trainer), before) == "");
      CHECK(trainer.accumulation().open() == open);
      CHECK(trainer.model().is_training());
      for (const auto& p : trainer.parameters())
        if (gradients.contains(p.name)) CHECK_MESSAGE(same_bits(p.model.grad(), gradients.at(p.name)), p.name);
    }
    auto state = everything(trainer);
    state["random"] = at::rand({4});
    state["random on the device"] = at::rand({4}, device());
    return state;
  };
  const auto check = [&](auto policies) { CHECK(difference(run(policies, true), run(policies, false)) == ""); };
  SUBCASE("Fp32") {
    check(td::policies(AccumulateOver{.batches = 3}, ExponentialAverage{.decay = 0.5}));
  }
  SUBCASE("Bf16") {
    check(td::policies(AccumulateOver{.batches = 3}, ExponentialAverage{.decay = 0.5}, td::precision::Bf16{},
                       td::nonfinite::Skip{}));
  }
  SUBCASE("Bf16Weights") {
    check(td::policies(AccumulateOver{.batches = 3}, ExponentialAverage{.decay = 0.5}, td::precision::Bf16Weights{}));
  }
}

namespace {
struct Armed {
  bool* armed;
  at::Tensor operator()(TinyNetImpl& net, const td::Batch& batch) const {
    if (*armed) throw std::runtime_error("the objective's own trouble");
    return torch::nn::functional::cross_entropy(net.forward(batch.data), batch.target);
  }
};
}  // namespace

TEST_CASE("evaluation puts modes, weights and generators back, also after a throw") {
  bool armed = false;
  auto net = make<TinyNet>();
  td::Trainer trainer{net, Armed{&armed}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(ExponentialAverage{.decay = 0.5})};
  const auto test = make_batches({8, 3}, 500);
  trainer.accumulate(test[0]);
  net->batch_norm->eval();  // frozen statistics, as in fine-tuning
  const auto check_modes = [&] {
    CHECK(net->is_training());
    CHECK(net->dropout->is_training());
    CHECK(!net->batch_norm->is_training());
  };
  auto before = everything(trainer);
  trainer.evaluate(test);
  check_modes();
  CHECK(difference(everything(trainer), before) == "");
  armed = true;
  reseed(3);
  CHECK_THROWS_AS(trainer.evaluate(test), std::runtime_error);
  check_modes();
  CHECK(difference(everything(trainer), before) == "");
  CHECK_THROWS_AS(trainer.predict(test,
                                  [](TinyNetImpl&, const td::Batch&) -> at::Tensor {
                                    at::rand({100});
                                    throw std::runtime_error("the forward's own trouble");
                                  }),
                  std::runtime_error);
  check_modes();
  CHECK(at::GradMode::is_enabled());
  const auto drawn = at::rand({3});
  reseed(3);
  CHECK(same_bits(drawn, at::rand({3})));
  armed = false;
  CHECK_THROWS_AS(trainer.evaluate(std::vector<td::Batch>{}), td::DataError);
  CHECK_THROWS_AS(trainer.predict(std::vector<td::Batch>{}), td::DataError);
  net->eval();  // a model that is not training stays so
  trainer.evaluate(test);
  CHECK(!net->is_training());
}

TEST_CASE("evaluation is the mean over rows in evaluation mode, with the average where there is one") {
  const auto batches = make_batches({8, 8, 8});
  const auto test = make_batches({8, 3, 0, 1}, 500);
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.1},
                      td::policies(ExponentialAverage{.decay = 0.9})};
  reseed(7);
  for (const auto& batch : batches) trainer.accumulate(batch);
  const auto by_hand = [&](const State& values) {
    auto net = make<TinyNet>();
    const torch::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters()) item.value().copy_(values.at(item.key()));
    const auto state = buffers(trainer.model());
    for (const auto& item : net->named_buffers()) item.value().copy_(state.at(item.key()));
    net->eval();
    double loss = 0;
    double correct = 0;
    std::vector<at::Tensor> outputs;
    for (const auto& batch : test) {
      outputs.push_back(net->forward(batch.data));
      if (batch.data.size(0) == 0) continue;
      loss += torch::nn::functional::cross_entropy(outputs.back(), batch.target).item<double>() *
              static_cast<double>(batch.data.size(0));
      correct += (outputs.back().argmax(1) == batch.target).sum().item<double>();
    }
    return std::tuple(loss / 12, correct / 12, at::cat(outputs));
  };
  const auto compare = [&](const td::EvaluateOptions& options, const State& values) {
    const auto metrics = trainer.evaluate(test, options);
    const auto [loss, accuracy, outputs] = by_hand(values);
    CHECK(metrics["loss"] == doctest::Approx(loss));
    CHECK(metrics["accuracy"] == doctest::Approx(accuracy));
    const auto predicted = trainer.predict(test, td::detail::ForwardData{}, options);
    CHECK(same_bits(predicted, outputs));  // in the loader's order
    return loss;
  };
  const double averaged = compare({}, state_of(trainer.averaging()));
  const double current = compare({.use_average = false}, weights(trainer.model()));
  CHECK(averaged != doctest::Approx(current));
}

namespace {
/// Uses its `rare` parameter only where a batch's first target is 4.
struct SometimesImpl : torch::nn::Module {
  SometimesImpl()
      : body(register_module("body", torch::nn::Linear(6, 5))),
        rare(register_parameter("rare", torch::full({5}, 0.5))),
        never(register_parameter("never", torch::full({2}, 0.25))) {}
  at::Tensor forward(const td::Batch& batch) {
    auto y = body(batch.data);
    return batch.target[0].item<std::int64_t>() == 4 ? y * rare : y;
  }
  torch::nn::Linear body;
  at::Tensor rare;
  at::Tensor never;
};
TORCH_MODULE(Sometimes);
struct SometimesLoss {
  td::Loss operator()(SometimesImpl& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch), batch.target);
  }
};
template <class Trainer>
std::map<std::string, int> steps_of(Trainer& trainer) {
  std::map<std::string, int> steps;
  for (const auto& [name, tensor] : state_of(trainer.rule()))
    if (name.starts_with("step/")) steps[name.substr(5)] = static_cast<int>(tensor.template item<float>());
  return steps;
}
}  // namespace

TEST_CASE("a parameter that is used only in some steps has a step count of its own") {
  std::vector<td::Batch> batches = make_batches(std::vector<std::int64_t>(8, 4));
  for (std::size_t i = 0; i < batches.size(); ++i) {
    batches[i].target = batches[i].target.clone();
    batches[i].target[0] = i == 2 || i == 3 || i == 6 ? 4 : 0;
  }
  batches[3] = poisoned(batches[3]);  // skipped for both
  const auto check = [&](auto rule, oracle::Recipe recipe) {
    td::Trainer trainer{make<Sometimes>(), SometimesLoss{}, rule, td::policies(td::nonfinite::Skip{})};
    const auto got = oracle::run(trainer, batches);
    recipe.nonfinite = oracle::NonFinite::Skip;
    oracle::Loop<Sometimes> loop(
        make<Sometimes>(), recipe,
        [](Sometimes& n, const td::Batch& b) { return torch::nn::functional::cross_entropy(n->forward(b), b.target); },
        [](const td::Batch& b) { return static_cast<double>(b.target.size(0)); });
    const auto want = oracle::run_windows(loop, batches, 1);
    oracle::check_same(got, want, weights(*make<Sometimes>()), want.size(), 0);
    CHECK(steps_of(trainer) == loop.steps_by_name());
    CHECK(steps_of(trainer).at("rare") == 2);
    CHECK(steps_of(trainer).at("body.weight") == 7);
    CHECK(!steps_of(trainer).contains("never"));
  };
  SUBCASE("AdamW") {
    check(td::optim::AdamW{.learning_rate = lr}, {.learning_rate = lr});
  }
  SUBCASE("SGD with dampening") {
    check(td::optim::Sgd{.learning_rate = lr, .momentum = 0.9, .dampening = 0.5},
          {.rule = oracle::Rule::Sgd, .learning_rate = lr, .weight_decay = 0, .momentum = 0.9, .dampening = 0.5});
  }
}

namespace {
struct SharedImpl : torch::nn::Module {
  explicit SharedImpl(const at::Tensor& w) : weight(register_parameter("weight", w)) {}
  at::Tensor weight;
};
/// Input and output layer share one weight, by two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    in = register_module("in", std::make_shared<SharedImpl>(torch::randn({6, 6}) / 3));
    out = register_module("out", std::make_shared<SharedImpl>(in->weight));
    head = register_module("head", torch::nn::Linear(6, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::tanh(torch::matmul(torch::tanh(torch::matmul(x, in->weight)), out->weight.t())));
  }
  std::shared_ptr<SharedImpl> in;
  std::shared_ptr<SharedImpl> out;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tied);
}  // namespace

TEST_CASE("tied weights are one parameter") {
  const auto batches = make_batches({8, 8, 8, 8});
  const auto check = [&](auto policies, oracle::Recipe recipe) {
    auto net = make<Tied>();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = lr}, policies};
    CHECK(trainer.parameters().size() == 3);
    const auto got = oracle::run(trainer, batches);
    recipe.learning_rate = lr;
    auto loop = oracle::classifier(make<Tied>(), recipe);
    const auto want = oracle::run_windows(loop, batches, 1);
    oracle::check_same(got, want, masters(trainer), 0, 1e-6);
    for (std::size_t i = 0; i < want.size(); ++i) CHECK(difference(got[i].weights, want[i].weights) == "");
    CHECK(net->in->weight.is_same(net->out->weight));
  };
  SUBCASE("Fp32") {
    check(td::policies(), {});
  }
  SUBCASE("Bf16Weights") {
    check(td::policies(td::precision::Bf16Weights{}), {.precision = oracle::Precision::Bf16Weights});
  }
}

TEST_CASE("frozen parameters stay as they are") {
  const auto batches = make_batches({8, 8, 8, 8});
  const auto frozen = [] {
    auto net = make<TinyNet>();
    net->second->weight.set_requires_grad(false);
    net->first->weight.set_requires_grad(false);
    return net;
  };
  const auto check = [&](auto policies, oracle::Recipe recipe) {
    auto net = frozen();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = lr}, policies};
    reseed(7);
    const auto got = oracle::run(trainer, batches);
    recipe.averages = true;
    recipe.learning_rate = lr;
    auto loop = oracle::classifier(frozen(), recipe);
    reseed(7);
    const auto want = oracle::run_windows(loop, batches, 1);
    oracle::check_same(got, want, weights(*frozen()), want.size(), 0);
    CHECK(!got.back().averages.contains("second.weight"));
    CHECK(got.back().averages.contains("second.bias"));
    CHECK(!net->second->weight.grad().defined());
  };
  SUBCASE("Fp32") {
    check(td::policies(ExponentialAverage{.decay = 0.9}), {});
  }
  SUBCASE("Bf16Weights") {
    check(td::policies(ExponentialAverage{.decay = 0.9}, td::precision::Bf16Weights{}),
          {.precision = oracle::Precision::Bf16Weights, .keep_fp32 = {"batch_norm.weight", "batch_norm.bias"}});
  }
}

TEST_CASE("named groups have rates and decays of their own") {
  const auto batches = make_batches({8, 8, 8, 8, 8});
  td::Trainer trainer{
      make<PlainNet>(), CrossEntropy{},
      td::optim::AdamW{.learning_rate = lr,
                       .weight_decay = 0.1,
                       .schedule = td::schedule::table(oracle::rate_table),
                       .groups = {{.pattern = "*.bias", .weight_decay = 0.0}, {.pattern = "last.*", .rate = 0.25}}}};
  const auto got = oracle::run(trainer, batches);
  // Each group by hand as a rule of its own over all parameters, of which its own are taken.
  const auto start = weights(*make<PlainNet>());
  auto net = make<PlainNet>();
  std::map<std::string, std::vector<at::Tensor>> moments;
  for (std::size_t t = 0; t < batches.size(); ++t) {
    net->zero_grad();
    torch::nn::functional::cross_entropy(net->forward(batches[t].data), batches[t].target).backward();
    const torch::NoGradGuard no_grad;
    for (const auto& item : net->named_parameters()) {
      const bool bias = item.key().ends_with("bias");
      const bool last = item.key() == "last.weight";
      auto& m = moments[item.key()];
      if (m.empty()) m = {torch::zeros_like(item.value()), torch::zeros_like(item.value())};
      const double rate = lr * oracle::rate_table[t] * (last ? 0.25 : 1.0);
      const double step = static_cast<double>(t) + 1;
      item.value().mul_(1 - rate * (bias ? 0.0 : 0.1));
      m[0].mul_(0.9).add_(item.value().grad(), 0.1);
      m[1].mul_(0.999).addcmul_(item.value().grad(), item.value().grad(), 0.001);
      const auto denominator = (m[1] / (1 - std::pow(0.999, step))).sqrt_().add_(1e-8);
      item.value().addcdiv_(m[0], denominator, -rate / (1 - std::pow(0.9, step)));
    }
    CHECK(distance(got[t].weights, weights(*net), start) < 1e-4);
  }
}

TEST_CASE("two trainers from one set of policies share nothing") {
  const auto policies =
      td::policies(td::precision::Fp16{.initial_scale = 1024, .growth_interval = 2}, AccumulateOver{.batches = 2},
                   td::clipping::ClipNorm{.max_norm = 0.5}, ExponentialAverage{.decay = 0.5});
  const td::optim::AdamW rule{.learning_rate = lr, .schedule = td::schedule::linear({.steps = 6})};
  const auto batches = make_batches(std::vector<std::int64_t>(8, 4));
  auto other = make_batches(std::vector<std::int64_t>(8, 4), 900);
  other[2] = poisoned(other[2]);
  td::Trainer alone{make<PlainNet>(1), CrossEntropy{}, rule, policies};
  for (const auto& batch : batches) alone.accumulate(batch);

  td::Trainer first{make<PlainNet>(1), CrossEntropy{}, rule, policies};
  td::Trainer second{make<PlainNet>(2), CrossEntropy{}, rule, policies};
  second.accumulate(other[7]);  // out of step: its windows are open where the first one's are closed
  for (std::size_t i = 0; i < batches.size(); ++i) {
    first.accumulate(batches[i]);
    second.accumulate(other[i]);
  }
  CHECK(difference(everything(first), everything(alone)) == "");
  CHECK(difference(state_of(first.precision()), state_of(alone.precision())) == "");
  CHECK(first.skipped_steps().item<std::int64_t>() == 0);
  CHECK(second.skipped_steps().item<std::int64_t>() == 1);
}

TEST_CASE("equal sets of policies are one type in any order, and empty ones take no space") {
  using td::Policies;
  namespace p = td::precision;
  static_assert(std::is_same_v<Policies<p::Bf16, AccumulateOver, td::clipping::ClipNorm>,
                               Policies<td::clipping::ClipNorm, p::Bf16, AccumulateOver>>);
  static_assert(std::is_same_v<Policies<>, Policies<p::Fp32, td::nonfinite::Ignore, td::execution::Eager>>);
  static_assert(std::is_same_v<Policies<p::Fp16>, Policies<td::nonfinite::Skip, p::Fp16>>);
  static_assert(!std::is_same_v<Policies<p::Fp16>, Policies<td::nonfinite::Ignore, p::Fp16>>);
  static_assert(std::is_same_v<decltype(td::policies(AccumulateOver{}, p::Bf16{})),
                               decltype(td::policies(p::Bf16{}, AccumulateOver{}))>);
  // SingleDevice holds the device it was given; nothing else adds a byte.
  constexpr auto base = sizeof(td::parallelism::SingleDevice);
  static_assert(base < sizeof(double));
  static_assert(sizeof(Policies<>) == base);
  static_assert(sizeof(Policies<p::Bf16>) == base);
  static_assert(sizeof(Policies<p::Tf32, td::nonfinite::Skip>) == base);
  static_assert(sizeof(Policies<td::clipping::ClipNorm>) <= sizeof(td::clipping::ClipNorm) * 2);
  static_assert(std::is_empty_v<p::Fp32::State> && std::is_empty_v<td::accumulation::NoAccumulation::State> &&
                std::is_empty_v<td::checkpointing::NoCheckpointing::State> &&
                std::is_empty_v<td::execution::Eager::State> && std::is_empty_v<td::clipping::NoClipping::State> &&
                std::is_empty_v<td::nonfinite::Ignore::State> && std::is_empty_v<td::averaging::NoAveraging::State>);
  using Plain = td::Trainer<PlainNetImpl, CrossEntropy, td::optim::Sgd>;
  using Tf32 = td::Trainer<PlainNetImpl, CrossEntropy, td::optim::Sgd, Policies<p::Tf32>>;
  CHECK(sizeof(Plain) == sizeof(Tf32));
}
