// SPDX-License-Identifier: Apache-2.0
// Files that are read piece by piece where they are asked for, from any thread. No torch here.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// An open regular file. It is read through the page cache by position, not mapped: a mapping of a file that somebody
/// shortens ends the process, and what it saves is under 1 us for each piece.
class FileBytes {
 public:
  /// Throws `DataError` for what is not a readable regular file.
  explicit FileBytes(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path_, error))  // asked before it is opened: a pipe would wait for a writer
      throw DataError("'" + path_.string() + "' is not there, or is not a file.");
    file_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0) fail("cannot be opened for reading: " + std::system_category().message(errno));
    try {
      state_ = state();
    } catch (...) {
      ::close(file_);
      throw;
    }
  }
  FileBytes(FileBytes&& other) noexcept
      : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)), state_(other.state_) {}
  FileBytes& operator=(FileBytes&&) = delete;
  ~FileBytes() {
    if (file_ >= 0) ::close(file_);
  }

  std::int64_t size() const { return state_.size; }
  const std::filesystem::path& path() const { return path_; }

  /// Reads `size` bytes from `offset` on. Throws `DataError` if they are not there.
  void read(void* to, std::size_t size, std::int64_t offset) const {
    if (read_up_to(to, size, offset) < size)
      fail("has become shorter since it was opened; leave the files of a data set as they are");
  }
  /// Reads up to `size` bytes from `offset` on, fewer only at the end, and returns how many.
  std::size_t read_up_to(void* to, std::size_t size, std::int64_t offset) const {
    std::size_t done = 0;
    while (done < size) {
      const ssize_t got =
          ::pread(file_, static_cast<char*>(to) + done, size - done, offset + static_cast<std::int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("cannot be read: " + std::system_category().message(errno));
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }
  /// All of it.
  std::vector<unsigned char> read_all() const {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(size()));
    read(bytes.data(), bytes.size(), 0);
    return bytes;
  }
  /// Throws `DataError` if the file was written to since it was opened.
  void check_unchanged() const {
    if (!(state() == state_)) fail("has changed since it was opened; leave the files of a data set as they are");
  }

  [[noreturn]] void fail(const std::string& what) const { throw DataError("'" + path_.string() + "' " + what + "."); }

 private:
  struct State {
    std::int64_t size = 0;
    std::int64_t seconds = 0;
    std::int64_t nanoseconds = 0;
    bool operator==(const State&) const = default;
  };
  State state() const {
    struct stat now {};
    if (::fstat(file_, &now) != 0) fail("cannot be looked at: " + std::system_category().message(errno));
    return {now.st_size, now.st_mtim.tv_sec, now.st_mtim.tv_nsec};
  }

  std::filesystem::path path_;
  int file_ = -1;
  State state_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
