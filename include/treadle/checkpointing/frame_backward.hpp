// SPDX-License-Identifier: Apache-2.0
// The backward side of a checkpoint: what was dropped is asked for, and computed again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "treadle/checkpointing/frame.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/surroundings.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A saved tensor in the backward pass.
inline at::Tensor Frame::take(std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!slots_[index].kept.defined()) {
    const int task = torch::autograd::get_current_graph_task_id();
    if (task != task_ || !slots_[index].value.defined()) recompute(task);
  }
  Slot& slot = slots_[index];
  at::Tensor value = slot.kept.defined() ? slot.kept : std::move(slot.value);
  slot.value.reset();
  if (task_ == -1) drop_values();  // no backward pass that would fetch the others
  if (static_cast<std::int64_t>(value._version()) != slot.version)
    refuse("has had a tensor that its backward pass needs changed in place",
           "change it out of place, or after the backward pass");
  return value;
}

inline void Frame::recompute(int task) {
  closed_ = true;
  task_ = task;
  drop_values();
  take_inputs();
  Refill refill(*this);
  run(refill);
  if (!refill.mismatch().empty() || refill.saved() < refill.wanted()) {
    drop_values();
    refuse("computes something else in the backward pass than it did in the forward pass: " +
               (refill.mismatch().empty() ? "it saved " + std::to_string(refill.wanted()) +
                                                " or more tensors and now " + std::to_string(refill.saved())
                                          : refill.mismatch()),
           "let it depend on nothing but its inputs, its weights and buffers, and the default random generators");
  }
}

/// Before the generators move: an input may itself be recomputed.
inline void Frame::take_inputs() {
  for (running_ = 0; running_ < calls_.size(); ++running_) {
    auto& call = *calls_[running_];
    call.inputs.assign(call.origins.size(), at::Tensor());
    try {
      for (std::size_t i = 0; i < call.origins.size(); ++i) {
        const auto& origin = call.origins[i];
        if (origin.kind != Origin::Kind::Saved) continue;
        auto input = call.saved[origin.index].unpack();
        if (input.requires_grad() != origin.requires_grad)
          input = input.detach().set_requires_grad(origin.requires_grad);
        call.inputs[i] = std::move(input);
      }
    } catch (const c10::Error& error) {
      if (std::string(error.what_without_backtrace()).find("inplace") == std::string::npos) throw;
      refuse("has had an input changed in place, from which its backward pass would recompute it",
             "change it out of place, or after the backward pass");
    }
  }
}

inline void Frame::run(Refill& refill) {
  struct Emptied {  // what repeats hold, whatever happens
    Frame& frame;
    ~Emptied() {
      for (auto& call : frame.calls_) {
        call->inputs.clear();
        call->outputs.clear();
      }
    }
  } const emptied{*this};
  std::vector<const Surroundings*> all;
  for (running_ = 0; running_ < calls_.size(); ++running_) {
    all.push_back(&*calls_[running_]->surroundings);
    if (all.back()->weight_changed())
      refuse("has had a weight changed in place, with which its backward pass would recompute it",
             "change weights after the backward pass");
    if (all.back()->buffer_written()) refuse_write();
  }
  const PutBack put_back(all);
  const DepthScope inside(HookEngine::get().recomputes());
  const at::AutoGradMode with_grad(true);
  const HookScope hooks(&refill);
  try {
    for (running_ = 0; running_ < calls_.size(); ++running_) {
      auto& call = *calls_[running_];
      for (std::size_t i = 0; i < call.origins.size(); ++i)
        if (call.origins[i].kind == Origin::Kind::Output)
          call.inputs[i] = calls_[call.origins[i].call]->outputs[call.origins[i].index];
      call.surroundings->reinstate();
      const AutocastAs cast(call.surroundings->autocast());
      call.repeat();
    }
    if (refill.mismatch().empty()) keep_outputs();
  } catch (const EnoughRecomputed&) {
  }
}

inline std::size_t Frame::add_output(std::size_t position, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  Output output{position, tensor.scalar_type(), {}, {}};
  output.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  output.strides.assign(tensor.strides().begin(), tensor.strides().end());
  outputs_.push_back(std::move(output));
  calls_.back()->keeps_outputs = true;
  return outputs_.size() - 1;
}
inline void Frame::use_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  ++outputs_[index].users;
}
inline void Frame::release_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (--outputs_[index].users == 0) outputs_[index].value.reset();
}
inline at::Tensor Frame::take_output(std::size_t index) {
  const std::lock_guard lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != task_ || !outputs_[index].value.defined()) recompute(task);
  Output& output = outputs_[index];
  at::Tensor value = output.value;
  if (--output.pending <= 0) output.value.reset();
  if (task_ == -1) drop_values();
  if (static_cast<std::int64_t>(value._version()) != output.version)
    refuse("has had a tensor that a backward pass needs changed in place", "change it out of place");
  return value;
}
inline bool Frame::wants_outputs() const {
  return std::ranges::any_of(outputs_, [](const Output& output) { return output.users > 0; });
}
inline void Frame::keep_outputs() {
  for (auto& output : outputs_) {
    if (output.users == 0) continue;
    const auto& tensor = calls_.back()->outputs.at(output.position);
    if (tensor.scalar_type() != output.dtype || !std::ranges::equal(tensor.sizes(), output.sizes) ||
        !std::ranges::equal(tensor.strides(), output.strides))
      refuse("gives something else in the backward pass than it did in the forward pass",
             "let it depend on nothing but its inputs, its weights and the default random generators");
    output.value = tensor.detach();
    output.version = static_cast<std::int64_t>(output.value._version());
    output.pending = output.users;
  }
}
inline void Frame::drop_values() {
  for (auto& slot : slots_) slot.value.reset();
  for (auto& output : outputs_) output.value.reset();
}

inline std::string Frame::name() const {
  if (!region_.empty()) return "region '" + region_ + "'";
  const auto& call = *calls_[std::min(running_, calls_.size() - 1)];
  if (names_)
    if (const auto found = names_->find(call.module); found != names_->end()) return "block '" + found->second + "'";
  return "block number " + std::to_string(call.number) + " of the forward pass (" + c10::demangle(call.type->name()) +
         ")";
}
inline void Frame::refuse(const std::string& what, const std::string& advice) const {
  throw ConfigError(std::string(policy_) + ": " + name() + " " + what + "; " + advice + ".");
}
inline void Frame::refuse_write() const {
  refuse("writes a buffer of more than 1 MiB, which is not copied for its recompute",
         "keep what it writes out of the block");
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
