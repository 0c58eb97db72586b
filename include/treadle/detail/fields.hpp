// SPDX-License-Identifier: Apache-2.0
// Walks the fields of an aggregate, as C++20 allows without reflection: up to 12 of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

struct AnyField {
  template <class T>
  operator T() const;  // only named in unevaluated code
};

// Converts to base classes of T only.
template <class T>
struct AnyBase {
  template <class U>
  requires(std::is_base_of_v<U, T> && !std::same_as<U, T>) operator U() const;
};
/// An aggregate with a base class: the base counts as one field, but its members cannot be bound together with T's own.
template <class T>
concept derived_aggregate = std::is_aggregate_v<std::remove_const_t<T>> && requires {
  std::remove_const_t<T>{AnyBase<std::remove_const_t<T>>{}};
};

template <class T, class... Fields>
consteval std::size_t count_fields() {
  if constexpr (sizeof...(Fields) > 12)
    return sizeof...(Fields);
  else if constexpr (requires { T{Fields{}..., AnyField{}}; })
    return count_fields<T, Fields..., AnyField>();
  else
    return sizeof...(Fields);
}

/// How many fields the aggregate `T` has (13 stands for more than 12).
template <class T>
inline constexpr std::size_t field_count = count_fields<std::remove_const_t<T>>();

/// Calls `f(field)` for each field of an aggregate, in order.
template <class T, class F>
void for_each_field(T& object, F&& f) {
  static_assert(!derived_aggregate<T>,
                "treadle: a batch type, or a field of one, derives from another type, which hides where its tensors "
                "are; give it a member for_each_tensor(f) that calls f on each of them, or write it without a base.");
  constexpr std::size_t count = derived_aggregate<T> ? 0 : field_count<T>;
  static_assert(count <= 12,
                "treadle: a batch type has more than 12 fields; give it a member for_each_tensor(f) that calls f on "
                "each of its tensors.");
  if constexpr (count == 12) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6), f(f7), f(f8), f(f9), f(f10), f(f11));
  } else if constexpr (count == 11) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6), f(f7), f(f8), f(f9), f(f10));
  } else if constexpr (count == 10) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6), f(f7), f(f8), f(f9));
  } else if constexpr (count == 9) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6), f(f7), f(f8));
  } else if constexpr (count == 8) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6), f(f7));
  } else if constexpr (count == 7) {
    auto& [f0, f1, f2, f3, f4, f5, f6] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5), f(f6));
  } else if constexpr (count == 6) {
    auto& [f0, f1, f2, f3, f4, f5] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4), f(f5));
  } else if constexpr (count == 5) {
    auto& [f0, f1, f2, f3, f4] = object;
    (f(f0), f(f1), f(f2), f(f3), f(f4));
  } else if constexpr (count == 4) {
    auto& [f0, f1, f2, f3] = object;
    (f(f0), f(f1), f(f2), f(f3));
  } else if constexpr (count == 3) {
    auto& [f0, f1, f2] = object;
    (f(f0), f(f1), f(f2));
  } else if constexpr (count == 2) {
    auto& [f0, f1] = object;
    (f(f0), f(f1));
  } else if constexpr (count == 1) {
    auto& [f0] = object;
    (f(f0));
  }
}

template <class T>
concept tensor_like = std::same_as<std::remove_cvref_t<T>, at::Tensor>;
template <class T>
concept tuple_like = requires {
  std::tuple_size<std::remove_cvref_t<T>>::value;
};
template <class T>
concept optional_like = requires(T& value) {
  value.has_value();
  *value;
};
template <class T>
concept plain_aggregate = std::is_class_v<std::remove_cvref_t<T>> && std::is_aggregate_v<std::remove_cvref_t<T>>;

/// Calls `f(tensor)` for each tensor inside `value`; what holds no tensors is passed over.
template <class T, class F>
void visit_tensors(T& value, F&& f) {
  if constexpr (tensor_like<T>)
    f(value);
  else if constexpr (std::ranges::range<T> && !std::convertible_to<T, std::string_view>) {
    if constexpr (!std::is_arithmetic_v<std::remove_cvref_t<std::ranges::range_reference_t<T>>>)
      for (auto&& element : value) visit_tensors(element, f);
  } else if constexpr (optional_like<T>) {
    if (value.has_value()) visit_tensors(*value, f);
  } else if constexpr (tuple_like<T>) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, f), ...); }, value);
  } else if constexpr (plain_aggregate<T>) {
    for_each_field(value, [&](auto& field) { visit_tensors(field, f); });
  }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
