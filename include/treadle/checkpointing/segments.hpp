// SPDX-License-Identifier: Apache-2.0
// What the policies that recompute blocks have in common: which blocks make one checkpoint, in each thread of its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "treadle/checkpointing/frame.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/error.hpp"
#include "treadle/invoke_block.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What a checkpointing policy knows of its model, and whether it was ever used.
class CheckpointSubject {
 public:
  explicit CheckpointSubject(const char* policy) : policy_(policy) {}

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    HookEngine::get();  // refuses a foreign engine before the first step
    device_ = device;
    for (const auto& buffer : buffers) buffers_.push_back(buffer.tensor);
    if constexpr (requires { model.named_modules(); }) {
      auto names = std::make_shared<ModuleNames>();
      for (const auto& item : model.named_modules())
        if constexpr (requires { item.key(), item.value().get(); })
          names->emplace(identity_of(item.value().get()), item.key());
      names_ = std::move(names);
    }
  }
  const char* policy() const { return policy_; }
  std::optional<at::Device> device() const { return device_; }
  std::shared_ptr<const ModuleNames> names() const { return names_; }
  /// What a block may read and write: a module's own buffers and weights, else all buffers of the model.
  template <class Block>
  BlockState state_of(Block& block) const {
    if constexpr (requires { module_of(block)->buffers(); }) {
      return {module_of(block)->buffers(), module_of(block)->parameters()};
    } else {
      if (!device_) refuse_unknown();
      return {buffers_, {}};
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
  [[noreturn, gnu::cold]] void refuse_unknown() const {
    throw ConfigError(std::string(policy_) +
                      ": a function object was given to a state that belongs to no trainer, so that the buffers which "
                      "it may write are unknown; pass a module or its holder, or call attach(model, device, buffers).");
  }

  const char* policy_;
  std::optional<at::Device> device_;
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<const ModuleNames> names_;
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

/// A forward pass of one thread.
struct ForwardPass {
  std::weak_ptr<Frame> open;  // which takes further blocks
  std::weak_ptr<Frame> last;  // that saved something
  std::size_t blocks = 0;
  int depth = 0;        // blocks within blocks
  bool scoped = false;  // whether the objective is known to run
};

/// Checkpoints of `length` blocks each; 0 stands for the square root of how many blocks the pass before had.
class Segments {
 public:
  Segments(const char* policy, std::int64_t length) : subject_(policy), length_(static_cast<std::size_t>(length)) {}
  /// A fresh one: a copied model's passes are its own.
  Segments(const Segments& other) : subject_(other.subject_.policy()), length_(other.length_) {}
  Segments& operator=(const Segments&) = delete;

  /// The block's result. Its activations are dropped, and computed again in the backward pass.
  template <class Block, class... Inputs>
  auto operator()(Block&& block, Inputs&&... inputs) {
    if (!at::GradMode::is_enabled()) return invoke_block(block, std::forward<Inputs>(inputs)...);
    subject_.note_use();
    auto& pass = passes_.here();
    const bool nested = pass.depth > 0 || is_recomputing();
    if (!nested && !pass.scoped && (pass.last.expired() || pass.last.lock()->closed())) end(pass);
    auto frame = nested ? nullptr : pass.open.lock();
    if (!frame || frame->closed()) frame = std::make_shared<Frame>(subject_.policy(), subject_.names());
    if (!nested) pass.open = frame, ++pass.blocks;
    const auto state = subject_.state_of(block);
    const DepthScope deeper(pass.depth);
    try {
      auto result = frame->forward(pass.blocks, subject_.device(), state, std::forward<Block>(block),
                                   std::forward<Inputs>(inputs)...);
      if (!nested && frame->calls() >= length()) pass.open.reset();
      if (!nested && frame->saved_anything()) pass.last = frame;
      return result;
    } catch (...) {
      frame->close();  // what it saved is of no use to a next block
      throw;
    }
  }
  template <class Region, class... Inputs>
  decltype(auto) cheap(std::string_view /*name*/, Region&& region, Inputs&&... inputs) {
    return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
  }

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    subject_.attach(model, device, buffers);
  }
  /// Held over an objective.
  auto pass() {
    struct Scope {
      Segments& segments;
      ForwardPass& pass;
      explicit Scope(Segments& s) : segments(s), pass(s.passes_.here()) {
        s.end(pass);
        s.subject_.note_pass();
        pass.scoped = true;
      }
      Scope(const Scope&) = delete;
      Scope& operator=(const Scope&) = delete;
      ~Scope() {
        segments.end(pass);
        pass.scoped = false;
      }
    };
    return Scope(*this);
  }
  /// Whether what runs now has run before, and must leave no second trace.
  static bool is_repeating() { return is_recomputing(); }
  void begin_step() const {}
  void end_step() const { subject_.require_use("step.checkpoint(block, x)"); }
  void reset() {
    passes_.for_each([](ForwardPass& pass) { pass.open.reset(); });
  }

 private:
  void end(ForwardPass& pass) {
    pass.open.reset();
    if (pass.blocks > 0) blocks_ = pass.blocks;
    pass.blocks = 0;
  }
  std::size_t length() const {
    return length_ > 0 ? length_ : static_cast<std::size_t>(std::ceil(std::sqrt(static_cast<double>(blocks_.load()))));
  }

  CheckpointSubject subject_;
  std::size_t length_;
  std::atomic<std::size_t> blocks_ = 0;
  EachThread<ForwardPass> passes_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
