// SPDX-License-Identifier: Apache-2.0
// What a block's result depends on besides its inputs and weights: random generators, autocast and buffers, as they
// were when its forward pass began.
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/runtime/random.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Autocast of the calling thread, on every kind of device that Treadle knows.
struct AutocastState {
  static constexpr std::array kinds{at::kCPU, at::kCUDA};
  std::array<bool, 2> enabled;
  std::array<at::ScalarType, 2> dtype;

  static AutocastState now() {
    AutocastState state{};
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      state.enabled[i] = at::autocast::is_autocast_enabled(kinds[i]);
      state.dtype[i] = at::autocast::get_autocast_dtype(kinds[i]);
    }
    return state;
  }
  void set() const {
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      at::autocast::set_autocast_enabled(kinds[i], enabled[i]);
      at::autocast::set_autocast_dtype(kinds[i], dtype[i]);
    }
  }
};

/// Autocast as it was, while it lives. The cast cache is left out of it: what a recompute casts must not be found by
/// the surrounding region, nor the other way round.
class AutocastAs {
 public:
  explicit AutocastAs(const AutocastState& state)
      : before_(AutocastState::now()), cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(false);
    state.set();
  }
  AutocastAs(const AutocastAs&) = delete;
  AutocastAs& operator=(const AutocastAs&) = delete;
  ~AutocastAs() {
    before_.set();
    at::autocast::set_autocast_cache_enabled(cache_);
    at::autocast::decrement_nesting();
  }

 private:
  AutocastState before_;
  bool cache_;
};

using Tensors = std::vector<at::Tensor>;

/// Whether every write to a buffer raises its version: batch norm writes its statistics, which have one dimension and
/// are floating, without.
inline bool writes_show(const at::Tensor& buffer) {
  return buffer.dim() > 1 || !at::isFloatingType(buffer.scalar_type());
}

/// Copies of buffers whose writes show, such as masks: one a version, for all calls.
class SharedCopies {
 public:
  at::Tensor of(const at::Tensor& buffer) {
    const std::lock_guard lock(mutex_);
    auto& known = known_[buffer.unsafeGetTensorImpl()];
    const auto version = static_cast<std::int64_t>(buffer._version());
    if (!known.copy.defined() || known.version != version || known.memory != buffer.const_data_ptr()) {
      const at::NoGradGuard no_grad;
      known = {buffer, buffer.variable_data().clone(), version, buffer.const_data_ptr()};
    }
    return known.copy;
  }

 private:
  struct Known {
    at::Tensor buffer;  // keeps its address
    at::Tensor copy;
    std::int64_t version = 0;
    const void* memory = nullptr;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Known> known_;
};

/// Copies of buffers, in one operation a dtype.
///
/// They are copied back past the version counters, since other nodes may have saved them.
class BufferCopies {
 public:
  BufferCopies() = default;
  /// `shared`, if there is one, keeps the copies of buffers whose writes show.
  explicit BufferCopies(const Tensors& buffers, SharedCopies* shared = nullptr) {
    const at::NoGradGuard no_grad;
    for (const auto& buffer : buffers) {
      auto group = std::ranges::find_if(
          groups_, [&](const auto& g) { return g.live.front().scalar_type() == buffer.scalar_type(); });
      if (group == groups_.end()) group = groups_.emplace(groups_.end());
      group->live.push_back(buffer.variable_data());
      const bool own = !shared || !writes_show(buffer);
      group->saved.push_back(own ? at::empty_like(buffer) : shared->of(buffer));
      if (own) {
        group->own_live.push_back(group->live.back());
        group->own.push_back(group->saved.back());
      }
    }
    for (auto& group : groups_) {
      if (!group.own.empty()) at::_foreach_copy_(group.own, group.own_live);
      group.own.clear();
      group.own_live.clear();
    }
  }
  void restore() const {
    const at::NoGradGuard no_grad;
    for (const auto& group : groups_) at::_foreach_copy_(group.live, group.saved);
  }

 private:
  struct Group {
    Tensors live;
    Tensors saved;
    Tensors own_live;  // those to copy now
    Tensors own;
  };
  std::vector<Group> groups_;
};

/// The tensors that a block may read and write besides its inputs: a module's own, or all of a model's where it is a
/// function object.
struct BlockState {
  std::shared_ptr<const Tensors> buffers;
  std::shared_ptr<const Tensors> weights;
  bool of_model = false;
  SharedCopies* copies = nullptr;
};

/// Everything at once, taken before a forward pass.
class Surroundings {
 public:
  static constexpr std::size_t largest_copy = std::size_t{1} << 20;  // bytes

  /// `devices` are those whose default generators the block may draw from, besides the CPU's.
  Surroundings(const std::vector<at::Device>& devices, const BlockState& state)
      : autocast_(AutocastState::now()), of_model_(state.of_model) {
    generators_.push_back(GeneratorState::now(at::globalContext().defaultGenerator(at::kCPU)));
    for (const auto device : devices)
      if (device.is_cuda()) generators_.push_back(GeneratorState::now(at::globalContext().defaultGenerator(device)));
    auto large = std::make_shared<Tensors>();
    for (const auto& buffer : *state.buffers) {
      if (!buffer.defined() || buffer.numel() == 0) continue;
      if (buffer.layout() == at::kStrided && buffer.nbytes() <= largest_copy)
        buffers_.push_back(buffer);
      else
        large->push_back(buffer);
    }
    large_ = Watched(std::move(large));
    weights_ = Watched(state.weights);
    // Within a recompute buffers are older than their version says.
    copies_ = BufferCopies(buffers_, is_recomputing() ? nullptr : state.copies);
  }

  /// After the forward pass: forgets generators that it did not draw from.
  void note_end() {
    std::erase_if(generators_, [](const auto& state) { return state.is_current(); });
  }
  /// Whether a buffer that is too large to be copied each time was written since.
  bool buffer_written() const { return large_.changed(); }
  /// Whether a weight was; under autocast none would be saved that shows it.
  bool weight_changed() const { return weights_.changed(); }
  /// Whether the weights are all of the model's, of which the block may use some.
  bool of_model() const { return of_model_; }

  const AutocastState& autocast() const { return autocast_; }
  const std::vector<GeneratorState>& generators() const { return generators_; }
  const Tensors& buffers() const { return buffers_; }

  /// Generators and buffers as they were.
  void reinstate() const {
    for (const auto& state : generators_) state.restore();
    copies_.restore();
  }

 private:
  // Versions only go up, so that their sum tells whether one has.
  class Watched {
   public:
    Watched() = default;
    explicit Watched(std::shared_ptr<const Tensors> tensors) : tensors_(std::move(tensors)), versions_(sum()) {}
    bool changed() const { return versions_ != sum(); }

   private:
    std::int64_t sum() const {
      std::int64_t versions = 0;
      for (const auto& tensor : *tensors_)
        if (tensor.defined() && !tensor.is_inference())
          versions += tensor.unsafeGetTensorImpl()->version_counter().current_version();
      return versions;
    }
    std::shared_ptr<const Tensors> tensors_;
    std::int64_t versions_ = 0;
  };

  AutocastState autocast_;
  bool of_model_;
  std::vector<GeneratorState> generators_;
  Tensors buffers_;
  Watched large_;
  Watched weights_;
  BufferCopies copies_;
};

/// Generators and buffers as they are now, put back at `end()`. Other recomputes wait for the generators, which all
/// threads share.
class PutBack {
 public:
  explicit PutBack(const std::vector<const Surroundings*>& all) {
    std::vector<at::Generator> used;
    for (const auto* one : all)
      for (const auto& state : one->generators())
        if (std::ranges::find(used, state.generator) == used.end()) used.push_back(state.generator);
    // In one order everywhere: the CPU, whose index is -1, then devices.
    std::ranges::sort(used, {}, [](const auto& g) { return g.device().is_cpu() ? -1 : int{g.device().index()}; });
    for (const auto& generator : used) {
      alone_.emplace_back(HookEngine::get().random_mutex(generator.device()));
      generators_.push_back(GeneratorState::now(generator));
    }
    Tensors buffers;
    for (const auto* one : all)
      for (const auto& buffer : one->buffers())
        if (std::ranges::none_of(buffers, [&](const auto& known) { return known.is_same(buffer); }))
          buffers.push_back(buffer);
    buffers_ = BufferCopies(buffers);
  }
  PutBack(const PutBack&) = delete;
  PutBack& operator=(const PutBack&) = delete;
  ~PutBack() {
    try {
      end();
    } catch (...) {  // on the way of another error, which tells more
    }
  }
  void end() {
    if (std::exchange(ended_, true)) return;
    for (const auto& state : generators_) state.restore();
    buffers_.restore();
  }

 private:
  std::vector<std::unique_lock<std::recursive_mutex>> alone_;
  std::vector<GeneratorState> generators_;
  BufferCopies buffers_;
  bool ended_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
