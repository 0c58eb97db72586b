// SPDX-License-Identifier: Apache-2.0
// The folder of a run's snapshots: which there are, which to keep, and nobody else's.
#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/sink.hpp"
#include "treadle/snapshot/durable_file.hpp"
#include "treadle/snapshot/file_handle.hpp"
#include "treadle/snapshot/manifest.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What is being written or removed has this behind its name, and is litter once nobody is at it.
inline constexpr std::string_view unfinished = ".unfinished";

inline std::string snapshot_name(std::int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 10 ? 10 - digits.size() : 0, '0') + digits;
}
/// The step of a snapshot's name; none for any other name.
inline std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with("step-") || name.size() > 24 || name.size() < 6) return std::nullopt;
  std::int64_t step = 0;
  for (const char c : name.substr(5)) {
    if (c < '0' || c > '9' || step > (INT64_MAX - 9) / 10) return std::nullopt;
    step = 10 * step + (c - '0');
  }
  return snapshot_name(step) == name ? std::optional(step) : std::nullopt;
}

/// Makes a folder, and those that it lies in; throws `SnapshotError` if that cannot be.
inline void make_folder(const std::filesystem::path& path) {
  for (auto slash = path.string().find('/', 1);; slash = path.string().find('/', slash + 1)) {
    const std::string part = path.string().substr(0, slash);
    if (::mkdir(part.c_str(), 0777) != 0 && errno != EEXIST && slash == std::string::npos)
      throw SnapshotError("the folder '" + part + "' for snapshots cannot be made (" + std::strerror(errno) +
                          "); name a folder that this user may write to.");
    if (slash == std::string::npos) break;
  }
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode))
    throw SnapshotError("'" + path.string() + "' is to hold snapshots and is no folder; name another.");
}

/// The snapshots in a folder, whether they are valid or not: steps and paths, the newest first.
inline std::vector<std::pair<std::int64_t, std::filesystem::path>> list_snapshots(const std::filesystem::path& root) {
  std::vector<std::pair<std::int64_t, std::filesystem::path>> found;
  FileHandle folder(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder && errno == ENOENT) return found;
  if (!folder)
    throw SnapshotError("the folder '" + root.string() + "' of snapshots cannot be read (" + std::strerror(errno) +
                        "); look at its permissions.");
  for (const auto& name : names_in(std::move(folder), root))
    if (const auto step = step_of(name)) found.emplace_back(*step, root / name);
  std::ranges::sort(found, std::ranges::greater{});
  return found;
}

/// Holds the folder of a run's snapshots for this process: makes it, removes what a process that ended left unfinished
/// there, and removes snapshots of this run that are no longer wanted.
class SnapshotFolder {
 public:
  /// Throws `SnapshotError` if another process holds it or it cannot be written to.
  explicit SnapshotFolder(std::filesystem::path root) : root_(std::move(root)) {
    make_folder(root_);
    lock_ = FileHandle(::open((root_ / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!lock_)
      throw SnapshotError("the folder '" + root_.string() + "' of snapshots cannot be written to (" +
                          std::strerror(errno) + "); look at its permissions.");
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0)
      throw SnapshotError("another process saves snapshots in '" + root_.string() +
                          "'; give each run a folder of its own, or wait for the other's end.");
    for (const auto& name : names_in(FileHandle(::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), root_))
      if (name.ends_with(unfinished) && name.starts_with("step-")) clear(name);
  }

  const std::filesystem::path& root() const { return root_; }

  /// Gives `folder`, which is complete and on the disk, the name of a snapshot, in place of one that has it.
  void take_in(const std::filesystem::path& folder, std::int64_t step) const {
    const auto path = root_ / snapshot_name(step);
    if (::renameat2(AT_FDCWD, folder.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) != 0) {
      const int reason = errno;
      // In one piece where the file system can do that; else the old one steps aside first.
      if (reason == EEXIST && ::renameat2(AT_FDCWD, folder.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
        sync_directory(root_);
        remove_tree(folder);
        return;
      }
      const auto aside = path.string() + ".old" + std::string(unfinished);
      if (reason == EEXIST && ::rename(path.c_str(), aside.c_str()) != 0) refuse_rename(path);
      if (::rename(folder.c_str(), path.c_str()) != 0) refuse_rename(path);
      if (reason == EEXIST) remove_tree(aside);
    }
    sync_directory(root_);
  }

  /// Removes a snapshot; it is none any more before its files go.
  void remove(const std::filesystem::path& snapshot) const {
    const auto aside = snapshot.string() + std::string(unfinished);
    if (::rename(snapshot.c_str(), aside.c_str()) != 0) return;  // somebody else has
    remove_tree(aside);
  }

 private:
  // What stepped aside for a snapshot that never came takes its place again.
  void clear(const std::string& name) const {
    const auto end = name.find(".old" + std::string(unfinished));
    const auto before = end == std::string::npos ? std::filesystem::path() : root_ / name.substr(0, end);
    if (!before.empty() &&
        ::renameat2(AT_FDCWD, (root_ / name).c_str(), AT_FDCWD, before.c_str(), RENAME_NOREPLACE) == 0)
      return;
    remove_tree(root_ / name);
  }
  [[noreturn]] static void refuse_rename(const std::filesystem::path& path) {
    throw SnapshotError("the snapshot '" + path.string() + "' cannot be given its name (" + std::strerror(errno) +
                        "); look at the folder's permissions.");
  }

  std::filesystem::path root_;
  FileHandle lock_;
};

}  // namespace detail

/// The newest valid snapshot in `root`, every byte of which was verified; none if there is none. Says what is wrong
/// with newer ones. Throws `SnapshotError` if the folder cannot be read.
inline std::optional<std::filesystem::path> latest_snapshot(const std::filesystem::path& root) {
  for (const auto& [step, path] : detail::list_snapshots(root)) try {
      static_cast<void>(verify_snapshot(path));
      return path;
    } catch (const SnapshotError& error) {
      warn("treadle: the snapshot of step " + std::to_string(step) + " is passed over: " + error.what());
    }
  return std::nullopt;
}

}  // namespace v0_1
}  // namespace treadle
