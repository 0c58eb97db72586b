// SPDX-License-Identifier: Apache-2.0
// The two notations in which Slurm writes hosts and tasks. No torch here.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The first host of a list such as `node[003-005,9],login`, here `node003`; nothing if it is no such list.
inline std::optional<std::string> first_slurm_host(std::string_view list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] == ']') return std::nullopt;
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const auto close = list.find(']', i);
    if (close == list.npos) return std::nullopt;
    const auto inside = list.substr(i + 1, close - i - 1);
    const auto first = inside.substr(0, inside.find_first_of("-,"));  // as it stands: its zeros belong to the name
    if (first.empty() || first.find_first_not_of("0123456789") != first.npos) return std::nullopt;
    host += first;
    i = close;
  }
  if (host.empty()) return std::nullopt;
  return host;
}

/// The tasks of node `node` in a list such as `4(x2),3`: nodes 0 and 1 have 4, node 2 has 3; nothing if there is none.
inline std::optional<int> slurm_tasks_of_node(std::string_view list, int node) {
  const auto number = [](std::string_view text) -> std::optional<int> {
    int value = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || value < 1) return std::nullopt;
    return value;
  };
  while (!list.empty() && node >= 0) {
    auto part = list.substr(0, list.find(','));
    list.remove_prefix(part.size() == list.size() ? part.size() : part.size() + 1);
    std::optional<int> nodes = 1;
    if (const auto open = part.find("(x"); open != part.npos && part.back() == ')') {
      nodes = number(part.substr(open + 2, part.size() - open - 3));
      part = part.substr(0, open);
    }
    const auto tasks = number(part);
    if (!tasks || !nodes) return std::nullopt;
    if (node < *nodes) return tasks;
    node -= *nodes;
  }
  return std::nullopt;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
