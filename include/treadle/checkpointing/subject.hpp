// SPDX-License-Identifier: Apache-2.0
// What checkpointing policies know: of the model, each replica of it, and each thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/checkpointing/block_call.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/surroundings.hpp"
#include "treadle/error.hpp"
#include "treadle/model.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// One model, or one replica of it.
struct ModelFacts {
  Tensors buffers{};
  Tensors weights{};
  std::unordered_map<const void*, std::string> names{};  // of its modules, by what identifies them
};

/// CUDA devices, each once.
class DeviceList {
 public:
  void add(at::Device device) {
    if (device.is_cuda() && std::ranges::find(list_, device) == list_.end()) list_.push_back(device);
  }
  void add(const at::Tensor& tensor) {
    if (tensor.defined()) add(tensor.device());
  }
  const std::vector<at::Device>& list() const { return list_; }

 private:
  std::vector<at::Device> list_;
};

/// What a policy knows of its model, and whether it was ever used.
class CheckpointSubject {
 public:
  explicit CheckpointSubject(const char* policy) : policy_(policy) {}

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    HookEngine::get();  // refuses a foreign engine before the first step
    device_ = device;
    ModelFacts facts = list(model);
    facts.buffers.clear();
    for (const auto& buffer : buffers) facts.buffers.push_back(buffer.tensor);
    attached_ = std::make_shared<const ModelFacts>(std::move(facts));
    known_.insert_or_assign(identity_of(&model), attached_);
  }
  /// Those of the model that a pass runs through: the attached one, or a replica of it.
  template <class Model>
  std::shared_ptr<const ModelFacts> facts_of(Model& model) {
    const std::lock_guard lock(mutex_);
    auto& facts = known_[identity_of(&model)];
    if (!facts) facts = std::make_shared<const ModelFacts>(list(model));
    return facts;
  }
  const std::shared_ptr<const ModelFacts>& attached() const { return attached_; }

  const char* policy() const { return policy_; }
  std::optional<at::Device> device() const { return device_; }
  /// For a block that shows no device of its own.
  void add_current_device(DeviceList& devices) const {
    if (device_ && device_->is_cuda()) devices.add(c10::impl::VirtualGuardImpl(device_->type()).getDevice());
  }
  /// What a block may read and write: a module's own buffers and weights, else all of `model`.
  template <class Block>
  BlockState state_of(Block& block, const std::shared_ptr<const ModelFacts>& model) const {
    if constexpr (requires { module_of(block)->buffers(); }) {
      return {std::make_shared<const Tensors>(module_of(block)->buffers()),
              std::make_shared<const Tensors>(module_of(block)->parameters()), false, copies_.get()};
    } else {
      if (!model) refuse_unknown();
      return {{model, &model->buffers}, {model, &model->weights}, true, copies_.get()};
    }
  }

  void note_pass() { passes_ = true; }
  void note_use() { used_ = true; }
  /// At the end of a step. Throws `ConfigError` if forward passes were made and none used the policy.
  void require_use(const char* call) const {
    if (passes_ && !used_) [[unlikely]]
      throw ConfigError(std::string(policy_) + ": the objective made a step without one call of " + call +
                        ", so that nothing would ever be recomputed; pass the model's blocks through it, or use "
                        "checkpointing::NoCheckpointing.");
  }

 private:
  template <class Model>
  static ModelFacts list(Model& model) {
    ModelFacts facts;
    if constexpr (requires { model.named_parameters(), model.named_buffers(); }) {
      const auto add_to = [](Tensors& all) {
        return [&all](const std::string&, const at::Tensor& tensor) { all.push_back(tensor); };
      };
      for_each_once(model.named_buffers(), add_to(facts.buffers));
      for_each_once(model.named_parameters(), add_to(facts.weights));
    }
    if constexpr (requires { model.named_modules({}, false); })  // without the root, which may live on the stack
      for (const auto& item : model.named_modules({}, false))
        facts.names.emplace(identity_of(item.value().get()), item.key());
    return facts;
  }
  [[noreturn, gnu::cold]] void refuse_unknown() const {
    throw ConfigError(std::string(policy_) +
                      ": a function object was given to a state that belongs to no trainer, so that the buffers which "
                      "it may write are unknown; pass a module or its holder, or call attach(model, device, buffers).");
  }

  const char* policy_;
  std::optional<at::Device> device_;
  std::shared_ptr<const ModelFacts> attached_;
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<const ModelFacts>> known_;  // replicas live as long as the trainer
  std::unique_ptr<SharedCopies> copies_ = std::make_unique<SharedCopies>();
  std::atomic<bool> passes_ = false;
  std::atomic<bool> used_ = false;
};

/// One value a thread, made at its first use.
template <class T>
class EachThread {
 public:
  T& here() {
    const auto id = std::this_thread::get_id();
    const std::lock_guard lock(mutex_);
    for (auto& [thread, value] : values_)
      if (thread == id) return *value;
    return *values_.emplace_back(id, std::make_unique<T>()).second;
  }
  template <class F>
  void for_each(F&& f) {
    const std::lock_guard lock(mutex_);
    for (auto& [thread, value] : values_) f(*value);
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::thread::id, std::unique_ptr<T>>> values_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
