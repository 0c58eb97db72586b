// SPDX-License-Identifier: Apache-2.0
// Policies as text for people: "Bf16 + AccumulateOver(4)".
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cctype>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ranges>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/detail/fields.hpp"
#include "treadle/observe/text.hpp"
#include "treadle/policies.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What stands after "T = " in a compiler's name of an instantiation.
constexpr std::string_view template_argument(std::string_view function, std::string_view key) {
  const auto begin = function.find(key) + key.size();
  const auto semicolon = function.find(';', begin);  // g++ goes on with the meaning of other names
  return function.substr(begin, (semicolon == std::string_view::npos ? function.rfind(']') : semicolon) - begin);
}
template <class T>
constexpr std::string_view type_text() {
  return template_argument(__PRETTY_FUNCTION__, "T = ");
}
template <auto V>
constexpr std::string_view value_text() {
  return template_argument(__PRETTY_FUNCTION__, "V = ");
}

/// `name` without the namespaces, classes and functions that it and its arguments lie in.
inline std::string unqualified(std::string_view name) {
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] != ':' || i + 1 == name.size() || name[i + 1] != ':') {
      out += name[i];
      continue;
    }
    ++i;
    int depth = 0;  // drops one name back: an identifier, with its arguments if it has some
    while (!out.empty()) {
      const char c = out.back();
      if (c == ')' || c == '>' || c == '}') ++depth;
      if (depth == 0 && std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') break;
      if (c == '(' || c == '<' || c == '{') --depth;
      if (depth < 0) break;
      out.pop_back();
    }
  }
  return out;
}

template <class E>
std::string enumerator_text(E value) {
  constexpr auto names = []<std::size_t... I>(std::index_sequence<I...>) {
    return std::array{value_text<static_cast<E>(I)>()...};
  }
  (std::make_index_sequence<8>{});
  const auto number = static_cast<std::int64_t>(value);
  if (number < 0 || number >= 8) return std::to_string(number);
  return unqualified(names[static_cast<std::size_t>(number)]);
}

template <class T>
concept readable_aggregate = plain_aggregate<T> && !derived_aggregate<T> && field_count<T> <= 12;

template <class T>
std::string option_text(const T& value) {
  if constexpr (std::same_as<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::integral<T>) {
    return std::to_string(value);
  } else if constexpr (std::floating_point<T>) {
    return exact_number(static_cast<double>(value));
  } else if constexpr (std::is_enum_v<T>) {
    return enumerator_text(value);
  } else if constexpr (std::convertible_to<T, std::string_view>) {
    return std::string(std::string_view(value));
  } else if constexpr (std::same_as<T, at::Device>) {
    return value.str();
  } else if constexpr (std::ranges::range<T>) {
    std::string out;
    for (const auto& element : value) out += (out.empty() ? "" : ", ") + option_text(element);
    return "[" + out + "]";
  } else if constexpr (optional_like<T>) {
    return value.has_value() ? option_text(*value) : "none";
  } else if constexpr (readable_aggregate<T>) {
    std::string out;
    for_each_field(value, [&](const auto& field) { out += (out.empty() ? "" : ", ") + option_text(field); });
    return "{" + out + "}";
  } else {
    return "?";
  }
}

/// The options of a policy as texts, in their order.
template <class P>
std::vector<std::string> option_texts(const P& policy) {
  std::vector<std::string> texts;
  if constexpr (readable_aggregate<P>)
    for_each_field(policy, [&](const auto& field) { texts.push_back(option_text(field)); });
  return texts;
}

/// The policy's name with its options up to the last one that is not the default: "AccumulateOver(4)".
template <class P>
std::string describe_policy(const P& policy) {
  std::string name = unqualified(type_text<P>());
  if constexpr (std::default_initializable<P>) {
    auto options = option_texts(policy);
    const auto standard = option_texts(P{});
    while (!options.empty() && options.back() == standard[options.size() - 1]) options.pop_back();
    std::string list;
    for (const auto& option : options) list += (list.empty() ? "" : ", ") + option;
    if (!list.empty()) name += "(" + list + ")";
  }
  return name;
}

}  // namespace detail

/// A set of policies in words: those that differ from the defaults, joined by " + "; "defaults" if none does.
template <policy_set Set>
std::string describe(const Set& set) {
  using Standard = Policies<typename Set::Precision>;  // whether a bad step is skipped follows from the precision
  std::string out;
  const auto add = [&]<class Axis>(Axis, const auto& standard) {
    const auto text = detail::describe_policy(detail::member<Axis>(set));
    if (text != detail::describe_policy(detail::member<Axis>(standard))) out += (out.empty() ? "" : " + ") + text;
  };
  add(axis::Precision{}, Policies<>{});
  add(axis::Parallelism{}, Standard{});
  add(axis::Accumulation{}, Standard{});
  add(axis::Checkpointing{}, Standard{});
  add(axis::Execution{}, Standard{});
  add(axis::Clipping{}, Standard{});
  add(axis::NonFinite{}, Standard{});
  add(axis::Averaging{}, Standard{});
  return out.empty() ? "defaults" : out;
}

}  // namespace v0_1
}  // namespace treadle
