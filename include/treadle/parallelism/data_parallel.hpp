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
#include "treadle/parallelism/single_device.hpp"
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
  double agree(double value, const char*) const { return value; }
  const std::vector<at::Device>& devices() const { return replicas_.places(); }

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
    if (parts == 1) return detail::run_whole(model, batch, context, stages);
    for (std::size_t turn = 0; turn < replicas_.turns(); ++turn) {
      Shards<Batch> shards;
      for (std::int64_t i = 0; i < parts; ++i) {
        const auto replica = static_cast<std::size_t>(i);
        if (replicas_.turn(replica) != turn) continue;
        shards.push_back({replica, treadle::slice_rows(batch, rows * i / parts, rows * (i + 1) / parts)});
        if (i > 0) prepare_pass(model, shards.back().batch, context, replica);
      }
      if (!shards.empty()) run_side_by_side(model, shards, context, stages);
    }
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
  struct Shard {
    std::size_t replica;
    Batch batch;
    Loss loss = Loss::mean({}, 0);
    std::exception_ptr error{};
    std::optional<detail::Weight> weight{};
  };
  template <class Batch>
  using Shards = c10::SmallVector<Shard<Batch>, 2>;

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

  /// Forward passes of one replica a device in its thread, then counts in order, then all backward passes as one.
  template <class Model, class Batch, class Context, class Stages>
  void run_side_by_side(Model& model, Shards<Batch>& shards, Context& context, const Stages& stages) {
    threads_.run([&](std::size_t place) {
      for (auto& shard : shards) {
        if (replicas_.place(shard.replica) != place) continue;
        try {
          auto& mine = shard.replica == 0 ? model : *static_cast<Model*>(replicas_[shard.replica].model.get());
          shard.loss = stages.forward(mine, shard.batch, context_of(context, shard.replica));
        } catch (...) {
          shard.error = std::current_exception();
        }
      }
    });
    for (const auto& shard : shards)
      if (shard.error) std::rethrow_exception(shard.error);
    std::size_t counted = 0;
    for (auto& shard : shards) {
      if (shard.replica > 0) take_records(context, shard.replica);
      Loss& loss = shard.loss;
      if (loss.counts_nothing()) {
        stages.skip();
        continue;
      }
      if (loss.value.defined()) loss.value = here(loss.value);  // with its graph
      if (loss.device_count.defined()) loss.device_count = here(loss.device_count);
      shard.weight = stages.weigh(loss, shard.batch);
      ++counted;
    }
    if (counted > 1) return backward_together(shards, stages);
    for (const auto& shard : shards)
      if (shard.weight) stages.backward(shard.loss.value, *shard.weight);
  }
  template <class Batch, class Stages>
  static void backward_together(const Shards<Batch>& shards, const Stages& stages) {
    torch::autograd::variable_list values;
    torch::autograd::variable_list seeds;
    for (const auto& shard : shards) {
      if (!shard.weight) continue;
      auto root = stages.root(shard.loss.value, *shard.weight);
      values.push_back(std::move(root.value));
      seeds.push_back(std::move(root.seed));
    }
    torch::autograd::backward(values, seeds);  // the engine has a thread for each device
  }

  detail::Assignable<Factory> factory_;
  detail::Replicas replicas_;
  detail::DeviceThreads threads_;
};

}  // namespace parallelism
}  // namespace v0_1
}  // namespace treadle
