// SPDX-License-Identifier: Apache-2.0
// Everything of a trainer that decides its later steps, by name. What the parts of a trainer show for it:
// `for_each_state` their tensors, `for_each_value` their host numbers; `prepare_restore` is called before either is
// written to, `restored` after.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "treadle/optim/schedule.hpp"
#include "treadle/stages.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The file that a tensor belongs in.
enum class Part { Model, Optimizer, Average, Trainer, Rank };

/// Takes names and nothing else: what parts are asked with that have nothing to show.
struct AnyVisitor {
  template <class Name, class T>
  void operator()(const Name&, T&) const {}
};
template <class State>
concept has_tensors = requires(State& state) {
  state.for_each_state(AnyVisitor{});
};
template <class State>
concept has_values = requires(State& state) {
  state.for_each_value(AnyVisitor{});
};

template <class Trainer>
class TrainerState {
 public:
  explicit TrainerState(Trainer& trainer) : trainer_(trainer) {}

  /// Calls `visit(part, name, tensor)` for each tensor, on the device where it lies. A parameter is shown by its fp32
  /// master, where it has one.
  template <class Visitor>
  void for_each_tensor(Visitor&& visit) {
    for (const auto& parameter : trainer_.parameters_) {
      auto master = parameter.master.detach();
      visit(Part::Model, parameter.name, master);
    }
    // Where ranks do not share their buffers each has its own.
    const Part home = shares_buffers() ? Part::Model : Part::Rank;
    for (auto& buffer : trainer_.buffers_)
      visit(home, (home == Part::Rank ? "buffer/" : "") + buffer.name, buffer.tensor);
    show(Part::Optimizer, "", trainer_.rule_, visit);
    show(Part::Average, "", trainer_.averaging_, visit);
    show(Part::Trainer, "precision/", trainer_.precision_, visit);
    show(Part::Trainer, "nonfinite/", trainer_.nonfinite_, visit);
    show(Part::Trainer, "clipping/", trainer_.clipping_, visit);
    show(Part::Trainer, "accumulation/", trainer_.accumulation_, visit);
    show(Part::Trainer, "objective/", trainer_.objective_, visit);
    show(Part::Trainer, "verdict/", trainer_.verdict_, visit);
  }

  /// Calls `visit(name, value)` for each host value: `double`, `bool`, `std::int64_t`, `Schedule`, or a vector of
  /// numbers.
  template <class Visitor>
  void for_each_value(Visitor&& visit) {
    visit("steps", trainer_.steps_);
    visit("next_epoch", trainer_.epochs_);
    visit("idle_reported", trainer_.idle_reported_);
    double c0 = trainer_.window_.c0();
    visit("c0", c0);
    trainer_.window_.set_c0(c0);
    show_values("rule/", trainer_.rule_, visit);
    show_values("averaging/", trainer_.averaging_, visit);
    show_values("precision/", trainer_.precision_, visit);
    show_values("nonfinite/", trainer_.nonfinite_, visit);
    show_values("clipping/", trainer_.clipping_, visit);
    show_values("accumulation/", trainer_.accumulation_, visit);
    show_values("objective/", trainer_.objective_, visit);
    show_values("parallelism/", trainer_.parallelism_, visit);
  }

  /// Before the first write: an open window is dropped, and the rule makes the state that there will be.
  template <class Holds>
  void prepare_restore(Holds&& holds) {
    trainer_.reset_window();
    if constexpr (requires { trainer_.rule_.prepare_restore(holds); }) trainer_.rule_.prepare_restore(holds);
  }
  /// After the last write.
  void restored() {
    const at::NoGradGuard no_grad;
    trainer_.precision_.publish();
    tell_restored(trainer_.rule_);
    tell_restored(trainer_.averaging_);
    tell_restored(trainer_.precision_);
    tell_restored(trainer_.nonfinite_);
    tell_restored(trainer_.clipping_);
    tell_restored(trainer_.accumulation_);
    tell_restored(trainer_.objective_);
    tell_restored(trainer_.parallelism_);
  }
  /// Before a snapshot is taken: what would be done at the next step's beginning and changes how gradients add up.
  void settle() {
    if constexpr (requires { trainer_.parallelism_.settle(); }) trainer_.parallelism_.settle();
  }

  /// The devices whose default generators training draws from; the CPU's is the first.
  std::vector<at::Device> devices() const {
    std::vector<at::Device> all{at::Device(at::kCPU)};
    const auto add = [&](at::Device device) {
      for (const auto known : all)
        if (known == device) return;
      all.push_back(device);
    };
    add(trainer_.device());
    if constexpr (requires { trainer_.parallelism_.devices(); })
      for (const auto device : trainer_.parallelism_.devices()) add(device);
    return all;
  }
  bool shares_buffers() const {
    if constexpr (requires { trainer_.parallelism_.shares_buffers(); })
      return trainer_.parallelism_.shares_buffers();
    else
      return true;
  }

 private:
  template <class State, class Visitor>
  static void show(Part part, const char* prefix, State& state, Visitor& visit) {
    if constexpr (has_tensors<State>)
      state.for_each_state(
          [&](const auto& name, at::Tensor& tensor) { visit(part, prefix + std::string(name), tensor); });
  }
  template <class State, class Visitor>
  static void show_values(const char* prefix, State& state, Visitor& visit) {
    if constexpr (has_values<State>)
      state.for_each_value([&](const auto& name, auto& value) { visit(prefix + std::string(name), value); });
  }
  template <class State>
  static void tell_restored(State& state) {
    if constexpr (requires { state.restored(); }) state.restored();
  }

  Trainer& trainer_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
