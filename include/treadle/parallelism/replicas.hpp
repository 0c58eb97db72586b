// SPDX-License-Identifier: Apache-2.0
// Copies of a model that stay, one for each further device, and what keeps them like the first.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/model.hpp"
#include "treadle/parallelism/flat_copies.hpp"
#include "treadle/parallelism/replica_source.hpp"
#include "treadle/records.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Named tensors of a model, each once, in its order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
template <class Items>
NamedTensors each_once(const Items& items) {
  NamedTensors tensors;
  for_each_once(items, [&](const std::string& name, const at::Tensor& tensor) { tensors.emplace_back(name, tensor); });
  return tensors;
}

/// A further copy of the model.
struct Replica {
  at::Device device;
  std::size_t place;            // number of the thread that runs it
  std::size_t turn;             // how many replicas that thread runs before it
  std::shared_ptr<void> model;  // of the type that it was made with
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::unique_ptr<NameTable> names = std::make_unique<NameTable>();
  std::shared_ptr<void> context{};
};

/// The model's replicas. Number 0 is the model itself, which stands first in every order.
///
/// The weights of replicas on one device are one memory, the first model's on its device; gradients and buffers are
/// each one's own. What a replica's buffers became in a window is thrown away: the first model's count.
class Replicas {
 public:
  /// Which of `places` runs each of `devices`; with `apart` each has a place to itself.
  Replicas(const std::vector<at::Device>& devices, bool apart) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const auto found = std::ranges::find(places_, devices[i]);
      const auto place = static_cast<std::size_t>(found - places_.begin());
      const bool fresh = apart || found == places_.end();
      place_of_.push_back(fresh ? places_.size() : place);
      turn_of_.push_back(static_cast<std::size_t>(std::ranges::count(place_of_, place_of_.back()) - 1));
      if (fresh) places_.push_back(devices[i]);
    }
  }

  /// One device a thread.
  const std::vector<at::Device>& places() const { return places_; }
  std::size_t size() const { return replicas_.size() + 1; }
  std::size_t place(std::size_t i) const { return place_of_[i]; }
  std::size_t turn(std::size_t i) const { return turn_of_[i]; }
  std::size_t turns() const { return *std::ranges::max_element(turn_of_) + 1; }
  at::Device device(std::size_t i) const { return places_[place_of_[i]]; }
  Replica& operator[](std::size_t i) { return replicas_[i - 1]; }

  /// Makes one replica for each further device by `make()`.
  template <class M, class Make>
  void make(M& first, const ParameterList& parameters, const BufferList& buffers, Make&& make) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> sources;
    for (const auto& parameter : parameters) {
      first_.push_back(parameter);
      sources.push_back(parameter.model);
    }
    weights_ = FlatBroadcast(std::move(sources));
    std::vector<at::Tensor> statistics;
    for (const auto& buffer : buffers) statistics.push_back(buffer.tensor);
    buffers_ = FlatBroadcast(std::move(statistics));
    modules_ = submodules(first);
    for (std::size_t i = 1; i < place_of_.size(); ++i) {
      const std::shared_ptr<M> copy = make();
      if (!copy || copy.get() == &first || is_known(copy.get()))
        throw ConfigError(
            "parallelism::data_parallel: the factory gave no model, or one that it had given before; "
            "let it make a new model each time.");
      copy->to(device(i));
      auto& replica = replicas_.emplace_back(Replica{device(i), place(i), turn(i), copy, {}, {}, submodules(*copy)});
      require("submodule", replica.modules.size(), modules_.size());
      replica.parameters = match("parameter", parameters, each_once(copy->named_parameters()));
      replica.buffers = match("buffer", buffers, each_once(copy->named_buffers()));
      adopt(i, replica);
    }
    weights_.run();
    buffers_.run();
  }

  /// Before a window: weights, buffers and what is frozen, as they are in the first model.
  void refresh() {
    for (auto& replica : replicas_)
      for (std::size_t k = 0; k < first_.size(); ++k)
        if (const bool trained = first_[k].model.requires_grad(); replica.parameters[k].requires_grad() != trained)
          replica.parameters[k].set_requires_grad(trained);
    weights_.run();
    buffers_.run();
  }
  /// Before a forward pass of replica `i`: the training mode of every submodule.
  template <class M>
  void follow_mode(const M& first, std::size_t i) {
    auto& replica = (*this)[i];
    auto& copy = *static_cast<M*>(replica.model.get());
    if (copy.is_training() != first.is_training()) first.is_training() ? copy.train() : copy.eval();
    if constexpr (torch_module<M>)  // parents stand before children, which have the last word
      for (std::size_t k = 0; k < modules_.size(); ++k) take_mode(*modules_[k], *replica.modules[k]);
  }
  /// After a window: adds all gradients to the first model's, replica by replica.
  void add_gradients() {
    const at::NoGradGuard no_grad;
    for (auto& replica : replicas_) {
      for (std::size_t k = 0; k < first_.size(); ++k)
        if (at::Tensor& part = replica.parameters[k].mutable_grad(); part.defined())
          add(first_[k], std::exchange(part, at::Tensor()));
      add_pairwise(sums_, parts_);
      sums_.clear();
      parts_.clear();
    }
  }
  /// Forgets gradients and records.
  void drop() {
    for (auto& replica : replicas_) {
      for (const auto& parameter : replica.parameters) parameter.mutable_grad().reset();
      replica.context.reset();
    }
  }

 private:
  template <class M>
  static std::vector<std::shared_ptr<torch::nn::Module>> submodules(M& m) {
    if constexpr (torch_module<M>)
      return m.modules(/*include_self=*/false);
    else
      return {};
  }
  template <class Module>  // torch::nn::Module, which is complete only where a model is one
  static void take_mode(const Module& first, Module& copy) {
    if (copy.is_training() != first.is_training()) copy.train(first.is_training());
  }
  bool is_known(const void* model) const {
    return std::ranges::any_of(replicas_, [&](const auto& replica) { return replica.model.get() == model; });
  }

  static constexpr const char* cure = "; let clone(), or the factory, make the same model each time.";
  static void require(const char* kind, std::size_t got, std::size_t want) {
    if (got != want)
      throw ConfigError("parallelism::DataParallel: a replica has " + std::to_string(got) + " " + kind +
                        "s, the model " + std::to_string(want) + cure);
  }
  static const at::Tensor& tensor_of(const Parameter& parameter) { return parameter.model; }
  static const at::Tensor& tensor_of(const Buffer& buffer) { return buffer.tensor; }
  // A replica's tensors, if they are of the names and shapes of the first's and not the same ones.
  template <class List>
  static std::vector<at::Tensor> match(const char* kind, const List& first, const NamedTensors& copies) {
    require(kind, copies.size(), first.size());
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const at::Tensor& want = tensor_of(first[i]);
      const auto& [name, tensor] = copies[i];
      if (name != first[i].name || tensor.sizes() != want.sizes())
        throw ConfigError(std::string("parallelism::DataParallel: a replica has ") + kind + " '" + name +
                          "' of sizes " + c10::str(tensor.sizes()) + " where the model has '" + first[i].name +
                          "' of sizes " + c10::str(want.sizes()) + cure);
      if (tensor.is_same(want))
        throw ConfigError(std::string("parallelism::DataParallel: a replica has the model's own ") + kind + " '" +
                          name + "'" + cure);
      tensors.push_back(tensor);
    }
    return tensors;
  }

  // Gives a replica its memory: weights of its device, whoever got them first, and buffers of its own.
  void adopt(std::size_t i, Replica& replica) {
    std::vector<at::Tensor> weights;
    if (turn(i) == 0) {
      weights = weights_.add_target(replica.device);
    } else {
      std::size_t owner = 0;
      while (place(owner) != replica.place) ++owner;
      for (std::size_t k = 0; k < first_.size(); ++k)
        weights.push_back((owner == 0 ? first_[k].model : (*this)[owner].parameters[k]).detach());
    }
    for (std::size_t k = 0; k < weights.size(); ++k) {
      const at::Tensor& model = first_[k].model;
      replica.parameters[k].set_data(weights[k]);
      replica.parameters[k].set_requires_grad(model.requires_grad());
      if (model.grad_dtype() != replica.parameters[k].grad_dtype())
        replica.parameters[k].set_grad_dtype(model.grad_dtype());
    }
    const auto statistics = buffers_.add_target(replica.device);
    for (std::size_t k = 0; k < statistics.size(); ++k) replica.buffers[k].set_data(statistics[k]);
  }

  // Notes what is to be added up; low-precision gradients of a weight with a master are added in the master's dtype.
  void add(const Parameter& first, at::Tensor part) {
    at::Tensor& sum = first.model.mutable_grad();
    if (!sum.defined() || sum.is_sparse() || part.is_sparse()) {
      part = part.to(first.model.device(), /*non_blocking=*/true);
      if (sum.defined()) part = sum.is_sparse() ? at::add(part, sum) : at::add(sum, part);
      sum = std::move(part);
      return;
    }
    if (sum.scalar_type() != first.master.scalar_type()) sum = sum.to(first.master.scalar_type());
    sums_.push_back(sum);
    parts_.push_back(std::move(part));
  }

  std::vector<at::Device> places_;
  std::vector<std::size_t> place_of_;  // by number
  std::vector<std::size_t> turn_of_;
  std::vector<Replica> replicas_;  // those from number 1 on
  std::vector<Parameter> first_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  FlatBroadcast weights_;
  FlatBroadcast buffers_;
  std::vector<at::Tensor> sums_;  // scratch, kept for its capacity
  std::vector<at::Tensor> parts_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
