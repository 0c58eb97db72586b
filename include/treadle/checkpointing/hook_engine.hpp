// SPDX-License-Identifier: Apache-2.0
// Saved-tensor hooks without Python: an autograd engine that is LibTorch's own but for the one question that each save
// asks of it.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Makes the hooks of one saved tensor; lives while a scope of it is open.
class [[gnu::visibility("default")]] HookSource {
 public:
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;

 protected:
  ~HookSource() = default;
};

/// LibTorch's engine, which asks the innermost open source of the calling thread for hooks.
///
/// There is one a process, and it is never destroyed: its threads may outlive everything. Shared objects find each
/// other's, and talk to it through virtual calls alone, so that it does not matter whether their symbols are shared.
class [[gnu::visibility("default")]] HookEngine : public torch::autograd::Engine {
 public:
  /// The process's engine, installed at the first call. Throws `ConfigError` where another program part, such as
  /// Python's torch, has put in its own: a foreign engine is never replaced.
  static HookEngine& get() {
    auto& current = torch::autograd::Engine::get_default_engine();
    if (auto* ours = dynamic_cast<HookEngine*>(&current)) [[likely]]
      return *ours;
    return install();
  }

  /// The open sources of the calling thread, innermost last.
  virtual std::vector<HookSource*>& sources() {
    static thread_local std::vector<HookSource*> open;
    return open;
  }
  /// How many recomputes the calling thread is inside of.
  virtual int& recomputes() {
    static thread_local int depth = 0;
    return depth;
  }

  /// Held while a recompute replays the default generator of `device`, which all threads share.
  virtual std::recursive_mutex& random_mutex(at::Device device) {
    static std::array<std::recursive_mutex, 129> mutexes;  // one for the CPU, and for each index that a device can have
    return mutexes.at(device.is_cpu() ? 0 : static_cast<std::size_t>(device.index()) + 1);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto& open = sources();
    return open.empty() ? nullptr : open.back()->make_hooks();
  }

 private:
  HookEngine();

  static torch::autograd::Engine& instance() {
    static auto* engine = new HookEngine;  // its threads may outlive everything
    return *engine;
  }
  [[gnu::cold, gnu::noinline]] static HookEngine& install() {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    auto& current = torch::autograd::Engine::get_default_engine();
    if (auto* ours = dynamic_cast<HookEngine*>(&current)) return *ours;
    if (&current != &torch::autograd::Engine::get_base_engine())
      throw ConfigError(
          "checkpointing: another part of the program, such as Python's torch, has installed an autograd engine of its "
          "own, which saved-tensor hooks would have to replace; use checkpointing::NoCheckpointing in such a process.");
    torch::autograd::set_default_engine_stub(&instance);
    return static_cast<HookEngine&>(instance());
  }
};

// LibTorch starts the threads of devices once a process, for the engine that runs first, which may have been its own.
inline HookEngine::HookEngine() {
  get_base_engine().initialize_device_threads_pool();
  start_device_threads();
}

/// Opens a source on the calling thread while it lives.
class HookScope {
 public:
  explicit HookScope(HookSource* source) : sources_(HookEngine::get().sources()) { sources_.push_back(source); }
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope() { sources_.pop_back(); }

 private:
  std::vector<HookSource*>& sources_;
};

/// Counts one level more while it lives.
class DepthScope {
 public:
  explicit DepthScope(int& depth) : depth_(depth) { ++depth_; }
  DepthScope(const DepthScope&) = delete;
  DepthScope& operator=(const DepthScope&) = delete;
  ~DepthScope() { --depth_; }

 private:
  int& depth_;
};

/// Whether the calling thread computes something a second time.
inline bool is_recomputing() {
  return HookEngine::get().recomputes() > 0;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
