// SPDX-License-Identifier: Apache-2.0
// What crossing tests train: a tiny model with everything in it that breaks loops, its batches, and comparisons.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treadle/testing/report.hpp"
#include "treadle/treadle.hpp"

#include "support/doctest.hpp"

namespace treadle_test {

namespace td = treadle;

/// Where a program's tests run, if it says so.
inline std::optional<at::Device>& chosen_device() {
  static std::optional<at::Device> chosen;
  return chosen;
}
/// Else the first CUDA device if there is one, else the CPU: the same tests run on both.
inline at::Device device() {
  if (chosen_device()) return *chosen_device();
  return torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

/// Seeds every generator and fixes every algorithm, so that bitwise comparisons hold on CUDA too.
inline void reseed(std::uint64_t seed) {
  at::set_num_threads(1);  // more would only wait for each other over tensors of this size
  td::apply(td::Determinism{.seed = seed});
}

/// Batch norm and dropout, which are state and chance, and a layer norm. The first layer has no bias, whose gradient
/// before a batch norm is rounding noise that no two implementations share.
struct TinyNetImpl : torch::nn::Module {
  TinyNetImpl()
      : first(register_module("first", torch::nn::Linear(torch::nn::LinearOptions(6, 16).bias(false)))),
        batch_norm(register_module("batch_norm", torch::nn::BatchNorm1d(16))),
        dropout(register_module("dropout", torch::nn::Dropout(0.1))),
        second(register_module("second", torch::nn::Linear(16, 12))),
        layer_norm(register_module("layer_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})))),
        last(register_module("last", torch::nn::Linear(12, 5))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = dropout(torch::relu(batch_norm(first(x))));
    return last(torch::tanh(layer_norm(second(y))));
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d batch_norm;
  torch::nn::Dropout dropout;
  torch::nn::Linear second;
  torch::nn::LayerNorm layer_norm;
  torch::nn::Linear last;
};
TORCH_MODULE(TinyNet);

/// Two layers and no state: gradients of micro-batches add up exactly to that of the whole batch.
struct PlainNetImpl : torch::nn::Module {
  PlainNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 8))),
        last(register_module("last", torch::nn::Linear(8, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first;
  torch::nn::Linear last;
};
TORCH_MODULE(PlainNet);

/// A model with the weights that `seed` gives, on the device.
template <class Net>
Net make(std::uint64_t seed = 1) {
  reseed(seed);
  Net net;
  net->to(device());
  return net;
}

/// Mean cross entropy over rows, with the accuracy recorded.
struct CrossEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch, auto& step) const {
    const auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};
/// Cross entropy over the tokens whose target is not -100; their count stays on the device.
struct TokenLoss {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data).flatten(0, -2), batch.target.flatten(), {.ignore_index = -100});
  }
};

/// One batch of `rows` rows, the same for the same seed, on the device.
inline td::Batch make_batch(std::int64_t rows, std::uint64_t seed, at::ScalarType dtype = at::kFloat) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto data = at::randn({rows, 6}, generator, at::TensorOptions().dtype(at::kDouble));
  const auto target = at::randint(0, 5, {rows}, generator, at::TensorOptions().dtype(at::kLong));
  return {data.to(device(), dtype), target.to(device())};
}
/// One batch a number of rows.
inline std::vector<td::Batch> make_batches(const std::vector<std::int64_t>& rows, std::uint64_t seed = 100) {
  std::vector<td::Batch> batches;
  for (const auto r : rows) batches.push_back(make_batch(r, seed++));
  return batches;
}
/// `batch` with a NaN in the middle of its data.
inline td::Batch poisoned(const td::Batch& batch) {
  td::Batch bad{batch.data.clone(), batch.target};
  bad.data[bad.data.size(0) / 2][2] = std::numeric_limits<double>::quiet_NaN();
  return bad;
}

/// Copies of tensors by name.
using State = std::map<std::string, at::Tensor>;

template <class Model>
State weights(Model& model) {
  State state;
  for (const auto& item : model.named_parameters()) state[item.key()] = item.value().detach().clone();
  return state;
}
template <class Model>
State buffers(Model& model) {
  State state;
  for (const auto& item : model.named_buffers()) state[item.key()] = item.value().detach().clone();
  return state;
}
/// What the rule updates: the weights, or their fp32 masters.
template <class Trainer>
State masters(Trainer& trainer) {
  State state;
  for (const auto& parameter : trainer.parameters()) state[parameter.name] = parameter.master.detach().clone();
  return state;
}
/// State that a part of the trainer shows by name.
template <class Part>
State state_of(Part& part) {
  State state;
  part.for_each_state([&](const auto& name, at::Tensor& tensor) { state[std::string(name)] = tensor.clone(); });
  return state;
}
/// Everything that a skipped step must leave alone.
template <class Trainer>
State everything(Trainer& trainer) {
  State all;
  const auto add = [&](const std::string& prefix, State state) {
    for (auto& [name, tensor] : state) all[prefix + name] = std::move(tensor);
  };
  add("weight/", weights(trainer.model()));
  add("master/", masters(trainer));
  add("buffer/", buffers(trainer.model()));
  add("rule/", state_of(trainer.rule()));
  add("average/", state_of(trainer.averaging()));
  return all;
}

using td::testing::detail::same_bits;  // so that NaN equals NaN and 0 is not -0
/// The first difference in words, or nothing.
inline std::string difference(const State& got, const State& want) {
  for (const auto& [name, tensor] : want) {
    const auto found = got.find(name);
    if (found == got.end()) return name + " is missing";
    if (!same_bits(found->second, tensor))
      return name + " differs by " +
             std::to_string((found->second.to(at::kDouble) - tensor.to(at::kDouble)).abs().max().item<double>());
  }
  for (const auto& [name, tensor] : got)
    if (!want.contains(name)) return name + " is one too many";
  return {};
}
/// How far `got` is from `want`, as a share of the way from `start` to `want`; NaN if one of them is not finite.
inline double distance(const State& got, const State& want, const State& start) {
  double error = 0;
  double way = 0;
  for (const auto& [name, tensor] : want) {
    const auto w = tensor.to(at::kDouble);
    error += (got.at(name).to(at::kDouble) - w).pow(2).sum().item<double>();
    way += (start.at(name).to(at::kDouble) - w).pow(2).sum().item<double>();
  }
  return std::sqrt(error) / (std::sqrt(way) + 1e-30);
}
inline bool finite(const State& state) {
  for (const auto& [name, tensor] : state)
    if (!at::isfinite(tensor.to(at::kDouble)).all().item<bool>()) return false;
  return true;
}

}  // namespace treadle_test
