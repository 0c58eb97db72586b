// SPDX-License-Identifier: Apache-2.0
// Where further copies of a model come from: its own clone(), or a factory.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "treadle/error.hpp"
#include "treadle/model.hpp"

namespace torch::nn {
class Module;
}

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// No factory: replicas are the model's own copies.
struct NoFactory {};

/// A callable that can be assigned, which a lambda with captures cannot.
template <class F>
class Assignable {
 public:
  Assignable() {
    if constexpr (std::default_initializable<F>) kept_.emplace();
  }
  Assignable(F f) : kept_(std::move(f)) {}  // NOLINT: stands for `f`
  Assignable(const Assignable&) = default;
  Assignable(Assignable&&) = default;
  Assignable& operator=(const Assignable& other) {
    if (this == &other) return *this;
    kept_.reset();
    if (other.kept_) kept_.emplace(*other.kept_);
    return *this;
  }
  ~Assignable() = default;

  explicit operator bool() const { return kept_.has_value(); }
  F& operator*() { return *kept_; }

 private:
  std::optional<F> kept_;
};

template <class Function>
struct declaring_class {};
template <class R, class C, class... Args>
struct declaring_class<R (C::*)(Args...) const> : std::type_identity<C> {};

template <class M>
concept torch_module = std::derived_from<M, torch::nn::Module>;
/// Whether the type has a clone() of its own: torch::nn::Module's, which all of them inherit, only throws.
template <class M>
concept module_clones = torch_module<M> && requires {
  typename declaring_class<decltype(&M::clone)>::type;
} && !std::same_as<typename declaring_class<decltype(&M::clone)>::type, torch::nn::Module>;
template <class M>
concept clones_itself = !torch_module<M> && requires(M & m) {
  { m.clone() } -> std::convertible_to<std::shared_ptr<M>>;
};
template <class M>  // torch::jit::Module, whose clone() shares the tensors
concept copies_deeply = requires(M& m) {
  { m.deepcopy() } -> std::same_as<M>;
};
template <class M>
concept copyable_model = module_clones<M> || clones_itself<M> || copies_deeply<M>;

template <class Made, class M>
inline constexpr bool is_maker = std::same_as<Made, std::shared_ptr<M>>;
template <module_holder Made, class M>
inline constexpr bool is_maker<Made, M> = std::same_as<typename Made::ContainedType, M>;
/// Whether `Factory` makes models of type `M`.
template <class Factory, class M>
concept makes_model = std::invocable<Factory&> && is_maker<std::remove_cvref_t<std::invoke_result_t<Factory&>>, M>;

template <class M>
std::shared_ptr<M> cloned(const M& m) {
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = m.clone();
  } catch (const c10::Error& error) {
    throw ConfigError("parallelism::DataParallel: the model's clone() failed (" + first_line(error.what()) +
                      "); register everything in reset(), in submodules too, or give a factory: "
                      "parallelism::data_parallel(devices, [] { return Net(); }).");
  }
  auto same = std::dynamic_pointer_cast<M>(copy);
  if (!same)
    throw ConfigError(
        "parallelism::DataParallel: the model's clone() makes a model of another class; derive the model from "
        "torch::nn::Cloneable of its own class, or give a factory: parallelism::data_parallel(devices, factory).");
  return same;
}

/// Another model of the same structure and of its own memory, with whatever weights.
template <class M, class Factory>
std::shared_ptr<M> make_replica(M& m, [[maybe_unused]] Assignable<Factory>& factory) {
  constexpr bool makes = !std::same_as<Factory, NoFactory>;
  static_assert(makes || copyable_model<M>,
                "parallelism::DataParallel: this model type has no clone() to make replicas with; derive it from "
                "torch::nn::Cloneable, or give a factory: parallelism::data_parallel(devices, [] { return Net(); }).");
  static_assert(!makes || makes_model<Factory, M>,
                "parallelism::data_parallel: the factory makes something else than the trainer's model; let it return "
                "a module holder, or a std::shared_ptr, of the same model type.");
  if constexpr (makes_model<Factory, M>) {
    auto made = (*factory)();
    if constexpr (module_holder<decltype(made)>)
      return made.ptr();
    else
      return made;
  } else if constexpr (module_clones<M>) {
    return cloned(m);
  } else if constexpr (clones_itself<M>) {
    return m.clone();
  } else if constexpr (copies_deeply<M>) {
    return std::make_shared<M>(m.deepcopy());
  } else {
    return nullptr;
  }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
