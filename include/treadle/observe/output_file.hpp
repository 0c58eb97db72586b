// SPDX-License-Identifier: Apache-2.0
// Files that observers write. No torch here.
#pragma once

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Throws the sentence for a file that `who` cannot write; `error` is an errno value.
[[noreturn]] inline void refuse_output(std::string_view who, const std::filesystem::path& path, int error) {
  const auto folder = path.parent_path();
  std::error_code ignored;
  const bool no_folder = !folder.empty() && !std::filesystem::is_directory(folder, ignored);
  throw ConfigError(std::string(who) + ": cannot write '" + path.string() + "' (" +
                    (no_folder ? "there is no folder '" + folder.string() + "'" : std::string(std::strerror(error))) +
                    "); " + (no_folder ? "create the folder first" : "name a file in a folder that can be written") +
                    ".");
}

/// Throws `ConfigError` unless `path` can be written; leaves what it holds, or that it is not there, as it is.
inline void require_writable(std::string_view who, const std::filesystem::path& path) {
  std::error_code ignored;
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
  errno = 0;
  if (path.empty() || !std::ofstream(path, std::ios::app)) refuse_output(who, path, errno == 0 ? ENOENT : errno);
  if (!there) std::filesystem::remove(path, ignored);
}

/// Whether `path` is something that may be renamed over: a regular file, or nothing yet. Devices and pipes are not.
inline bool is_replaceable(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto type = std::filesystem::status(path, ignored).type();
  return type == std::filesystem::file_type::regular || type == std::filesystem::file_type::not_found;
}

/// Replaces the content of `path` in one piece: a reader, or a crash, finds the old file or the new one. What a
/// symbolic link points to is replaced, not the link. Returns false, with the old file unchanged, if that fails.
inline bool replace_file(const std::filesystem::path& path, std::string_view content) {
  std::error_code error;
  auto target = std::filesystem::weakly_canonical(path, error);
  if (error || !is_replaceable(target)) return false;
  const std::filesystem::path temporary = target.string() + ".tmp";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << content;
  file.close();
  if (file) std::filesystem::rename(temporary, target, error);
  if (file && !error) return true;
  std::filesystem::remove(temporary, error);
  return false;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
