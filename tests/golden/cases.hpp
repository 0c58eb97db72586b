// SPDX-License-Identifier: Apache-2.0
// Every case of reference.py once more, with Treadle. Included by one program a device, which defines GOLDEN_DEVICE and
// GOLDEN_NEEDS_DEVICE.
//
// Bitwise unless a tolerance is given, which is allowed for clipping, for windows that are no power of two or ragged,
// and where PyTorch itself computes with other bits (a learning rate in fp64, a host-stepped SGD).
#include <torch/torch.h>
#include <treadle/treadle.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "golden/reference.hpp"
#include "support/doctest.hpp"
#include "support/skip.hpp"

namespace td = treadle;

namespace golden {

constexpr std::int64_t features = 12;
constexpr std::int64_t classes = 5;
constexpr std::uint64_t seed = 3;  // reference.py's

struct Mlp : torch::nn::Module {
  Mlp() : Mlp(0) {}
  explicit Mlp(double share) : drop(share) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto hidden = torch::relu(first(x));
    if (drop > 0) hidden = torch::dropout(hidden, drop, is_training());
    return second(hidden);
  }
  double drop;
  torch::nn::Linear first{features, 16};
  torch::nn::Linear second{16, classes};
};
struct Dropping : Mlp {
  Dropping() : Mlp(0.3) {}
};
struct Convolutional : torch::nn::Module {
  Convolutional() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(norm(conv(x))).flatten(1)); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4 * 4 * 4, classes};
};

struct CrossEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

inline const Reference& reference() {
  static const Reference made = [] {
    at::set_num_threads(1);  // as in reference.py
    return Reference(at::Device(GOLDEN_DEVICE).str());
  }();
  return made;
}

struct Expect {
  double tolerance = 0;      ///< relative and absolute; 0 asks for equal bits
  double nominal_count = 0;  ///< TrainerOptions::nominal_count
  bool through_fit = false;  ///< one call of fit instead of a loop of accumulate
};

inline void check_close(const std::string& what, const at::Tensor& ours, const at::Tensor& theirs, double tolerance) {
  const auto here = ours.detach().cpu().to(theirs.scalar_type());
  if (here.sizes() == theirs.sizes() &&
      (tolerance == 0 ? at::equal(here, theirs) : at::allclose(here, theirs, tolerance, tolerance)))
    return;
  const auto apart = here.sizes() == theirs.sizes() ? (here - theirs).abs().max().item<double>() : -1.0;
  FAIL_CHECK(what << " is off by " << apart << ", allowed: " << tolerance);
}

template <class Net>
void load(const std::string& name, Net& net) {
  const torch::NoGradGuard no_grad;
  if (reference()(name + "/init/" + net.named_parameters()[0].key()).scalar_type() == at::kDouble) net.to(at::kDouble);
  for (auto& item : net.named_parameters()) item.value().copy_(reference()(name + "/init/" + item.key()));
  for (auto& item : net.named_buffers()) item.value().copy_(reference()(name + "/init/" + item.key()));
}

inline std::vector<td::Batch> batches(const std::string& name) {
  std::vector<td::Batch> all;
  for (int k = 0; k < reference().count(name + "/x/"); ++k)
    all.push_back({reference()(name + "/x/" + std::to_string(k)), reference()(name + "/y/" + std::to_string(k))});
  return all;
}

/// The state after `step` steps, against what PyTorch had then.
template <class Trainer, class Net>
void check_state(const std::string& at, Trainer& trainer, Net& net, double tolerance) {
  for (const auto& item : net.named_parameters())
    check_close(at + "param/" + item.key(), item.value(), reference()(at + "param/" + item.key()), tolerance);
  for (const auto& item : net.named_buffers())
    check_close(at + "buffer/" + item.key(), item.value(), reference()(at + "buffer/" + item.key()), tolerance);
  // Treadle's rate is the fp32 that the step used; nothing but its rounding may part it from PyTorch's fp64.
  check_close(at + "rate", trainer.rule().rates().of(0), reference()(at + "rate").to(at::kFloat), 0);
  if constexpr (Trainer::Precision::scales_loss)
    check_close(at + "scale", trainer.precision().loss_scale(), reference()(at + "scale"), 0);
  if constexpr (Trainer::Averaging::averages)
    trainer.averaging().for_each_state([&](const std::string& key, at::Tensor& average) {
      check_close(at + "average/" + key, average, reference()(at + "average/" + key), tolerance);
    });
}

template <class Net, class Rule, class P = td::Policies<>>
void compare(const std::string& name, Rule rule, P policies = {}, const Expect& expect = {}) {
  CAPTURE(name);
  const int steps = reference().count(name + "/", "/loss");
  REQUIRE(steps > 0);
  Net net;
  load(name, net);
  policies.parallelism.device = at::Device(GOLDEN_DEVICE);
  td::Trainer trainer{
      net,
      CrossEntropy{},
      rule,
      policies,
      td::observers(),
      td::TrainerOptions{.determinism = td::Determinism{.seed = seed + 1}, .nominal_count = expect.nominal_count}};
  const auto given = batches(name);
  const auto at = [&](int step) { return name + "/" + std::to_string(step) + "/"; };
  if (expect.through_fit) {
    const auto result = trainer.fit(given);
    REQUIRE(result.steps == steps);
    check_state(at(steps - 1), trainer, net, expect.tolerance);
    return;
  }
  int step = 0;
  int skipped = 0;
  for (const auto& batch : given) {
    const auto done = trainer.accumulate(batch);
    if (!done) continue;
    check_close(at(step) + "loss", done->loss, reference()(at(step) + "loss"), expect.tolerance);
    if (done->skipped.defined()) {
      check_close(at(step) + "skipped", done->skipped, reference()(at(step) + "skipped"), 0);
      skipped += done->skipped.template item<float>() != 0;
    }
    const bool measured = done->grad_norm.defined() && reference().has(at(step) + "norm");
    if (measured && std::isfinite(reference().number(at(step) + "norm")))
      check_close(at(step) + "norm", done->grad_norm, reference()(at(step) + "norm"), expect.tolerance);
    check_state(at(step), trainer, net, expect.tolerance);
    ++step;
  }
  CHECK(step == steps);
  if (name.find("overflow") != std::string::npos) {
    CHECK(skipped > 2);  // or the case shows nothing
    CHECK(skipped < steps - 5);
  }
  if constexpr (P::Averaging::averages) {
    const std::vector<td::Batch> first{given.front()};
    const auto loss = [&](bool average) {
      return at::scalar_tensor(trainer.evaluate(first, {.use_average = average})["loss"], at::kDouble).to(at::kFloat);
    };
    const double allowed = std::max(expect.tolerance, 1e-6);  // evaluate() takes its mean in fp64
    check_close(name + "/evaluated/average", loss(true), reference()(name + "/evaluated/average"), allowed);
    check_close(name + "/evaluated/weights", loss(false), reference()(name + "/evaluated/weights"), allowed);
    check_state(at(steps - 1), trainer, net, expect.tolerance);  // and left no trace
  }
}

inline td::optim::AdamW adamw(td::Schedule schedule = {}) {
  return {.learning_rate = 1e-2, .schedule = std::move(schedule)};
}
inline const td::precision::Fp16 forced{.initial_scale = 4194304.0, .growth_interval = 3};

TEST_CASE("rules") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("adamw", td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 0.05});
  compare<Mlp>("adamw_amsgrad",
               td::optim::AdamW{.learning_rate = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .amsgrad = true});
  compare<Mlp>("adamw_double", td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 0.05});
  compare<Mlp>("adam_l2", td::optim::Adam{.learning_rate = 1e-2, .weight_decay = 0.1});
  compare<Mlp>("sgd", td::optim::Sgd{.learning_rate = 0.1});
  compare<Mlp>("sgd_momentum", td::optim::Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  compare<Mlp>("sgd_nesterov", td::optim::Sgd{.learning_rate = 0.1, .momentum = 0.9, .nesterov = true});
  compare<Mlp>("sgd_dampening", td::optim::Sgd{.learning_rate = 0.1, .momentum = 0.9, .dampening = 0.3});
}

TEST_CASE("parameter groups") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("groups", td::optim::AdamW{.learning_rate = 1e-2,
                                          .weight_decay = 0.1,
                                          .schedule = td::schedule::linear({.steps = 8, .floor = 0.5}),
                                          .groups = {{.pattern = "*.bias", .weight_decay = 0.0},
                                                     {.pattern = "second.*", .rate = 0.3}}});
}

TEST_CASE("schedules") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("cosine", adamw(td::schedule::cosine({.steps = 10, .floor = 0.1})));
  compare<Mlp>("linear", adamw(td::schedule::linear({.steps = 7, .floor = 0.1})));
  compare<Mlp>("step", adamw(td::schedule::step({.every = 3, .gamma = 0.5, .steps = 10})));
  compare<Mlp>("polynomial", adamw(td::schedule::polynomial({.steps = 7, .power = 2.0})));
  auto one_cycle =
      adamw(td::schedule::one_cycle({.steps = 12, .rise = 0.25, .initial_divisor = 10, .final_divisor = 100}));
  one_cycle.learning_rate = 2e-2;
  compare<Mlp>("one_cycle", one_cycle);
  compare<Mlp>("warmup_cosine", adamw(td::schedule::cosine({.steps = 10, .warmup = 3})));
  compare<Mlp>("warmup_stable_decay",
               adamw(td::schedule::warmup_stable_decay({.steps = 10, .warmup = 2, .decay = 0.4, .floor = 0.1})));
  compare<Mlp>(
      "chain",
      adamw(td::schedule::chain({td::schedule::table({0.25, 0.25, 0.25}), td::schedule::cosine({.steps = 7})})));
  compare<Mlp>("table", adamw(td::schedule::table({1, 1, 0.1, 0.1, 0.1, 0.01})));
}

TEST_CASE("a schedule whose horizon fit finds") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("cosine", adamw(td::schedule::cosine({.floor = 0.1})), {}, {.through_fit = true});
  compare<Mlp>("warmup_cosine", adamw(td::schedule::cosine({.warmup = 3})), {}, {.through_fit = true});
}

TEST_CASE("a learning rate that PyTorch holds in fp64") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("cosine_float_rate", adamw(td::schedule::cosine({.steps = 10, .floor = 0.1})), {}, {.tolerance = 2e-6});
}

TEST_CASE("autocast to bf16") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("bf16", adamw(), td::policies(td::precision::Bf16{}));
}

TEST_CASE("autocast to fp16 with a dynamic loss scale") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("fp16", adamw(), td::policies(td::precision::Fp16{.initial_scale = 1024, .growth_interval = 4}));
  compare<Mlp>("fp16_overflow", adamw(td::schedule::cosine({.steps = 20})), td::policies(forced));
  compare<Mlp>("fp16_overflow_clip", adamw(), td::policies(forced, td::clipping::ClipNorm{.max_norm = 0.2}),
               {.tolerance = 2e-6});
  compare<Mlp>("fp16_overflow_average", adamw(), td::policies(forced, td::averaging::ExponentialAverage{.decay = 0.8}),
               {.tolerance = 1e-6});
  compare<Mlp>("fp16_overflow_sgd", td::optim::Sgd{.learning_rate = 0.1, .momentum = 0.9, .dampening = 0.3},
               td::policies(forced), {.tolerance = 1e-5});
  compare<Convolutional>("fp16_overflow_norm", adamw(), td::policies(forced));
}

TEST_CASE("windows") {
  GOLDEN_NEEDS_DEVICE();
  using td::accumulation::AccumulateOver;
  compare<Mlp>("window_4", adamw(), td::policies(AccumulateOver{.batches = 4}));
  compare<Mlp>("window_4", adamw(), td::policies(AccumulateOver{.batches = 4}), {.nominal_count = 32});
  compare<Mlp>("window_3", adamw(), td::policies(AccumulateOver{.batches = 3}), {.tolerance = 2e-6});
  compare<Mlp>("window_ragged", adamw(), td::policies(AccumulateOver{.batches = 3}), {.tolerance = 2e-6});
  compare<Mlp>("window_ragged", adamw(), td::policies(AccumulateOver{.batches = 3}),
               {.tolerance = 2e-6, .through_fit = true});
  // A loss divided by 4 overflows two doublings later, so c0 has to be the whole window's count.
  compare<Mlp>("window_4_fp16", adamw(td::schedule::step({.every = 2, .gamma = 0.5, .steps = 10})),
               td::policies(forced, AccumulateOver{.batches = 4}), {.nominal_count = 32});
}

TEST_CASE("clipping") {
  GOLDEN_NEEDS_DEVICE();
  const td::optim::Sgd rule{.learning_rate = 0.1, .momentum = 0.9};
  compare<Mlp>("clip", rule, td::policies(td::clipping::ClipNorm{.max_norm = 0.3}), {.tolerance = 1e-6});
  compare<Mlp>("clip_loose", rule, td::policies(td::clipping::ClipNorm{.max_norm = 1e3}), {.tolerance = 1e-6});
  compare<Mlp>("clip_value", rule, td::policies(td::clipping::ClipValue{.max_value = 0.02}));
}

TEST_CASE("averaging") {
  GOLDEN_NEEDS_DEVICE();
  compare<Mlp>("average", adamw(), td::policies(td::averaging::ExponentialAverage{.decay = 0.9}));
}

TEST_CASE("dropout draws the same numbers") {
  GOLDEN_NEEDS_DEVICE();
  compare<Dropping>("dropout", adamw());
  compare<Dropping>("dropout_window", adamw(), td::policies(td::accumulation::AccumulateOver{.batches = 2}));
}

TEST_CASE("convolution and batch norm") {
  GOLDEN_NEEDS_DEVICE();
  compare<Convolutional>("convolution", td::optim::Sgd{.learning_rate = 0.05, .momentum = 0.9});
}

TEST_CASE("everything at once") {
  GOLDEN_NEEDS_DEVICE();
  compare<Dropping>(
      "everything",
      td::optim::AdamW{.learning_rate = 1e-2,
                       .weight_decay = 0.1,
                       .schedule = td::schedule::cosine({.steps = 12, .warmup = 3}),
                       .groups = {{.pattern = "*.bias", .rate = 2.0, .weight_decay = 0.0}}},
      td::policies(forced, td::accumulation::AccumulateOver{.batches = 4}, td::clipping::ClipNorm{.max_norm = 0.5},
                   td::averaging::ExponentialAverage{.decay = 0.9}),
      {.tolerance = 1e-5, .nominal_count = 32});
}

}  // namespace golden
