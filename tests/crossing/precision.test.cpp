// SPDX-License-Identifier: Apache-2.0
// Precisions: process-wide switches put back, the loss scale's course, and what Bf16Weights keeps in fp32.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "treadle/precision/loss_scale.hpp"

using namespace treadle_test;  // NOLINT
namespace precision = td::precision;
using td::accumulation::AccumulateOver;

namespace {

constexpr double lr = 1e-2;

struct Switches {
  bool matmul = at::globalContext().allowTF32CuBLAS();
  bool cudnn = at::globalContext().allowTF32CuDNN();
  bool autocast = at::autocast::is_autocast_enabled(device().type());
  at::ScalarType dtype = at::autocast::get_autocast_dtype(device().type());
  bool cache = at::autocast::is_autocast_cache_enabled();
  bool operator==(const Switches&) const = default;
};

/// Notes the switches that are on while the objective runs.
struct Watching {
  std::vector<Switches>* seen;
  bool* armed;
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    seen->emplace_back();
    const auto logits = net.forward(batch.data);
    if (*armed) throw std::runtime_error("the objective's own trouble");
    return td::mean_loss(logits, batch.target);
  }
};

template <class Policy>
double run_against_oracle(Policy policy, oracle::Recipe recipe, const std::vector<td::Batch>& batches, int n,
                          std::size_t exact) {
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(policy, AccumulateOver{.batches = n})};
  reseed(7);
  const auto got = oracle::run(trainer, batches);
  recipe.learning_rate = lr;
  auto loop = oracle::classifier(make<TinyNet>(), recipe);
  reseed(7);
  const auto want = oracle::run_windows(loop, batches, static_cast<std::size_t>(n));
  const auto start = weights(*make<TinyNet>());
  oracle::check_same(got, want, start, exact, 2e-2);
  return distance(got.back().weights, want.back().weights, start);
}

const std::set<std::string> batch_norm{"batch_norm.weight", "batch_norm.bias"};

}  // namespace

TEST_CASE("two alternating trainers with different flags, which are put back each time") {
  bool armed = false;
  std::vector<Switches> in_fp32;
  std::vector<Switches> in_tf32;
  std::vector<Switches> in_bf16;
  td::Trainer fp32{make<PlainNet>(), Watching{&in_fp32, &armed}, td::optim::AdamW{}, td::policies(precision::Fp32{})};
  td::Trainer tf32{make<PlainNet>(), Watching{&in_tf32, &armed}, td::optim::AdamW{}, td::policies(precision::Tf32{})};
  td::Trainer bf16{make<PlainNet>(), Watching{&in_bf16, &armed}, td::optim::AdamW{}, td::policies(precision::Bf16{})};
  const auto batch = make_batch(4, 1);
  const std::vector<td::Batch> loader{batch};
  for (const bool matmul : {false, true})
    for (const bool cudnn : {false, true}) {
      at::globalContext().setAllowTF32CuBLAS(matmul);
      at::globalContext().setAllowTF32CuDNN(cudnn);
      const Switches outside;
      for (int i = 0; i < 2; ++i) {
        fp32.accumulate(batch);
        CHECK(Switches{} == outside);
        tf32.accumulate(batch);
        CHECK(Switches{} == outside);
        bf16.accumulate(batch);
        CHECK(Switches{} == outside);
        tf32.evaluate(loader);
        fp32.evaluate(loader);
        bf16.evaluate(loader);
        CHECK(Switches{} == outside);
      }
      armed = true;
      CHECK_THROWS_AS(tf32.accumulate(batch), std::runtime_error);
      CHECK(Switches{} == outside);
      CHECK_THROWS_AS(fp32.evaluate(loader), std::runtime_error);
      CHECK(Switches{} == outside);
      CHECK_THROWS_AS(bf16.accumulate(batch), std::runtime_error);
      CHECK(Switches{} == outside);
      armed = false;
    }
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(true);
  for (const auto& s : in_fp32) CHECK((!s.matmul && !s.cudnn && !s.autocast));
  for (const auto& s : in_tf32) CHECK((s.matmul && s.cudnn && !s.autocast));
  for (const auto& s : in_bf16) CHECK((!s.matmul && !s.cudnn && s.autocast && s.dtype == at::kBFloat16));
  CHECK(in_fp32.size() == in_tf32.size());
}

TEST_CASE("a program's own newer switches survive a step") {
  auto& context = at::globalContext();
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::TF32);
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}};
  trainer.accumulate(make_batch(4, 1));
  CHECK((context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32));
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::NONE);
  context.setAllowTF32CuBLAS(false);
}

TEST_CASE("each precision against the hand-written loop, with and without windows of 4") {
  const auto equal = make_batches(std::vector<std::int64_t>(16, 8));
  const auto ragged = make_batches({8, 5, 2, 7, 3, 8, 8, 4, 6, 2, 4, 9});
  SUBCASE("Fp32") {
    run_against_oracle(precision::Fp32{}, {}, equal, 1, 16);
    run_against_oracle(precision::Fp32{}, {}, equal, 4, 4);
  }
  SUBCASE("Tf32") {
    run_against_oracle(precision::Tf32{}, {.precision = oracle::Precision::Tf32}, equal, 1, 16);
    run_against_oracle(precision::Tf32{}, {.precision = oracle::Precision::Tf32}, equal, 4, 4);
  }
  SUBCASE("Bf16") {
    run_against_oracle(precision::Bf16{}, {.precision = oracle::Precision::Bf16}, equal, 1, 16);
    run_against_oracle(precision::Bf16{}, {.precision = oracle::Precision::Bf16}, equal, 4, 4);
    run_against_oracle(precision::Bf16{}, {.precision = oracle::Precision::Bf16, .eps = 1e-8}, ragged, 4, 0);
  }
  SUBCASE("Fp16") {
    const precision::Fp16 policy{.initial_scale = 1024, .growth_interval = 3};
    run_against_oracle(policy, {.precision = oracle::Precision::Fp16, .nonfinite = oracle::NonFinite::Skip}, equal, 1,
                       16);
    run_against_oracle(policy, {.precision = oracle::Precision::Fp16, .nonfinite = oracle::NonFinite::Skip}, ragged, 4,
                       0);
  }
  SUBCASE("Bf16Weights") {
    const oracle::Recipe recipe{.precision = oracle::Precision::Bf16Weights, .keep_fp32 = batch_norm};
    run_against_oracle(precision::Bf16Weights{}, recipe, equal, 1, 16);
    run_against_oracle(precision::Bf16Weights{}, recipe, equal, 4, 4);
    run_against_oracle(precision::Bf16Weights{}, recipe, ragged, 4, 0);
  }
}

TEST_CASE("the loss scale moves as its rule in plain numbers says") {
  const auto good = make_batch(4, 1);
  const auto bad = poisoned(good);
  // Grows after 3 good steps in a row, exactly then; one bad step starts the count again.
  const std::vector<bool> course{true,  true,  true,  true,  true,  false, true, true, true, true,
                                 false, false, false, false, false, false, true, true, true, true};
  const precision::Fp16 policy{
      .initial_scale = 256, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3, .minimum_scale = 2};
  precision::LossScale rule{
      .scale = 256, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3, .minimum_scale = 2};
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}, td::policies(policy)};
  std::vector<double> by_hand{256, 256, 1024, 1024, 1024, 256, 256, 256, 1024, 1024, 256, 64, 16, 4, 2, 2, 2, 2, 8, 8};
  for (std::size_t i = 0; i < course.size(); ++i) {
    CAPTURE(i);
    const auto done = trainer.accumulate(course[i] ? good : bad);
    rule.update(!course[i]);
    CHECK((done->skipped.item<float>() != 0) == !course[i]);
    CHECK(trainer.precision().loss_scale().item<float>() == rule.scale);
    CHECK(rule.scale == by_hand[i]);
    CHECK(state_of(trainer.precision()).at("growth_tracker").item<std::int32_t>() == rule.good_steps);
  }
}

TEST_CASE("an fp16 gradient that overflows is skipped and the scale backs off until it fits") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(precision::Fp16{.initial_scale = 16777216.0, .growth_interval = 1000})};
  const auto start = weights(trainer.model());
  const auto batch = make_batch(8, 1);
  int skipped = 0;
  float scale = 16777216.0F;
  for (int i = 0; i < 20; ++i) {
    const bool skip = trainer.accumulate(batch)->skipped.item<float>() != 0;
    if (skip) {
      scale /= 2;
      CHECK(difference(weights(trainer.model()), start) == "");
      ++skipped;
    } else {
      break;
    }
    CHECK(trainer.precision().loss_scale().item<float>() == scale);
  }
  CHECK(skipped > 0);
  CHECK(trainer.skipped_steps().item<std::int64_t>() == skipped);
  CHECK(difference(weights(trainer.model()), start) != "");
  CHECK(finite(weights(trainer.model())));
}

TEST_CASE("a loss scale at the end of fp32's range does not grow out of it") {
  precision::LossScale rule{.scale = 3e38, .growth_interval = 1};
  rule.update(false);
  CHECK(rule.scale == 3e38);
  CHECK(rule.good_steps == 0);
}

TEST_CASE("Bf16Weights takes its masters before it rounds") {
  const auto start = weights(*make<TinyNet>());
  td::Trainer trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = lr},
                      td::policies(precision::Bf16Weights{.keep_fp32 = {"layer_norm.w*t", "layer_norm.b?as"}})};
  bool rounded_any = false;
  for (const auto& p : trainer.parameters()) {
    CAPTURE(p.name);
    CHECK(same_bits(p.master.detach(), start.at(p.name)));
    const bool stays = batch_norm.contains(p.name) || p.name.starts_with("layer_norm.");
    CHECK((p.model.scalar_type() == (stays ? at::kFloat : at::kBFloat16)));
    CHECK(same_bits(p.model.detach(), stays ? start.at(p.name) : start.at(p.name).to(at::kBFloat16)));
    rounded_any |= !stays && !same_bits(p.model.detach().to(at::kFloat), start.at(p.name));
  }
  CHECK(rounded_any);
  for (const auto& item : buffers(trainer.model()))
    if (item.second.is_floating_point()) CHECK_MESSAGE((item.second.scalar_type() == at::kFloat), item.first);
  if (device().is_cuda())
    return;  // CUDA's layer norm takes no fp32 weight with a bf16 input, so this model runs on CPU
  trainer.accumulate(make_batch(8, 1));
  for (const auto& p : trainer.parameters()) {
    CAPTURE(p.name);
    CHECK((p.master.scalar_type() == at::kFloat));
    CHECK(same_bits(p.model.detach(), p.master.detach().to(p.model.scalar_type())));
  }
  const auto state = state_of(trainer.rule());
  CHECK((state.at("exp_avg/first.weight").scalar_type() == at::kFloat));
  CHECK_THROWS_WITH_AS((td::Trainer{make<TinyNet>(), CrossEntropy{}, td::optim::AdamW{},
                                    td::policies(precision::Bf16Weights{.keep_fp32 = {"head.*"}})}),
                       doctest::Contains("'head.*'"), td::ConfigError);
}

TEST_CASE("Bf16Weights adds up 64 micro-batches in fp32") {
  const auto batches = make_batches(std::vector<std::int64_t>(64, 4));
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::Sgd{.learning_rate = 1.0},
                      td::policies(precision::Bf16Weights{}, AccumulateOver{.batches = 64})};
  const auto start = masters(trainer);
  trainer.step(batches);
  // The exact mean of the 64 bf16 gradients, by hand in fp64.
  auto net = make<PlainNet>();
  net->to(at::kBFloat16);
  State want;
  State in_bf16;
  for (const auto& batch : batches) {
    auto loss = torch::nn::functional::cross_entropy(net->forward(batch.data.to(at::kBFloat16)), batch.target);
    loss.to(at::kFloat).backward();
    for (const auto& item : net->named_parameters()) {
      auto gradient = item.value().grad().detach();
      auto& sum = want[item.key()];
      sum = sum.defined() ? sum + gradient.to(at::kDouble) : gradient.to(at::kDouble);
      auto& low = in_bf16[item.key()];
      low = low.defined() ? low + gradient : gradient.clone();
      item.value().mutable_grad().reset();
    }
  }
  double error = 0;
  double error_in_bf16 = 0;
  for (const auto& p : trainer.parameters()) {
    const auto mean = want.at(p.name) / 64;
    const auto got = (start.at(p.name) - p.master.detach()).to(at::kDouble);
    error = std::max(error, ((got - mean).norm() / mean.norm()).item<double>());
    error_in_bf16 =
        std::max(error_in_bf16, ((in_bf16.at(p.name).to(at::kDouble) / 64 - mean).norm() / mean.norm()).item<double>());
  }
  CHECK(error < 1e-5);
  CHECK(error_in_bf16 > 1e-3);  // what it would be otherwise, so that the bound above says something
}

TEST_CASE("an fp64 model stays fp64") {
  const auto make64 = [] {
    auto net = make<PlainNet>();
    net->to(at::kDouble);
    return net;
  };
  std::vector<td::Batch> batches;
  for (int i = 0; i < 8; ++i) batches.push_back(make_batch(4, 100 + static_cast<std::uint64_t>(i), at::kDouble));
  // A rate that is a binary fraction: the rule's own is a fp32 number on the device.
  const double rate = 1.0 / 64;
  const auto start = weights(*make64());
  for (const int n : {1, 4}) {
    CAPTURE(n);
    td::Trainer trainer{make64(), CrossEntropy{}, td::optim::AdamW{.learning_rate = rate},
                        td::policies(AccumulateOver{.batches = n})};
    const auto got = oracle::run(trainer, batches);
    auto loop = oracle::classifier(make64(), {.textbook = true, .learning_rate = rate});
    const auto want = oracle::run_windows(loop, batches, static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < want.size(); ++i) {
      CHECK(distance(got[i].weights, want[i].weights, start) < 1e-12);
      CHECK(got[i].loss == doctest::Approx(want[i].loss).epsilon(1e-14));
    }
    for (const auto& p : trainer.parameters()) CHECK((p.model.scalar_type() == at::kDouble));
    for (const auto& [name, tensor] : state_of(trainer.rule()))
      if (name.starts_with("exp_avg")) CHECK((tensor.scalar_type() == at::kDouble));
  }
}
