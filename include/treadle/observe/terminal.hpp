// SPDX-License-Identifier: Apache-2.0
// What is known about the terminal behind standard output. No torch here.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Whether standard output is a terminal that can rewrite a line.
inline bool output_is_terminal() {
  const char* kind = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && (kind == nullptr || std::string_view(kind) != "dumb");
}

/// Columns of the terminal: COLUMNS if it is set, else what the terminal says, else 80.
inline int terminal_columns() {
  if (const char* columns = std::getenv("COLUMNS"))
    if (const int wanted = std::atoi(columns); wanted > 0) return wanted;
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

/// Whether the environment says that text is UTF-8.
inline bool terminal_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale(value);
    return locale.find("UTF-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
