// SPDX-License-Identifier: Apache-2.0
// Files that are on the disk when they say so, and that a crash leaves whole or not there. No torch here.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "treadle/error.hpp"
#include "treadle/snapshot/file_handle.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What to do about an errno value of a write, as the end of a sentence.
inline std::string write_advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "make room, or choose a folder on another disk";
    case EFBIG:
      return "raise the limit on the size of files (ulimit -f)";
    case EEXIST:
      return "remove it, or choose another name";
    case ENOENT:
    case ENOTDIR:
      return "create its folder first";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a folder that can be written";
    case EIO:
      return "look after the disk, or choose another one";
    default:
      return "choose another place";
  }
}

/// Throws the sentence for a path at which `doing` ("written", "renamed") failed with an errno value.
[[noreturn]] inline void refuse_write(const std::filesystem::path& path, const char* doing, int error) {
  throw SnapshotError("'" + path.string() + "' cannot be " + doing + " (" + std::system_category().message(error) +
                      "): " + write_advice(error) + ".");
}

/// Writes all of `size` bytes, however many calls that takes; returns 0 or an errno value.
inline int write_fully(int file, const void* bytes, std::size_t size) {
  const char* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t wrote = ::write(file, at, size);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return errno;
    if (wrote == 0) return ENOSPC;  // no progress and no reason given: trying again could go on for ever
    at += wrote;
    size -= static_cast<std::size_t>(wrote);
  }
  return 0;
}

/// Waits until what a file or folder holds is on the disk; returns 0 or an errno value.
inline int sync_fully(int file) {
  while (::fsync(file) != 0)
    if (errno != EINTR) return errno;  // never asked again: the kernel may already have dropped what it could not write
  return 0;
}

/// Waits until the names in the folder `path` are on the disk; throws `SnapshotError` if they cannot be.
inline void sync_directory(const std::filesystem::path& path) {
  const FileHandle folder(::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int error = folder ? sync_fully(folder.get()) : errno;
  // Some network file systems have no such call for folders; they write names before they answer.
  if (error != 0 && error != EINVAL) refuse_write(path, "written to disk", error);
}

/// A new file that is written from front to end. Without a `finish()` that returned it is removed again, so that an
/// error leaves nothing behind.
class DurableFile {
 public:
  /// Throws `SnapshotError` if there is such a file already, or none can be made.
  explicit DurableFile(std::filesystem::path path)
      : path_(std::move(path)), file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    if (!file_) refuse_write(path_, "created", errno);
  }
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;
  ~DurableFile() {
    if (file_ && !kept_) ::unlink(path_.c_str());
  }

  /// Takes room for `size` bytes in all, where the file system can: a full disk is noticed before the work is done.
  void reserve(std::int64_t size) {
    int error = 0;
    do error = ::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, 0, size) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) refuse_write(path_, "written", error);
  }

  /// Appends `size` bytes; small pieces are gathered. Throws `SnapshotError` with the reason if they cannot be written.
  void write(const void* bytes, std::size_t size) {
    if (size >= buffer_size / 4) {
      flush();
      write_through(bytes, size);
      return;
    }
    if (buffer_ == nullptr) buffer_ = std::make_unique<char[]>(buffer_size);
    if (buffered_ + size > buffer_size) flush();
    std::copy_n(static_cast<const char*>(bytes), size, buffer_.get() + buffered_);
    buffered_ += size;
  }
  void write(std::string_view bytes) { write(bytes.data(), bytes.size()); }

  /// Returns when all bytes are on the disk. The file stays open.
  void sync() {
    flush();
    if (const int error = sync_fully(file_.get()); error != 0) refuse_write(path_, "written to disk", error);
  }
  /// Returns when all bytes are on the disk, with the file closed and kept. Its name is there for good only after
  /// `sync_directory` of its folder.
  void finish() {
    sync();
    if (const int error = file_.close(); error != 0) {
      ::unlink(path_.c_str());
      refuse_write(path_, "written to disk", error);
    }
  }

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Bytes that were given to `write`.
  std::int64_t size() const noexcept { return written_ + static_cast<std::int64_t>(buffered_); }
  int descriptor() const noexcept { return file_.get(); }
  /// From now on the file stays when this object goes: it has another name.
  void keep() noexcept { kept_ = true; }

 private:
  static constexpr std::size_t buffer_size = std::size_t{1} << 20;

  void flush() {
    if (buffered_ == 0) return;
    write_through(buffer_.get(), std::exchange(buffered_, 0));
  }
  void write_through(const void* bytes, std::size_t size) {
    if (const int error = write_fully(file_.get(), bytes, size); error != 0) refuse_write(path_, "written", error);
    written_ += static_cast<std::int64_t>(size);
    // The disk begins now instead of at the end, while the next bytes are made. Only advice: `sync` is what counts.
    if (written_ - started_ >= (std::int64_t{8} << 20)) {
      ::sync_file_range(file_.get(), started_, written_ - started_, SYNC_FILE_RANGE_WRITE);
      started_ = written_;
    }
  }

  std::filesystem::path path_;
  FileHandle file_;
  bool kept_ = false;
  std::unique_ptr<char[]> buffer_;
  std::size_t buffered_ = 0;
  std::int64_t written_ = 0;
  std::int64_t started_ = 0;
};

/// Writes a file that takes the place of `path` in one piece: until `commit()`, and after a crash at any moment, the
/// old one is there unchanged. Meanwhile the new one has the same name with ".treadle-tmp" behind it. What a symbolic
/// link points to is replaced, not the link.
///
/// A lock tells such a file that a crash left, which is removed, from one that somebody is writing, which is an error.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path) : target_(resolved(path)) {
    const std::filesystem::path temporary = target_.string() + ".treadle-tmp";
    // Each turn either has the file for its own or removed one that a crash left, so a few are enough.
    for (int turn = 0; turn < 16 && file_ == nullptr; ++turn) {
      if (remove_left(temporary)) try_create(temporary);
    }
    if (file_ == nullptr) refuse_write(temporary, "created", EEXIST);
  }

  DurableFile& file() noexcept { return *file_; }
  /// What will be replaced.
  const std::filesystem::path& target() const noexcept { return target_; }

  /// Returns when the new file is on the disk under its name. Throws `SnapshotError` if that fails, with the old
  /// one in its place unless only its folder cannot be synced.
  void commit() {
    file_->sync();
    // Renamed while it is open, because closing ends the lock: until then nobody may take the name for his own.
    if (::rename(file_->path().c_str(), target_.c_str()) != 0) refuse_write(target_, "replaced", errno);
    file_->keep();
    sync_directory(target_.parent_path());
    file_.reset();
  }

 private:
  static std::filesystem::path resolved(const std::filesystem::path& path) {
    std::error_code error;
    auto target = std::filesystem::weakly_canonical(path, error);
    if (error) refuse_write(path, "written", error.value());
    struct stat state {};
    if (path.empty() || path.filename().empty()) refuse_write(path, "written", EISDIR);
    if (::stat(target.c_str(), &state) == 0 && !S_ISREG(state.st_mode))
      throw SnapshotError("'" + path.string() + "' cannot be written: it is no regular file; choose another name.");
    return target;
  }

  /// Whether no file of that name is in the way any more.
  static bool remove_left(const std::filesystem::path& temporary) {
    const FileHandle left(::open(temporary.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!left && errno == ENOENT) return true;
    if (!left) refuse_write(temporary, "removed", errno);
    if (is_locked_by_another(left.get()))
      throw SnapshotError("'" + temporary.string() +
                          "' is being written by somebody else; give each writer a path of its own.");
    // The name may meanwhile be another file's, of a writer that was quicker. It goes only while it is what was locked.
    struct stat held {};
    struct stat named {};
    if (::fstat(left.get(), &held) != 0 || ::lstat(temporary.c_str(), &named) != 0) return errno == ENOENT;
    if (held.st_ino != named.st_ino || held.st_dev != named.st_dev) return false;
    if (::unlink(temporary.c_str()) != 0 && errno != ENOENT) refuse_write(temporary, "removed", errno);
    return true;
  }
  void try_create(const std::filesystem::path& temporary) {
    std::unique_ptr<DurableFile> file;
    try {
      file = std::make_unique<DurableFile>(temporary);
    } catch (const SnapshotError&) {
      struct stat state {};
      if (::lstat(temporary.c_str(), &state) == 0) return;  // somebody was quicker: the next turn looks at his
      throw;
    }
    struct stat state {};
    const bool is_ours =
        !is_locked_by_another(file->descriptor()) && ::fstat(file->descriptor(), &state) == 0 && state.st_nlink == 1;
    if (is_ours)
      file_ = std::move(file);
    else
      file->keep();  // it was taken for one that a crash left, before it was locked; its name may be another's by now
  }
  static bool is_locked_by_another(int file) {
    // A file system without locks says so with another error, and has to do without.
    return ::flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  }

  std::filesystem::path target_;
  std::unique_ptr<DurableFile> file_;
};

/// Replaces the file `path` by `bytes` in one piece and on the disk, or throws `SnapshotError` and leaves it as it was.
inline void write_file_atomically(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile atomic(path);
  atomic.file().write(bytes);
  atomic.commit();
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
