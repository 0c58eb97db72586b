// SPDX-License-Identifier: Apache-2.0
// Environment variables, read with sentences for what is wrong in them. No torch here.
#pragma once

#include <charconv>
#include <cstddef>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// Gives the value of an environment variable, or null if it is not set; `std::getenv` is one.
using EnvironmentLookup = std::function<const char*(const char*)>;

namespace detail {

/// What a launcher calls the numbers that a world is read from.
struct WorldNames {
  const char* launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

inline constexpr WorldNames plain_names{"", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
inline constexpr WorldNames open_mpi_names{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};

/// An environment seen through a lookup. A variable that is set to nothing counts as not set.
class Environment {
 public:
  explicit Environment(EnvironmentLookup lookup) : lookup_(std::move(lookup)) {}

  std::string text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr ? std::string() : std::string(value);
  }
  bool has(const char* name) const { return !text(name).empty(); }
  /// The same for a sentence: its beginning, if it is long.
  std::string quoted(const char* name) const {
    constexpr std::size_t longest = 200;
    const auto value = text(name);
    return "'" + (value.size() <= longest ? value : value.substr(0, longest) + "...") + "'";
  }

  /// The first of the two that is set.
  const char* either(const char* name, const char* other) const { return has(name) || !has(other) ? name : other; }

  /// The number in a variable that is set; `ConfigError` unless it is a whole number from `least` to `most`.
  int number(const char* name, int least, int most) const {
    const auto value = text(name);
    const char* const end = value.data() + value.size();
    int result = 0;
    const auto parsed = std::from_chars(value.data(), end, result);
    if (parsed.ec != std::errc() || parsed.ptr != end || result < least || result > most) {
      throw ConfigError("World: the environment variable " + std::string(name) + " is " + quoted(name) +
                        ", but must be a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
                        ": let the launcher set it, or correct it.");
    }
    return result;
  }

 private:
  EnvironmentLookup lookup_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
