// SPDX-License-Identifier: Apache-2.0
// Any optimizer of torch::optim as the rule, with a schedule of Treadle's around it.
// treadle-example: TIMEOUT 120 PASS accuracy 0\.9.*accuracy 0\.9
#include <torch/torch.h>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/treadle.hpp>

namespace td = treadle;

struct CrossEntropy {
  auto operator()(auto& net, const td::Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};

/// Points inside and outside a circle.
td::Batch points(std::int64_t count) {
  auto x = torch::randn({count, 2});
  return {x, x.square().sum(1).gt(1.4).to(torch::kLong)};
}

template <class Rule>
void train(const char* name, Rule rule, const td::Batch& data) {
  torch::manual_seed(1);
  using namespace torch::nn;
  td::data::TensorLoader loader{data, {.batch_size = 50, .shuffle = true}};
  td::Trainer trainer{Sequential(Linear(2, 32), Tanh(), Linear(32, 2)), CrossEntropy{}, rule};
  trainer.fit(loader, {.epochs = 20});
  std::printf("%s: accuracy %.3f\n", name, trainer.evaluate(loader)["accuracy"]);
}

int main() {
  torch::manual_seed(2);
  const auto data = points(1000);
  const auto make = [](auto& parameters) {
    return torch::optim::RMSprop(parameters, torch::optim::RMSpropOptions(1e-2));
  };
  train("RMSprop", td::optim::adapt(make, td::schedule::cosine({.floor = 0.1})), data);

  // Whether a step is skipped is decided on the device, and this optimizer steps on the host: Skip, Stop and Fp16 have
  // to be told that it may wait there.
  const auto adagrad = [](auto& parameters) {
    return torch::optim::Adagrad(parameters, torch::optim::AdagradOptions(0.1));
  };
  td::Trainer careful{torch::nn::Linear(2, 2), CrossEntropy{}, td::optim::adapt<td::optim::HostSync::Allowed>(adagrad),
                      td::policies(td::nonfinite::Skip{})};
  auto bad = td::slice_rows(data, 0, 50);
  bad.data = bad.data * std::numeric_limits<float>::quiet_NaN();
  const auto skipped = careful.accumulate(bad)->skipped.item<float>();
  std::printf("a batch of NaN: %s\n", skipped == 1 ? "skipped" : "taken");
  train("Adagrad", td::optim::adapt(adagrad), data);
  return skipped == 1 ? 0 : 1;
}
