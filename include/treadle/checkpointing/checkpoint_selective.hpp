// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/checkpointing/regions.hpp"
#include "treadle/checkpointing/subject.hpp"
#include "treadle/error.hpp"
#include "treadle/invoke_block.hpp"
#include "treadle/runtime/glob.hpp"

namespace treadle {
inline namespace v0_1 {
namespace checkpointing {

/// Recomputes regions that the model has marked as cheap, `step.checkpoint.cheap(name, f, x...)`, and keeps the rest.
///
/// What a region saves within is dropped, and so is what it produces, wherever that is saved: by the next operation
/// too. It is recomputed from the region's inputs, which may come from regions themselves. `step.checkpoint(block, x)`
/// is `block(x)`.
struct CheckpointSelective {
  using policy_axis = axis::Checkpointing;
  static constexpr bool recomputes = true;
  static constexpr bool offloads = false;

  std::vector<std::string> regions{"norm", "gelu", "cast"};  ///< which to recompute: names or patterns (`*`, `?`)

  bool operator==(const CheckpointSelective&) const = default;
  void check() const {
    if (regions.empty())
      throw ConfigError(
          "checkpointing::CheckpointSelective: regions is empty, so that nothing would be recomputed; name regions of "
          "the model, as in {\"norm\", \"gelu\"}, or use checkpointing::NoCheckpointing.");
  }

  class State;
};

class CheckpointSelective::State {
  struct Pass {
    std::shared_ptr<detail::RegionOutputs> outputs = std::make_shared<detail::RegionOutputs>();
    std::shared_ptr<const detail::ModelFacts> model{};  // that it runs with
    bool open = false;
  };

 public:
  State() : State(CheckpointSelective{}) {}
  explicit State(const CheckpointSelective& policy) : policy_(policy), subject_("checkpointing::CheckpointSelective") {}
  /// A fresh one: a copied model's passes are its own.
  State(const State& other) : State(other.policy_) {}
  State& operator=(const State&) = delete;

  template <class Block, class... Inputs>
  auto operator()(Block&& block, Inputs&&... inputs) {
    const Scope scope(*this, nullptr);
    return invoke_block(std::forward<Block>(block), std::forward<Inputs>(inputs)...);
  }
  /// The region's result; its name is one of `regions`, or it is called plainly.
  template <class Region, class... Inputs>
  auto cheap(std::string_view name, Region&& region, Inputs&&... inputs) {
    if (!at::GradMode::is_enabled() || !picks(name))
      return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
    subject_.note_use();
    auto& pass = passes_.here();
    auto frame = std::make_shared<detail::Frame>(subject_.policy(), pass.model ? pass.model : subject_.attached(),
                                                 std::string(name));
    std::shared_ptr<detail::BlockCall> call;
    std::vector<const void*> taken;  // memory that a result may only show again
    (detail::visit_tensors(inputs, [&](const at::Tensor& tensor) { taken.push_back(memory_of(tensor)); }), ...);
    auto result = frame->forward(call, 0, subject_, std::forward<Region>(region), std::forward<Inputs>(inputs)...);
    std::size_t position = 0;
    detail::visit_tensors(result, [&](const at::Tensor& tensor) {
      const auto* memory = memory_of(tensor);
      if (memory && pass.open && std::ranges::find(taken, memory) == taken.end())
        pass.outputs->add(frame, call, position, tensor);
      ++position;
    });
    return result;
  }

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    subject_.attach(model, device, buffers);
  }
  /// Held over an objective that is called with `model`, whose operations it watches.
  template <class Model>
  [[nodiscard]] auto pass(Model& model) {
    subject_.note_pass();
    return Scope(*this, subject_.facts_of(model));
  }
  /// Whether what runs now has run before, and must leave no second trace.
  static bool is_repeating() { return detail::is_recomputing(); }
  void begin_step() const {}
  void end_step() const { subject_.require_use("step.checkpoint.cheap(name, f, x) with a name among `regions`"); }
  void reset() {}

 private:
  /// Watches what is saved on this thread, unless a scope around it does, or nothing will be differentiated.
  class Scope {
   public:
    Scope(State& state, std::shared_ptr<const detail::ModelFacts> model) : pass_(state.passes_.here()) {
      if (pass_.open || !at::GradMode::is_enabled() || detail::is_recomputing()) return;
      pass_.model = std::move(model);
      hooks_.emplace(pass_.outputs.get());
      pass_.open = opened_ = true;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (!opened_) return;
      pass_.outputs->clear();
      pass_.model.reset();
      pass_.open = false;
    }

   private:
    Pass& pass_;
    std::optional<detail::HookScope> hooks_;
    bool opened_ = false;
  };

  static const void* memory_of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  }
  bool picks(std::string_view name) const {
    return std::ranges::any_of(policy_.regions, [&](const auto& pattern) { return glob_match(pattern, name); });
  }

  CheckpointSelective policy_;
  detail::CheckpointSubject subject_;
  detail::EachThread<Pass> passes_;
};

}  // namespace checkpointing
}  // namespace v0_1
}  // namespace treadle
