// SPDX-License-Identifier: Apache-2.0
// One process, a thread a device: each micro-batch is cut into shards, which replicas of the model take side by side.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/error.hpp"
#include "treadle/loss.hpp"
#include "treadle/model.hpp"
#include "treadle/parallelism/device_threads.hpp"
#include "treadle/parallelism/replica_source.hpp"
#include "treadle/parallelism/replicas.hpp"
#include "treadle/runtime/device.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/runtime/random.hpp"

namespace treadle {
inline namespace v0_1 {
namespace parallelism {

/// As `DataParallel`, with replicas that `factory()` makes; `data_parallel` makes it.
template <class Factory = detail::NoFactory>
struct BasicDataParallel {
  using policy_axis = axis::Parallelism;
  static constexpr bool replicates = true;
  static constexpr bool slices = true;
  static constexpr bool processes = false;
  static constexpr bool threads = true;
  static constexpr bool finds_unused = false;

  std::vector<at::Device> devices{};  ///< the first holds the model; default: all CUDA devices, else the CPU
  detail::Assignable<Factory> factory{};

  bool operator==(const BasicDataParallel& other) const { return devices == other.devices; }
  void check() const {
    if (!factory)
      throw ConfigError(
          "parallelism::data_parallel: the policy was made without its factory; make it by data_parallel(devices, "
          "factory).");
    for (const auto device : devices)
      if (device.type() != devices.front().type())
        throw ConfigError("parallelism::DataParallel: devices are of two kinds, " + devices.front().str() + " and " +
                          device.str() + "; name devices of one kind.");
  }

  class State;
};

/// One process that drives several devices: the rows of each micro-batch go, as evenly as possible, to replicas of the
/// model that stay from step to step, and their gradients to the first.
///
/// A shard counts as a micro-batch of the window, so the gradient is the mean over everything that was counted. The
/// replicas are `clone()`s (`torch::nn::Cloneable`); for models without, `data_parallel(devices, factory)`. The
/// objective is called from a thread a device at once. Replicas whose device is named twice run one after the other.
using DataParallel = BasicDataParallel<>;

/// Data parallelism for any model: `factory()` makes a module holder, or a shared_ptr, of the trainer's model type.
template <class Factory>
BasicDataParallel<Factory> data_parallel(std::vector<at::Device> devices, Factory factory) {
  return {std::move(devices), std::move(factory)};
}

template <class Factory>
class BasicDataParallel<Factory>::State {
 public:
  /// `apart`: treats replicas on one device as if each had one to itself, which tests do.
  explicit State(const BasicDataParallel& policy, bool apart = false)
      : factory_(policy.factory), replicas_(resolve(policy.devices), apart), threads_(replicas_.places()) {}

  at::Device device() const { return replicas_.device(0); }
  std::int64_t rank() const { return 0; }
  std::int64_t world_size() const { return 1; }
  double agree(double value) const { return value; }

  /// Makes the replicas. Throws `ConfigError` where they are not like the model.
  template <class Model>
  void prepare(Model& model, ParameterList& parameters, BufferList& buffers) {
    if constexpr (treadle::model<Model>) {
      std::deque<GeneratorGuard> untouched;  // by a replica's own initial weights, which are thrown away
      for (const auto device : replicas_.places()) untouched.emplace_back(device);
      replicas_.make(model, parameters, buffers, [&] { return detail::make_replica(model, factory_); });
    }
  }
  void begin_window() {
    if (replicas_.size() > 1) replicas_.refresh();
  }

  template <class Model, class Batch, class Context, class Stages>
  void run(Model& model, const Batch& batch, bool /*reduces*/, Context& context, const Stages& stages) {
    const std::int64_t rows = treadle::rows(batch);
    const std::int64_t parts = std::clamp<std::int64_t>(rows, 1, static_cast<std::int64_t>(replicas_.size()));
    if (parts == 1) {
      const Loss loss = stages.forward(model, batch, context);
      if (loss.counts_nothing()) return stages.skip();
      return stages.backward(loss.value, stages.weigh(loss, batch));
    }
    Shards<Batch> shards;
    for (std::int64_t i = 0; i < parts; ++i) {
      shards.push_back(treadle::slice_rows(batch, rows * i / parts, rows * (i + 1) / parts));
      if (i > 0) prepare_pass(model, shards.back(), context, static_cast<std::size_t>(i));
    }
    auto losses = forward(model, shards, context, stages);
    for (std::size_t i = 1; i < shards.size(); ++i) take_records(context, i);
    backward(shards, losses, stages);
  }

  template <class Window>
  void finish_reduction(Window&) {
    replicas_.add_gradients();
  }
  void reset() { replicas_.drop(); }
  void report() const {}
  template <class Stages>
  void abandon(const Stages&) const {}

 private:
  template <class Batch>
  using Shards = c10::SmallVector<Batch, 4>;
  using Losses = c10::SmallVector<Loss, 4>;

  static std::vector<at::Device> resolve(const std::vector<at::Device>& wanted) {
    std::vector<at::Device> devices;
    for (const auto device : wanted) devices.push_back(resolve_device(device));
    for (int i = 0; wanted.empty() && i < cuda_device_count(); ++i)
      devices.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(i));
    if (devices.empty()) devices.emplace_back(at::kCPU);
    return devices;
  }

  // On the caller's thread, whose streams the threads take over.
  template <class Model, class Batch, class Context>
  void prepare_pass(Model& model, Batch& shard, Context& context, std::size_t i) {
    treadle::for_each_tensor(shard, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = to_device(tensor, replicas_.device(i));
    });
    if constexpr (treadle::model<Model>) replicas_.follow_mode(model, i);
    auto& replica = replicas_[i];
    if constexpr (requires { context.checkpoint; })
      if (!replica.context) replica.context = std::make_shared<Context>(context.checkpoint, *replica.names);
  }
  // Names are interned and values added up without a lock, so that each replica records for itself.
  template <class Context>
  Context& context_of(Context& context, std::size_t i) {
    if constexpr (requires { context.checkpoint; })
      return i == 0 ? context : *static_cast<Context*>(replicas_[i].context.get());
    return context;
  }
  template <class Context>
  void take_records(Context& context, std::size_t i) {
    if constexpr (requires { context.records(); }) {
      auto& records = context_of(context, i).records();
      for (const auto& record : records)  // its name lives as long as the replica does
        context.records().add(record.name, here(record.sum), record.count,
                              record.device_count.defined() ? here(record.device_count) : at::Tensor());
      records.restart();
    }
  }
  at::Tensor here(const at::Tensor& tensor) const {
    return is_on(tensor, device()) ? tensor : tensor.to(device(), tensor.scalar_type(), /*non_blocking=*/true);
  }

  /// The losses of all shards, after the last thread has come back; then throws what the first shard to fail has
  /// thrown.
  template <class Model, class Batch, class Context, class Stages>
  Losses forward(Model& model, const Shards<Batch>& shards, Context& context, const Stages& stages) {
    Losses losses(shards.size(), Loss::mean({}, 0));
    c10::SmallVector<std::exception_ptr, 4> errors(shards.size());
    threads_.run([&](std::size_t place) {
      for (std::size_t i = 0; i < shards.size(); ++i) {
        if (replicas_.place(i) != place) continue;
        try {
          auto& mine = i == 0 ? model : *static_cast<Model*>(replicas_[i].model.get());
          losses[i] = stages.forward(mine, shards[i], context_of(context, i));
        } catch (...) {
          errors[i] = std::current_exception();
          return;
        }
      }
    });
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
    return losses;
  }

  /// Counts all shards in their order. Then the backward passes: of one replica a device at once, since those of one
  /// device must not meet.
  template <class Batch, class Stages>
  void backward(const Shards<Batch>& shards, Losses& losses, const Stages& stages) {
    c10::SmallVector<std::optional<detail::Weight>, 4> weights(shards.size());
    std::size_t turns = 0;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      Loss& loss = losses[i];
      turns = std::max(turns, replicas_.turn(i) + 1);
      if (loss.counts_nothing()) {
        stages.skip();
        continue;
      }
      if (loss.value.defined()) loss.value = here(loss.value);  // with its graph
      if (loss.device_count.defined()) loss.device_count = here(loss.device_count);
      weights[i] = stages.weigh(loss, shards[i]);
    }
    for (std::size_t turn = 0; turn < turns; ++turn) {
      c10::SmallVector<std::size_t, 4> now;
      for (std::size_t i = 0; i < shards.size(); ++i)
        if (weights[i] && replicas_.turn(i) == turn) now.push_back(i);
      if (now.size() == 1) {
        stages.backward(losses[now[0]].value, *weights[now[0]]);
      } else if (!now.empty()) {
        torch::autograd::variable_list values;
        torch::autograd::variable_list seeds;
        for (const auto i : now) {
          auto root = stages.root(losses[i].value, *weights[i]);
          values.push_back(std::move(root.value));
          seeds.push_back(std::move(root.seed));
        }
        torch::autograd::backward(values, seeds);  // one thread a device is the engine's own way
      }
      for (const auto i : now) losses[i].value.reset();
    }
  }

  detail::Assignable<Factory> factory_;
  detail::Replicas replicas_;
  detail::DeviceThreads threads_;
};

}  // namespace parallelism
}  // namespace v0_1
}  // namespace treadle
