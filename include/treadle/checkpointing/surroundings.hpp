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
#include <cstdint>
#include <mutex>
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

/// Copies of buffers, in one operation a dtype.
///
/// Batch norm writes its statistics without a trace in their version counters, so that buffers are copied whether or
/// not they seem to change; and they are copied back past the counter, since other nodes may have saved them.
class BufferCopies {
 public:
  BufferCopies() = default;
  explicit BufferCopies(const std::vector<at::Tensor>& buffers) {
    const at::NoGradGuard no_grad;
    for (const auto& buffer : buffers) {
      auto group = std::ranges::find_if(
          groups_, [&](const auto& g) { return g.live.front().scalar_type() == buffer.scalar_type(); });
      if (group == groups_.end()) group = groups_.emplace(groups_.end());
      group->live.push_back(buffer.variable_data());
      group->saved.push_back(at::empty_like(buffer));
    }
    for (auto& group : groups_) at::_foreach_copy_(group.saved, group.live);
  }
  void restore() const {
    const at::NoGradGuard no_grad;
    for (const auto& group : groups_) at::_foreach_copy_(group.live, group.saved);
  }

 private:
  struct Group {
    std::vector<at::Tensor> live;
    std::vector<at::Tensor> saved;
  };
  std::vector<Group> groups_;
};

/// The tensors that a block holds itself.
struct BlockState {
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> weights;
};

/// Everything at once, taken before a forward pass.
class Surroundings {
 public:
  static constexpr std::size_t largest_copy = std::size_t{1} << 20;  // bytes

  Surroundings(const std::vector<at::Device>& devices, const BlockState& state) : autocast_(AutocastState::now()) {
    generators_.push_back(GeneratorState::now(at::globalContext().defaultGenerator(at::kCPU)));
    for (const auto device : devices)
      if (device.is_cuda()) generators_.push_back(GeneratorState::now(at::globalContext().defaultGenerator(device)));
    for (const auto& buffer : state.buffers) {
      if (!buffer.defined() || buffer.numel() == 0) continue;
      if (buffer.layout() == at::kStrided && buffer.nbytes() <= largest_copy)
        buffers_.push_back(buffer);
      else
        large_.push_back(Watched::now(buffer));
    }
    for (const auto& weight : state.weights)
      if (weight.defined()) weights_.push_back(Watched::now(weight));
    copies_ = BufferCopies(buffers_);
  }

  /// After the forward pass: forgets generators that it did not draw from.
  void note_end() {
    std::erase_if(generators_, [](const auto& state) { return state.is_current(); });
  }
  /// Whether a buffer that is too large to be copied each time was written since.
  bool buffer_written() const { return any_changed(large_); }
  /// Whether a weight was; under autocast none would be saved that shows it.
  bool weight_changed() const { return any_changed(weights_); }

  const AutocastState& autocast() const { return autocast_; }
  const std::vector<GeneratorState>& generators() const { return generators_; }
  const std::vector<at::Tensor>& buffers() const { return buffers_; }

  /// Generators and buffers as they were.
  void reinstate() const {
    for (const auto& state : generators_) state.restore();
    copies_.restore();
  }

 private:
  struct Watched {
    at::Tensor tensor;
    std::int64_t version;
    static Watched now(const at::Tensor& tensor) { return {tensor, static_cast<std::int64_t>(tensor._version())}; }
  };
  static bool any_changed(const std::vector<Watched>& watched) {
    return std::ranges::any_of(
        watched, [](const auto& one) { return static_cast<std::int64_t>(one.tensor._version()) != one.version; });
  }

  AutocastState autocast_;
  std::vector<GeneratorState> generators_;
  std::vector<at::Tensor> buffers_;
  std::vector<Watched> large_;
  std::vector<Watched> weights_;
  BufferCopies copies_;
};

/// Generators and buffers as they are now, put back when it ends. With the CPU's generator, which all threads share, it
/// keeps other recomputes waiting.
class PutBack {
 public:
  explicit PutBack(const std::vector<const Surroundings*>& all) {
    for (const auto* one : all)
      for (const auto& state : one->generators()) note(state.generator);
    std::vector<at::Tensor> buffers;
    for (const auto* one : all)
      for (const auto& buffer : one->buffers())
        if (std::ranges::none_of(buffers, [&](const auto& known) { return known.is_same(buffer); }))
          buffers.push_back(buffer);
    buffers_ = BufferCopies(buffers);
  }
  PutBack(const PutBack&) = delete;
  PutBack& operator=(const PutBack&) = delete;
  ~PutBack() {
    for (const auto& state : generators_) state.restore();
    buffers_.restore();
  }

 private:
  void note(const at::Generator& generator) {
    if (std::ranges::any_of(generators_, [&](const auto& known) { return known.generator == generator; })) return;
    if (generator.device().is_cpu()) alone_ = std::unique_lock(HookEngine::get().random_mutex());
    generators_.push_back(GeneratorState::now(generator));
  }

  std::unique_lock<std::recursive_mutex> alone_;
  std::vector<GeneratorState> generators_;
  BufferCopies buffers_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
