// SPDX-License-Identifier: Apache-2.0
// Named parameter groups: which parameters get another rate or decay.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/glob.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace optim {

/// Parameters whose name matches `pattern` (`*` any run of characters, `?` one); the first group that matches wins.
struct ParameterGroup {
  std::string pattern;
  double rate = 1.0;                     ///< multiplies the rule's learning rate
  std::optional<double> weight_decay{};  ///< replaces the rule's weight decay

  bool operator==(const ParameterGroup&) const = default;
};

/// Throws `ConfigError` for a rate or decay out of range.
inline void check_groups(const std::vector<ParameterGroup>& groups) {
  for (const auto& group : groups) {
    if (!(group.rate >= 0) || !std::isfinite(group.rate))
      throw ConfigError("treadle::optim: the rate of parameter group '" + group.pattern +
                        "' must be finite and not negative.");
    if (group.weight_decay && (!(*group.weight_decay >= 0) || !std::isfinite(*group.weight_decay)))
      throw ConfigError("treadle::optim: the weight decay of parameter group '" + group.pattern +
                        "' must be finite and not negative.");
  }
}

/// The group of each parameter: 0 for none, else 1 + its index. Throws `ConfigError` for a group that nothing matches.
inline std::vector<std::size_t> assign_groups(const std::vector<ParameterGroup>& groups,
                                              const ParameterList& parameters) {
  std::vector<std::size_t> group_of(parameters.size(), 0);
  std::vector<bool> used(groups.size(), false);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (!glob_match(groups[g].pattern, parameters[i].name)) continue;
      used[g] = true;
      if (group_of[i] == 0) group_of[i] = g + 1;
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g)
    if (!used[g])
      throw ConfigError("treadle::optim: parameter group '" + groups[g].pattern +
                        "' matches no parameter; use names from named_parameters(), with * for any run of characters.");
  return group_of;
}

}  // namespace optim
}  // namespace v0_1
}  // namespace treadle
