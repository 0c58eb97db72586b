// SPDX-License-Identifier: Apache-2.0
// What an error says: one clear sentence, of the right type.
#pragma once

#include <string>
#include <string_view>

#include "treadle/error.hpp"

#include "support/doctest.hpp"

namespace treadle_test {

/// The text of the `E` that `f` throws; empty where it throws nothing, in words where it throws something else.
template <class E, class F>
std::string thrown(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("something else was thrown: ") + error.what();
  }
  return {};
}

/// Whether `text` reads as Treadle's errors do: one line that says where, ends with a full stop and names no source
/// file.
inline bool is_sentence(std::string_view text) {
  return text.size() > 30 && text.find('\n') == std::string_view::npos && text.back() == '.' &&
         text.find(": ") != std::string_view::npos && text.find(".hpp") == std::string_view::npos &&
         text.find("Exception raised") == std::string_view::npos;
}

}  // namespace treadle_test

/// Demands that `expression` throws an `E` whose message is a sentence and contains `part`.
#define CHECK_SAYS(E, part, ...)                                                     \
  do {                                                                               \
    const std::string said_ = treadle_test::thrown<E>([&] { (void)(__VA_ARGS__); }); \
    INFO("it says: " << said_);                                                      \
    DOCTEST_CHECK(said_.find(part) != std::string::npos);                            \
    DOCTEST_CHECK(treadle_test::is_sentence(said_));                                 \
  } while (false)
