// SPDX-License-Identifier: Apache-2.0
// Tests of several processes: a program starts itself again as ranks, each of which plays a role.
#pragma once

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "treadle/runtime/launch.hpp"
#include "treadle/runtime/world.hpp"

#include "support/doctest.hpp"

namespace treadle_test {

/// What ranks do, by name. Checks in it count as they do anywhere: a rank with a failed one ends with a code of its
/// own.
using Roles = std::map<std::string, std::function<void(const treadle::World&)>>;
inline Roles& roles() {
  static Roles all;
  return all;
}
/// Makes `body` a role for the life of the program.
struct Role {
  Role(const std::string& name, std::function<void(const treadle::World&)> body) { roles()[name] = std::move(body); }
};

/// Runs this program as `ranks` processes in the role `name`; the code that the launcher returns.
inline int run_ranks(int ranks, const std::string& name, std::chrono::milliseconds grace = std::chrono::seconds(20)) {
  ::setenv("TREADLE_TEST_ROLE", name.c_str(), 1);
  std::vector<std::string> words{"rank", "--test-case=as a rank", "--no-skip", "--no-intro", "--no-version"};
  if (ranks == 1) {  // launch starts nothing for one
    roles().at(name)(treadle::World{});
    return 0;
  }
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  const auto code = treadle::launch(ranks, static_cast<int>(argv.size()), argv.data(),
                                    {.log_dir = {}, .grace = grace, .kill_grace = std::chrono::seconds(2)});
  return code.value();
}

}  // namespace treadle_test

TEST_CASE("as a rank" * doctest::skip()) {
  treadle::launch(1, 0, nullptr);  // makes this process its launcher's rank
  const char* name = std::getenv("TREADLE_TEST_ROLE");
  REQUIRE(name != nullptr);
  treadle_test::roles().at(name)(treadle::World::from_environment());
}
