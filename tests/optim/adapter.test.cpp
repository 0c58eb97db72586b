// SPDX-License-Identifier: Apache-2.0
// The adapter drives an optimizer as a loop by hand would, asks before it makes the host wait, and refuses what it
// cannot drive.
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>

#include <memory>
#include <string>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;
using namespace treadle_test;
using Parameters = std::vector<at::Tensor>;

const auto rms_prop = [](Parameters& parameters) { return torch::optim::RMSprop(parameters, 0.01); };

template <class Rule>
auto trainer_with(Rule rule) {
  return td::Trainer{make<PlainNet>(), CrossEntropy{}, std::move(rule)};
}
/// A mean over the tokens that are not ignored, whose count stays on the device.
struct CountsOnDevice {
  td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target, {.ignore_index = -100});
  }
};
/// The rate of an optimizer's first group.
double rate(torch::optim::Optimizer& optimizer) {
  return optimizer.param_groups().front().options().get_lr();
}
}  // namespace

TEST_CASE("an adapted optimizer steps as in a loop by hand, with a schedule and without") {
  const auto batches = make_batches({8, 8, 8, 8});
  for (const bool scheduled : {false, true}) {
    CAPTURE(scheduled);
    auto trainer =
        trainer_with(td::optim::adapt(rms_prop, scheduled ? td::schedule::linear({.steps = 8}) : td::Schedule{}));
    auto net = make<PlainNet>();
    torch::optim::RMSprop by_hand(net->parameters(), 0.01);
    for (std::size_t i = 0; i < batches.size(); ++i) {
      trainer.accumulate(batches[i]);
      by_hand.zero_grad();
      torch::nn::functional::cross_entropy(net->forward(batches[i].data), batches[i].target).backward();
      if (scheduled) by_hand.param_groups()[0].options().set_lr(0.01 * (1.0 - static_cast<double>(i) / 8));
      by_hand.step();
      CHECK(difference(weights(trainer.model()), weights(*net)) == "");
    }
  }
}

TEST_CASE("a rate that the program sets itself stays, and is what scale() multiplies") {
  auto trainer = trainer_with(td::optim::adapt(rms_prop));
  auto& optimizer = trainer.rule().optimizer();
  const auto batch = make_batch(8, 1);
  trainer.accumulate(batch);
  optimizer.param_groups().front().options().set_lr(0.5);
  trainer.accumulate(batch);
  CHECK(rate(optimizer) == 0.5);
  CHECK(trainer.rule().rates().of(0).item<float>() == 0.5F);
  trainer.rule().rates().scale(0.5);
  CHECK(rate(optimizer) == 0.25);
  trainer.accumulate(batch);
  CHECK(rate(optimizer) == 0.25);
}

TEST_CASE("with a schedule the rate is the schedule's, scaled for good") {
  auto trainer = trainer_with(td::optim::adapt(rms_prop, td::schedule::linear({.steps = 4})));
  auto& optimizer = trainer.rule().optimizer();
  const auto batch = make_batch(8, 1);
  trainer.accumulate(batch);
  optimizer.param_groups().front().options().set_lr(0.5);
  trainer.accumulate(batch);
  CHECK(rate(optimizer) == 0.01 * 0.75);
  trainer.rule().rates().scale(0.5);
  trainer.accumulate(batch);
  CHECK(rate(optimizer) == 0.01 * 0.5 * 0.5);
}

TEST_CASE("the rate may be asked for before the run is known") {
  auto trainer = trainer_with(td::optim::adapt(rms_prop, td::schedule::cosine()));
  CHECK_FALSE(trainer.rule().rates().planned());
  CHECK(trainer.rule().rates().of(0).item<float>() == 0.0F);  // as the fused rules have it
  trainer.rule().rates().plan(10);
  CHECK(trainer.rule().rates().of(0).item<float>() == 0.01F);
}

TEST_CASE("whether a step counts is not read from the device unless that was agreed to") {
  const auto batch = make_batch(8, 1);
  td::Batch ignored{batch.data, at::full_like(batch.target, -100)};
  td::Trainer refused{make<PlainNet>(), CountsOnDevice{}, td::optim::adapt(rms_prop)};
  const auto start = weights(refused.model());
  for (int i = 0; i < 2; ++i) CHECK_SAYS(td::ConfigError, "known on the device only", refused.accumulate(batch));
  CHECK(difference(weights(refused.model()), start) == "");
  td::Trainer allowed{make<PlainNet>(), CountsOnDevice{}, td::optim::adapt<td::optim::HostSync::Allowed>(rms_prop)};
  allowed.accumulate(ignored);
  CHECK(difference(weights(allowed.model()), start) == "");
  allowed.accumulate(batch);
  CHECK(difference(weights(allowed.model()), start) != "");
  // A window without rows is known to be one on the host.
  auto on_host = trainer_with(td::optim::adapt(rms_prop));
  on_host.accumulate(make_batch(0, 1));
  CHECK(difference(weights(on_host.model()), start) == "");
  on_host.accumulate(batch);
  CHECK(difference(weights(on_host.model()), start) != "");
}

TEST_CASE("what cannot be driven is refused when the trainer is made") {
  const auto hidden = [](Parameters& p) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::LBFGS>(p);
  };
  CHECK_SAYS(td::ConfigError, "torch::optim::LBFGS needs a closure", trainer_with(td::optim::adapt(hidden)));
  const auto nothing = [](Parameters&) -> std::unique_ptr<torch::optim::Optimizer> { return nullptr; };
  CHECK_SAYS(td::ConfigError, "returned no optimizer", trainer_with(td::optim::adapt(nothing)));
}

TEST_CASE("parameters without a gradient are named under an adapted optimizer, too") {
  struct HalfUsed {
    td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
      return td::mean_loss(at::tanh(net.first(batch.data)), batch.target);
    }
  };
  std::string warned;
  const auto before = td::set_sink([&](td::Severity, std::string_view text) { warned += text; });
  td::Trainer trainer{make<PlainNet>(), HalfUsed{}, td::optim::adapt(rms_prop)};
  trainer.accumulate(make_batch(8, 1));
  trainer.accumulate(make_batch(8, 1));
  td::set_sink(before);
  CHECK(warned.find("2 of 4 parameters got no gradient ('last.weight', 'last.bias')") != std::string::npos);
  CHECK(warned.find("last.bias") == warned.rfind("last.bias"));
}
