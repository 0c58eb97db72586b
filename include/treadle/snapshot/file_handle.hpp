// SPDX-License-Identifier: Apache-2.0
// An open file of the system, and folders that are removed with all that is in them. No torch here.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Owns a file descriptor, or -1.
class FileHandle {
 public:
  explicit FileHandle(int file = -1) noexcept : file_(file) {}
  FileHandle(FileHandle&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~FileHandle() { close(); }

  explicit operator bool() const noexcept { return file_ >= 0; }
  int get() const noexcept { return file_; }
  int release() noexcept { return std::exchange(file_, -1); }
  /// Closes it; returns 0 or an errno value, and leaves errno as it was.
  int close() noexcept {
    if (file_ < 0) return 0;
    const int before = errno;
    const int error = ::close(std::exchange(file_, -1)) == 0 ? 0 : errno;
    errno = before;
    return error == EINTR ? 0 : error;  // on Linux the descriptor is gone then, too
  }

 private:
  int file_;
};

/// What a folder holds, without "." and ".."; throws `SnapshotError` naming `path` if it cannot be read.
inline std::vector<std::string> names_in(FileHandle folder, const std::filesystem::path& path) {
  struct Close {
    void operator()(DIR* stream) const { ::closedir(stream); }
  };
  std::vector<std::string> names;
  const std::unique_ptr<DIR, Close> stream(::fdopendir(folder.get()));
  if (stream != nullptr) folder.release();
  while (stream != nullptr) {
    errno = 0;
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0)
    throw SnapshotError("'" + path.string() + "' cannot be listed (" + std::system_category().message(errno) +
                        "): make it a folder that can be read.");
  return names;
}

/// Removes `name` in the open folder `parent`, with all that it holds; `path` is for sentences. Whether it was there.
inline bool remove_in(int parent, const std::string& name, const std::filesystem::path& path, int depth) {
  const auto refuse = [&path](int error) {
    throw SnapshotError("'" + path.string() + "' cannot be removed (" + std::system_category().message(error) +
                        "): remove it by hand.");
  };
  if (::unlinkat(parent, name.c_str(), 0) == 0) return true;
  if (errno == ENOENT) return false;
  if (errno != EISDIR && errno != EPERM) refuse(errno);
  const int not_unlinked = errno;
  FileHandle folder(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder && errno == ENOENT) return false;
  if (!folder) refuse(errno == ENOTDIR || errno == ELOOP ? not_unlinked : errno);
  if (depth == 0) refuse(ELOOP);  // each level holds a descriptor; nothing of ours is that deep
  FileHandle listed(::fcntl(folder.get(), F_DUPFD_CLOEXEC, 0));
  if (!listed) refuse(errno);
  for (const auto& inner : names_in(std::move(listed), path)) remove_in(folder.get(), inner, path / inner, depth - 1);
  if (::unlinkat(parent, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) refuse(errno);
  return true;
}

/// Removes a file, or a folder with all that it holds, and returns whether there was one. Links are removed, never
/// followed. Throws `SnapshotError` naming what cannot be removed; what came before it is gone by then.
inline bool remove_tree(const std::filesystem::path& path) {
  std::string text = path.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();  // "link/" would be the folder behind the link
  const std::string name = std::filesystem::path(text).filename().string();
  if (name.empty() || name == "." || name == ".." || name == "/")
    throw SnapshotError("'" + path.string() +
                        "' is not removed: name the folder itself, by a path that ends in its name.");
  const auto parent = std::filesystem::path(text).parent_path();
  const FileHandle folder(::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder && errno == ENOENT) return false;
  if (!folder)
    throw SnapshotError("'" + path.string() + "' cannot be removed (" + std::system_category().message(errno) +
                        "): remove it by hand.");
  return remove_in(folder.get(), name, path, 64);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
