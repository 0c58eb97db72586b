// SPDX-License-Identifier: Apache-2.0
// What Treadle asks of a model, and how it takes one: by module holder, shared_ptr or lvalue, never by copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {
/// A range of named tensors, as torch::nn (key(), value()) and torch::jit (name, value) have them.
template <class Items>
concept named_tensors = requires(Items items) {
  items.begin() != items.end();
}
&&(
    requires(Items items) {
      { (*items.begin()).key() } -> std::convertible_to<std::string>;
      { (*items.begin()).value() } -> std::convertible_to<at::Tensor>;
    } ||
    requires(Items items) {
      { (*items.begin()).name } -> std::convertible_to<std::string>;
      { (*items.begin()).value } -> std::convertible_to<at::Tensor>;
    });
}  // namespace detail

/// A model: named parameters and buffers, a training mode that is switched both ways, and a place. `torch::nn::Module`
/// and `torch::jit::Module` are models; no base class is asked for.
template <class M>
concept model = requires(M& m, at::Device device) {
  { m.named_parameters() } -> detail::named_tensors;
  { m.named_buffers() } -> detail::named_tensors;
  m.train();
  m.train(false);
  m.eval();
  { m.is_training() } -> std::convertible_to<bool>;
  m.to(device);
};

namespace detail {

template <class M>
struct is_shared_ptr : std::false_type {};
template <class M>
struct is_shared_ptr<std::shared_ptr<M>> : std::true_type {};
// torch::nn::ModuleHolder, without its header.
template <class M>
concept module_holder = requires(M& m) {
  typename std::remove_cvref_t<M>::ContainedType;
  m.ptr();
};

/// The model behind a holder, a shared_ptr or an lvalue: shared where the caller shares it, else only referred to.
template <class M>
auto share_model(M&& given) {
  using Plain = std::remove_cvref_t<M>;
  if constexpr (module_holder<Plain>) {
    return given.ptr();
  } else if constexpr (is_shared_ptr<Plain>::value) {
    if (!given) throw ConfigError("treadle::Trainer: the model is a null shared_ptr.");
    return given;
  } else {
    static_assert(
        std::is_lvalue_reference_v<M>,
        "treadle::Trainer: the model is a temporary, which would be gone before the first step; pass a module "
        "holder, a shared_ptr, or a model that outlives the trainer.");
    static_assert(!std::is_const_v<std::remove_reference_t<M>>,
                  "treadle::Trainer: the model is const; training changes it, so pass it as non-const.");
    return std::shared_ptr<Plain>(std::shared_ptr<void>(), &given);
  }
}
template <class M>
using model_of = typename decltype(share_model(std::declval<M>()))::element_type;

// torch::nn gives OrderedDict items (key(), value()), torch::jit named values (name, value).
template <class Item>
const std::string& item_name(const Item& item) {
  if constexpr (requires { item.key(); })
    return item.key();
  else
    return item.name;
}
template <class Item>
at::Tensor item_tensor(const Item& item) {
  if constexpr (requires { item.key(); })
    return item.value();
  else
    return item.value;
}

/// Calls `f(name, tensor)` for each defined tensor of a module's named ones, once, in their order.
template <class Items, class F>
void for_each_once(const Items& items, F&& f) {
  std::unordered_set<const void*> seen;
  for (const auto& item : items) {
    auto tensor = item_tensor(item);
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) f(item_name(item), tensor);
  }
}

/// Parameters in the model's order, tied ones once, without the gradients that they may have from before. Throws
/// `ConfigError` for integer and complex ones.
template <class M>
ParameterList list_parameters(M& m, at::Device device) {
  std::vector<Parameter> parameters;
  bool any = false;
  for_each_once(m.named_parameters(), [&](const std::string& name, const at::Tensor& tensor) {
    if (!at::isFloatingType(tensor.scalar_type()))
      throw ConfigError("treadle::Trainer: parameter '" + name + "' is of dtype " +
                        c10::toString(tensor.scalar_type()) +
                        "; only floating-point tensors can be trained, so register it as a buffer.");
    if (!tensor.is_non_overlapping_and_dense())
      throw ConfigError("treadle::Trainer: parameter '" + name +
                        "' is a view with gaps or overlaps in memory (sizes and strides do not fill it), which fused "
                        "updates would write beside; register a contiguous() clone of it.");
    any |= tensor.requires_grad();
    tensor.mutable_grad().reset();  // or the first backward pass would add to it
    parameters.push_back({name, tensor, tensor});
  });
  if (!any)
    throw ConfigError(
        "treadle::Trainer: no parameter of the model requires a gradient, so there is nothing to train; "
        "register parameters, or unfreeze some with requires_grad_(true).");
  return {std::move(parameters), device};
}

/// Buffers in the model's order, each tensor once.
template <class M>
BufferList list_buffers(M& m) {
  BufferList buffers;
  for_each_once(m.named_buffers(), [&](const std::string& name, const at::Tensor& tensor) {
    buffers.push_back({name, tensor});
  });
  return buffers;
}

/// Puts a model into evaluation mode while it lives, and every submodule back into the mode it had.
template <class M>
class EvaluationMode {
 public:
  explicit EvaluationMode(M& m) : model_(m) {
    each_module([&](auto& module) { modes_.push_back(module.is_training()); });
    m.eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() {
    // train() reaches down, so parents go first and children have the last word.
    std::size_t i = 0;
    each_module([&](auto& module) { module.train(modes_[i++]); });
  }

 private:
  template <class F>
  void each_module(F&& f) {
    if constexpr (requires { model_.modules(false); }) {  // torch::nn: without the root, which may live on the stack
      f(model_);
      for (const auto& module : model_.modules(false)) f(*module);
    } else if constexpr (requires { model_.modules(); }) {  // torch::jit
      for (auto module : model_.modules()) f(module);
    } else {
      f(model_);
    }
  }

  M& model_;
  std::vector<bool> modes_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
