// SPDX-License-Identifier: Apache-2.0
// Bad models, batches, losses and loaders: one clear sentence each, and a trainer that goes on as if nothing had been.
#include <forward_list>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
using namespace treadle_test;
using td::accumulation::AccumulateOver;
using td::nonfinite::Skip;

/// What the objective is to do with the next batches.
enum class Do { Train, Throw, Vector, Detach, NoGrad, Undefined, Integer, RecordVector };
struct Obeys {
  const Do* order;
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch, auto& step) const {
    const auto logits = net.forward(batch.data);
    auto loss = td::mean_loss(logits, batch.target);
    switch (*order) {
      case Do::Train:
        return loss;
      case Do::Throw:
        throw std::runtime_error("the objective's own trouble");
      case Do::Vector:
        return td::Loss::mean(logits.sum(1), 1);
      case Do::Detach:
        return td::Loss::mean(loss.value.detach(), 1);
      case Do::NoGrad: {
        const at::NoGradGuard no_grad;
        return td::Loss::mean(net.forward(batch.data).sum(), 1);
      }
      case Do::Undefined:
        return td::Loss::mean({}, 1);
      case Do::Integer:
        return td::Loss::mean(logits.argmax(1).sum(), 1);
      case Do::RecordVector:
        step.record("logits", logits, 1);
    }
    return loss;
  }
};

/// Collects warnings instead of printing them.
class Warnings {
 public:
  Warnings() {
    before_ = td::set_sink([this](td::Severity severity, std::string_view text) {
      if (severity == td::Severity::Warning) texts.emplace_back(text);
    });
  }
  ~Warnings() { td::set_sink(before_); }
  std::vector<std::string> texts;

 private:
  td::Sink before_;
};

/// Two trainers that differ in nothing; only `spoil(bad)` is done to the first. Afterwards both train alike.
template <class Net, class P, class Spoil>
void check_usable(P policies, Spoil&& spoil, const std::vector<td::Batch>& more = make_batches({4, 4, 4, 4})) {
  Do order = Do::Train;
  const auto fresh = [&] {
    return td::Trainer<typename Net::ContainedType, Obeys, td::optim::AdamW, P>(
        make<Net>(), Obeys{&order}, td::optim::AdamW{.learning_rate = 1e-2}, policies);
  };
  auto bad = fresh();
  auto good = fresh();
  for (auto* trainer : {&bad, &good}) {
    reseed(5);
    for (const auto& batch : make_batches({4, 4}, 50)) trainer->accumulate(batch);
  }
  spoil(bad, order);
  order = Do::Train;
  for (const auto& p : bad.parameters()) CHECK_FALSE(p.model.grad().defined());
  CHECK(difference(everything(bad), everything(good)) == "");
  for (auto* trainer : {&bad, &good}) {
    reseed(6);
    for (const auto& batch : more) trainer->accumulate(batch);
  }
  CHECK(difference(everything(bad), everything(good)) == "");
  CHECK(bad.steps() == good.steps());
}
}  // namespace

TEST_CASE("losses that are none") {
  const auto batch = make_batch(4, 1);
  const std::vector<std::pair<Do, const char*>> losses{
      {Do::Vector, "returned a loss of 4 elements; reduce it to its mean()"},
      {Do::Detach, "the objective's loss has no gradient"},
      {Do::NoGrad, "the objective's loss has no gradient"},
      {Do::Undefined, "returned an undefined tensor"},
      {Do::Integer, "the objective's loss has no gradient"},
  };
  for (const auto& loss : losses) {
    const std::string says = loss.second;
    CAPTURE(says);
    check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do& order) {
      order = loss.first;
      CHECK_SAYS(td::ConfigError, says, trainer.accumulate(batch));
    });
  }
  check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do& order) {
    order = Do::Vector;
    CHECK_SAYS(td::ConfigError, "returned a loss of 4 elements", trainer.evaluate(std::vector{batch}));
    order = Do::Undefined;
    CHECK_SAYS(td::ConfigError, "returned an undefined tensor", trainer.evaluate(std::vector{batch}));
    order = Do::Detach;
    CHECK(trainer.evaluate(std::vector{batch})["loss"] > 0);  // nothing to differentiate here
  });
  check_usable<PlainNet>(td::policies(AccumulateOver{.batches = 2}), [&](auto& trainer, Do& order) {
    trainer.accumulate(batch);  // a good micro-batch first
    order = Do::Detach;
    CHECK_SAYS(td::ConfigError, "the objective's loss has no gradient", trainer.accumulate(batch));
  });
  check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do& order) {
    order = Do::RecordVector;
    CHECK_SAYS(td::DataError, "step.record(\"logits\") was given a tensor of 20 elements", trainer.accumulate(batch));
  });
}

TEST_CASE("a recorded value that has the name of one of Treadle's own") {
  const auto batch = make_batch(4, 1);
  std::string name;
  const auto objective = [&](PlainNetImpl& net, const td::Batch& b, auto& step) {
    step.record(name, 1.0, 1);
    return td::mean_loss(net.forward(b.data), b.target);
  };
  td::Trainer trainer{make<PlainNet>(), objective, td::optim::AdamW{}};
  for (const char* taken : {"loss", "grad_norm"}) {
    name = taken;
    const std::string says = "step.record(\"" + name + "\") has a name that Treadle reports itself";
    for (int i = 0; i < 2; ++i) CHECK_SAYS(td::ConfigError, says, trainer.accumulate(batch));
    CHECK_SAYS(td::ConfigError, says, trainer.evaluate(std::vector{batch}));
  }
  name = "my loss";
  CHECK(trainer.accumulate(batch)->records.size() == 1);
}

TEST_CASE("a metric to stop by that nobody records shows when the first epoch is over") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{}};
  const auto start = weights(trainer.model());
  const td::FitOptions options{.epochs = 2, .early_stop = td::EarlyStop{.metric = "acuracy"}};
  CHECK_SAYS(td::ConfigError, "acuracy", trainer.fit(make_batches({4, 4}), options));
  CHECK(trainer.steps() == 2);  // those were made
  CHECK(difference(weights(trainer.model()), start) != "");
  CHECK(trainer.fit(make_batches({4, 4})).steps == 2);
}

TEST_CASE("batches that are none") {
  const auto good = make_batch(4, 1);
  check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do&) {
    CHECK_SAYS(td::DataError, "a batch has 4 rows of data but 3 of target",
               trainer.accumulate(td::Batch{good.data, good.target.narrow(0, 0, 3)}));
  });
  // Undefined tensors have no rows, but are no batch without rows.
  struct Pair {
    at::Tensor left, right;
  };
  struct OfPair {
    td::Loss operator()(PlainNetImpl& net, const Pair& pair) const {
      return td::mean_loss(net.forward(pair.left), pair.right);
    }
  };
  check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do&) {
    CHECK_SAYS(td::DataError, "the data of a batch is an undefined tensor", trainer.fit(std::vector<td::Batch>(3)));
    CHECK_SAYS(td::DataError, "the data of a batch is an undefined tensor", trainer.accumulate(td::Batch{}));
    CHECK_SAYS(td::DataError, "the data of a batch is an undefined tensor",
               trainer.evaluate(std::vector<td::Batch>(3)));
    CHECK_SAYS(td::DataError, "the target of a batch is an undefined tensor",
               trainer.accumulate(td::Batch{good.data, {}}));
  });
  td::Trainer pairs{make<PlainNet>(), OfPair{}, td::optim::AdamW{}};
  CHECK_SAYS(td::DataError, "all tensors of a batch are undefined", pairs.accumulate(Pair{}));
  const td::Batch empty{good.data.narrow(0, 0, 0), good.target.narrow(0, 0, 0)};
  check_usable<PlainNet>(td::policies(AccumulateOver{.batches = 2}), [&](auto& trainer, Do&) {
    CHECK_FALSE(trainer.accumulate(empty));  // counts nothing, and is no mistake
    trainer.reset_window();
  });
  for (const auto dtype : {at::kInt, at::kShort, at::kFloat, at::kBool}) {
    CAPTURE(dtype);
    check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do&) {
      CHECK_SAYS(td::DataError, std::string("mean_loss: target is of dtype ") + c10::toString(dtype),
                 trainer.accumulate(td::Batch{good.data, good.target.to(dtype)}));
    });
    CHECK_SAYS(td::DataError, "pass target.to(at::kLong)",
               td::mean_loss(at::randn({4, 5}), at::zeros({4}, dtype), {.ignore_index = -100}));
  }
  // What LibTorch finds wrong with the logits is its own error.
  CHECK_THROWS_AS(td::mean_loss(at::randn({3, 5}), at::zeros({4}, at::kLong)), c10::Error);

  if (device().is_cpu())  // on CUDA it is a device-side assert, after which the process cannot go on
    check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do&) {
      CHECK_SAYS(td::DataError, "a target class is out of range for logits of 5 classes",
                 trainer.accumulate(td::Batch{good.data, good.target.clone().fill_(5)}));
      CHECK_SAYS(td::DataError, "a target class is out of range",
                 trainer.accumulate(td::Batch{good.data, good.target.clone().fill_(-100)}));
    });
}

TEST_CASE("a throw in the middle of a window") {
  const auto spoil = [](auto& trainer, Do& order) {
    trainer.accumulate(make_batch(4, 7));
    order = Do::Throw;
    CHECK_THROWS_WITH_AS(trainer.accumulate(make_batch(4, 8)), "the objective's own trouble", std::runtime_error);
    CHECK_FALSE(trainer.accumulation().open());
  };
  check_usable<PlainNet>(td::policies(AccumulateOver{.batches = 2}), spoil);
  check_usable<TinyNet>(td::policies(AccumulateOver{.batches = 2}, Skip{}), spoil);
  check_usable<TinyNet>(td::policies(AccumulateOver{.batches = 2}, td::precision::Bf16Weights{}, Skip{},
                                     td::averaging::ExponentialAverage{}, td::clipping::ClipNorm{}),
                        spoil);
  check_usable<TinyNet>(td::policies(AccumulateOver{.batches = 2}, td::precision::Fp16{.initial_scale = 8}), spoil);
}

TEST_CASE("a throw in an evaluation") {
  check_usable<TinyNet>(td::policies(td::averaging::ExponentialAverage{}), [](auto& trainer, Do& order) {
    order = Do::Throw;
    CHECK_THROWS_AS(trainer.evaluate(make_batches({4})), std::runtime_error);
    CHECK(trainer.model().is_training());
  });
}

TEST_CASE("loaders without a batch") {
  const std::vector<td::Batch> none;
  const std::forward_list<td::Batch> unsized;
  check_usable<PlainNet>(td::policies(), [&](auto& trainer, Do&) {
    CHECK_SAYS(td::DataError, "the training loader gave no batch", trainer.fit(none));
    CHECK_SAYS(td::DataError, "the training loader gave no batch", trainer.fit(unsized));
    CHECK_SAYS(td::DataError, "evaluate: the loader gave no batch", trainer.evaluate(none));
    CHECK_SAYS(td::DataError, "predict: the loader gave no batch", trainer.predict(unsized));
    CHECK_SAYS(td::DataError, "step: the range gave no batch", trainer.step(none));
  });
  check_usable<PlainNet>(td::policies(AccumulateOver{.batches = 2}), [&](auto& trainer, Do&) {
    CHECK_SAYS(td::DataError, "the training loader gave no batch", trainer.fit(unsized));
  });
}

TEST_CASE("a non-finite loss under Stop") {
  td::Trainer trainer{make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-2},
                      td::policies(td::nonfinite::Stop{}, AccumulateOver{.batches = 2})};
  for (const auto& batch : make_batches({4, 4})) trainer.accumulate(batch);
  const auto before = everything(trainer);
  trainer.accumulate(make_batch(4, 1));
  trainer.accumulate(poisoned(make_batch(4, 2)));
  try {
    trainer.check();
    FAIL("nothing was thrown");
  } catch (const td::NonFiniteError& error) {
    CHECK(error.step() == 1);
    CHECK(error.micro_batch() == 1);
    CHECK(is_sentence(error.what()));
    CHECK(std::string(error.what())
              .starts_with("nonfinite::Stop: step 1 has a non-finite loss in micro-batch 1 (counted from 0"));
  }
  CHECK(difference(everything(trainer), before) == "");
  CHECK_SAYS(td::NonFiniteError, "step 1 has a non-finite loss", trainer.fit(make_batches({4, 4})));
  CHECK(difference(everything(trainer), before) == "");  // stopped for good
  CHECK(trainer.evaluate(make_batches({4}))["loss"] > 0);
}

TEST_CASE("an infinite loss under Stop") {
  struct Infinite {
    td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
      return td::Loss::mean(net.forward(batch.data).sum() * std::numeric_limits<float>::infinity(), 4);
    }
  };
  td::Trainer trainer{make<PlainNet>(), Infinite{}, td::optim::Sgd{},
                      td::policies(td::nonfinite::Stop{.check_every_step = true})};
  const auto before = weights(trainer.model());
  CHECK_SAYS(td::NonFiniteError, "step 0 has a non-finite loss in micro-batch 0", trainer.accumulate(make_batch(4, 1)));
  CHECK(difference(weights(trainer.model()), before) == "");
}

TEST_CASE("models that cannot be trained") {
  const auto train = [](auto model) { return td::Trainer(model, CrossEntropy{}, td::optim::AdamW{}); };
  auto frozen = make<PlainNet>();
  for (auto& p : frozen->parameters()) p.set_requires_grad(false);
  CHECK_SAYS(td::ConfigError, "no parameter of the model requires a gradient", train(frozen));

  struct EmptyImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  CHECK_SAYS(td::ConfigError, "no parameter of the model requires a gradient", train(std::make_shared<EmptyImpl>()));

  auto counting = make<PlainNet>();
  counting->first->register_parameter("calls", torch::zeros({1}, torch::kLong), /*requires_grad=*/false);
  CHECK_SAYS(td::ConfigError, "parameter 'first.calls' is of dtype Long; only floating-point tensors can be trained",
             train(counting));

  CHECK_SAYS(td::ConfigError, "the model is a null shared_ptr", train(std::shared_ptr<PlainNetImpl>()));
}

TEST_CASE("groups and patterns that match nothing") {
  const auto group = [](const char* pattern) {
    return td::Trainer(make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{.groups = {{.pattern = pattern}}});
  };
  CHECK_SAYS(td::ConfigError, "parameter group 'encoder.*' matches no parameter", group("encoder.*"));
  CHECK_SAYS(td::ConfigError, "parameter group '' matches no parameter", group(""));
  CHECK(group("*.bias").steps() == 0);
  CHECK_SAYS(td::ConfigError, "keep_fp32 pattern 'head' matches no parameter",
             td::Trainer(make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{},
                         td::policies(td::precision::Bf16Weights{.keep_fp32 = {"head"}})));
}

TEST_CASE("a device that is not there") {
  const auto on = [](at::Device wanted) {
    return td::Trainer(make<PlainNet>(), CrossEntropy{}, td::optim::AdamW{},
                       td::policies(td::parallelism::SingleDevice{.device = wanted}));
  };
  CHECK_SAYS(td::ConfigError, "device cuda:99 was asked for, but LibTorch sees", on({at::kCUDA, 99}));
  if (!torch::cuda::is_available())
    CHECK_SAYS(td::ConfigError, "device cuda:0 was asked for, but LibTorch sees 0 CUDA devices", on(at::kCUDA));
  CHECK(on(at::kCPU).device().is_cpu());
}

TEST_CASE("parameters that changed place after construction") {
  for (const bool stepped : {false, true}) {
    CAPTURE(stepped);
    auto net = make<PlainNet>();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}};
    if (stepped) trainer.accumulate(make_batch(4, 1));
    trainer.check();
    net->last->to(at::kDouble);
    const char* says = "parameter 'last.weight' was Float on ";
    CHECK_SAYS(td::ConfigError, says, trainer.check());
    CHECK_SAYS(td::ConfigError, says, trainer.accumulate(make_batch(4, 1)));  // Float times Double
    net->to(at::kDouble);
    CHECK_SAYS(td::ConfigError, "parameter 'first.weight' was Float on ",
               trainer.fit(std::vector{make_batch(4, 1, at::kDouble)}));
    net->to(at::kFloat);  // as before, but in other memory than the rule refers to
    says = "parameter 'first.weight' was given other memory after the trainer was made";
    CHECK_SAYS(td::ConfigError, says, trainer.check());
    CHECK_SAYS(td::ConfigError, says, trainer.accumulate(make_batch(4, 1)));
    td::Trainer another{net, CrossEntropy{}, td::optim::AdamW{}};
    CHECK(another.accumulate(make_batch(4, 1)));
  }
}

TEST_CASE("parameters without a gradient are warned about once") {
  struct SideImpl : PlainNetImpl {
    SideImpl() { register_module("side", torch::nn::Linear(3, 3)); }
  };
  Warnings warnings;
  auto net = std::make_shared<SideImpl>();
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}};
  CHECK(warnings.texts.empty());
  const auto side = net->named_modules()["side"]->parameters()[0].clone();
  for (int i = 0; i < 3; ++i) trainer.accumulate(make_batch(4, 1));
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0].find("2 of 6 parameters got no gradient ('side.weight', 'side.bias')") != std::string::npos);
  CHECK(is_sentence(warnings.texts[0]));
  CHECK(same_bits(net->named_modules()["side"]->parameters()[0], side));  // not even decayed
}

TEST_CASE("frozen parameters are nothing to warn about") {
  Warnings warnings;
  auto net = make<PlainNet>();
  net->first->weight.set_requires_grad(false);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}};
  trainer.accumulate(make_batch(4, 1));
  CHECK(warnings.texts.empty());
}

TEST_CASE("sparse gradients") {
  struct WordsImpl : torch::nn::Module {
    WordsImpl() {
      register_module("words", words);
      register_module("last", last);
    }
    at::Tensor forward(const at::Tensor& x) {
      return last(words(x.slice(1, 0, 1).abs().to(at::kLong).clamp_max(9)).mean(1));
    }
    torch::nn::Embedding words{torch::nn::EmbeddingOptions(10, 4).sparse(true)};
    torch::nn::Linear last{4, 5};
  };
  auto net = std::make_shared<WordsImpl>();
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{}};
  const auto before = weights(*net);
  CHECK_SAYS(td::ConfigError, "parameter 'words.weight' has a sparse gradient", trainer.accumulate(make_batch(4, 1)));
  CHECK(difference(weights(*net), before) == "");
  CHECK_FALSE(net->last->weight.grad().defined());
}

TEST_CASE("gradients from before the trainer are not added to its first step") {
  const auto batch = make_batch(4, 1);
  const auto trained = [&](bool stale) {
    auto net = make<PlainNet>();
    if (stale) td::mean_loss(net->forward(batch.data), batch.target).value.backward();
    td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 0.1}};
    trainer.accumulate(batch);
    return weights(*net);
  };
  CHECK(difference(trained(true), trained(false)) == "");
}
