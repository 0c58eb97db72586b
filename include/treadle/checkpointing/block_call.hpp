// SPDX-License-Identifier: Apache-2.0
// One call of a block, kept so that it can be made again: the block, its inputs, and what else its result depends on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "treadle/checkpointing/surroundings.hpp"
#include "treadle/detail/fields.hpp"
#include "treadle/invoke_block.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

// As a shared_ptr or a module holder has them.
template <class Block>
concept block_handle = std::copy_constructible<std::remove_cvref_t<Block>> && requires(std::remove_cvref_t<Block>& b) {
  b.operator->();
  static_cast<bool>(b);
};
template <class Block, class... Inputs>
concept has_forward = requires(Block& block, Inputs&&... inputs) {
  block.forward(std::forward<Inputs>(inputs)...);
};

/// The module behind a block, if it is one of torch::nn's kind: something polymorphic with buffers of its own.
template <class Block>
auto* module_of(Block& block) {
  if constexpr (block_handle<Block>)
    return module_of(*block.operator->());
  else if constexpr (std::is_pointer_v<Block>)
    return module_of(*block);
  else if constexpr (requires { block.checkpointed_module(); })
    return block.checkpointed_module();
  else if constexpr (std::is_polymorphic_v<Block> && requires { block.buffers(); })
    return &block;
  else
    return static_cast<void*>(nullptr);
}
/// What identifies a module whatever base class it is looked at through.
template <class Module>
const void* identity_of(const Module* module) {
  if constexpr (std::is_polymorphic_v<Module>)
    return dynamic_cast<const void*>(module);
  else
    return module;
}

/// A block until its backward pass: handles, pointers and function objects by copy; an lvalue with `forward`, which a
/// model owns, by reference, and alive where it can be shared.
template <class Block, class... Inputs>
class KeptBlock {
 public:
  using Plain = std::decay_t<Block>;
  static constexpr bool by_reference = std::is_lvalue_reference_v<Block> && std::is_class_v<Plain> &&
                                       !block_handle<Plain> && has_forward<std::remove_reference_t<Block>, Inputs...>;
  static_assert(by_reference || std::is_rvalue_reference_v<Block&&> || std::copy_constructible<Plain>,
                "treadle: a checkpointed function object is kept for its backward pass, but cannot be copied; pass it "
                "with std::move, or as a module holder or shared_ptr.");

  explicit KeptBlock(std::remove_reference_t<Block>& block) : kept_(keep(block)) {
    if constexpr (by_reference && requires { block.weak_from_this().lock(); }) alive_ = block.weak_from_this().lock();
  }
  auto& get() {
    if constexpr (by_reference)
      return *kept_;
    else
      return kept_;
  }

 private:
  using Stored = std::conditional_t<by_reference, std::remove_reference_t<Block>*, Plain>;
  static Stored keep(std::remove_reference_t<Block>& block) {
    if constexpr (by_reference)
      return &block;
    else
      return Stored(std::forward<Block>(block));
  }
  Stored kept_;
  std::shared_ptr<const void> alive_;
};

/// What only looks at somebody else's elements: ArrayRef, span, string_view, and their like.
template <class T>
inline constexpr bool is_view_type = std::ranges::borrowed_range<T>;
template <class T>
inline constexpr bool is_view_type<c10::ArrayRef<T>> = true;
template <class T>
inline constexpr bool is_view_type<c10::OptionalArrayRef<T>> = true;
template <class T>
inline constexpr bool is_view_type<std::initializer_list<T>> = true;
template <class T>
inline constexpr bool is_view_type<std::optional<T>> = is_view_type<T>;

/// An input that cannot be copied, such as the step context: referred to.
template <class T>
class Referred {
 public:
  Referred(T& object) : object_(&object) {}  // NOLINT: stands for it
  T& get() const { return *object_; }

 private:
  T* object_;
};
template <class Input>
using kept_input =
    std::conditional_t<std::is_lvalue_reference_v<Input> && !std::copy_constructible<std::decay_t<Input>>,
                       Referred<std::remove_reference_t<Input>>, std::decay_t<Input>>;

/// Where an input of a call comes from: nowhere (undefined), what was saved, or the output of an earlier call.
struct Origin {
  enum class Kind { Undefined, Saved, Output } kind = Kind::Undefined;
  std::size_t call = 0;
  std::size_t index = 0;
  bool requires_grad = false;  // of what was saved
};

/// A call without the types of its block.
class BlockCall {
 public:
  BlockCall(const BlockCall&) = delete;
  BlockCall& operator=(const BlockCall&) = delete;
  virtual ~BlockCall() = default;

  /// Makes the call again with `inputs`.
  virtual void repeat() = 0;

  std::shared_ptr<BlockCall> before;  // the checkpoint's call before it, which it may need to be repeated
  std::optional<Surroundings> surroundings;
  std::vector<Origin> origins;
  std::vector<torch::autograd::SavedVariable> saved;
  std::vector<at::Tensor> inputs;   // while it is repeated
  std::vector<at::Tensor> outputs;  // what a repeat gave, if `keeps_outputs`
  bool keeps_outputs = false;
  bool may_throw = true;
  std::size_t first_slot = 0;  // of what it saved, in the checkpoint's order
  std::size_t end_slot = unknown;
  static constexpr std::size_t unknown = std::numeric_limits<std::size_t>::max();  // it has not returned
  std::size_t number = 0;                                                          // of the block in its pass, from 1
  const void* module = nullptr;
  const std::type_info* type = nullptr;

 protected:
  BlockCall() = default;
};

template <class Block, class... Inputs>
class TypedCall final : public BlockCall {
  static_assert((!is_view_type<std::decay_t<Inputs>> && ...),
                "treadle: an input of a checkpointed block is a view (ArrayRef, span, string_view), whose elements may "
                "be gone when the block is computed again; pass a std::vector, std::array or std::string.");

 public:
  /// `origin(tensor)` decides where each defined tensor of the inputs will come from, and may save it.
  template <class OriginOf>
  TypedCall(std::remove_reference_t<Block>& block, OriginOf&& origin, std::remove_reference_t<Inputs>&... given)
      : block_(block), arguments_(given...) {
    type = &typeid(std::decay_t<Block>);
    may_throw = !is_noexcept();
    visit_tensors(arguments_, [&](at::Tensor& tensor) {
      origins.push_back(tensor.defined() ? origin(*this, tensor) : Origin{});
      tensor.reset();
    });
  }

  auto& block() { return block_.get(); }

  void repeat() override {
    auto arguments = arguments_;
    std::size_t next = 0;
    visit_tensors(arguments, [&](at::Tensor& tensor) { tensor = std::move(inputs[next++]); });
    inputs.clear();
    const auto result =
        std::apply([&](auto&... each) { return invoke_block(block_.get(), as_given<Inputs>(each)...); }, arguments);
    if (keeps_outputs) visit_tensors(result, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
  }

 private:
  // An exception that ends a recompute would end the program there.
  static constexpr bool is_noexcept() {
    if constexpr (requires(std::decay_t<Block> & b, Inputs && ... inputs) { b(std::forward<Inputs>(inputs)...); })
      return std::is_nothrow_invocable_v<std::decay_t<Block>&, Inputs...>;
    else
      return false;
  }
  // As an lvalue or rvalue, like the input that it stands for; arrays have become pointers.
  template <class Input, class Stored>
  static decltype(auto) as_given(Stored& stored) {
    if constexpr (std::same_as<Stored, Referred<std::remove_reference_t<Input>>>)
      return (stored.get());
    else if constexpr (std::same_as<std::remove_cvref_t<Input>, Stored>)
      return static_cast<Input&&>(stored);
    else
      return (stored);
  }

  KeptBlock<Block, Inputs...> block_;
  std::tuple<kept_input<Inputs>...> arguments_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
