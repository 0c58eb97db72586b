// SPDX-License-Identifier: Apache-2.0
// Files of saved state as they are read: every surprise is a SnapshotError that names the file. No torch here.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/snapshot/checksum.hpp"
#include "treadle/snapshot/file_handle.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A regular file that is open for reading.
class InputFile {
 public:
  /// Throws `SnapshotError` for what is not a readable regular file.
  explicit InputFile(std::filesystem::path path)
      // Without waiting, as a pipe would for a writer: what is no regular file is refused below.
      : path_(std::move(path)), file_(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (!file_) refuse("cannot be read (" + std::system_category().message(errno) + "): name a file that is there");
    struct stat state {};
    if (::fstat(file_.get(), &state) != 0) refuse_read();
    if (!S_ISREG(state.st_mode)) refuse("is no regular file: name the file itself");
    size_ = state.st_size;
  }

  /// Its bytes when it was opened.
  std::int64_t size() const noexcept { return size_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  int descriptor() const noexcept { return file_.get(); }

  /// Reads `size` bytes from `offset` on; throws `SnapshotError` if they are not there.
  void read(void* to, std::size_t size, std::int64_t offset) const {
    std::size_t done = 0;
    while (done < size) {
      const ssize_t got =
          ::pread(file_.get(), static_cast<char*>(to) + done, size - done, offset + static_cast<std::int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse_read();
      if (got == 0) refuse("has become shorter while it was read: leave saved files as they are");
      done += static_cast<std::size_t>(got);
    }
  }
  /// All of it, if that is at most `most` bytes.
  std::string read_all(std::int64_t most) const {
    if (size_ > most)
      refuse("holds " + std::to_string(size_) + " bytes, and " + std::to_string(most) +
             " are the most: take another copy of the file");
    std::string bytes(static_cast<std::size_t>(size_), '\0');
    read(bytes.data(), bytes.size(), 0);
    return bytes;
  }
  /// The XXH3-64 sum of `size` bytes from `offset` on.
  std::uint64_t checksum(std::int64_t offset, std::int64_t size) const {
    Checksum sum;
    std::vector<char> piece(static_cast<std::size_t>(std::min<std::int64_t>(size, std::int64_t{1} << 20)));
    while (size > 0) {
      const auto part = static_cast<std::size_t>(std::min<std::int64_t>(size, static_cast<std::int64_t>(piece.size())));
      read(piece.data(), part, offset);
      sum.add(piece.data(), part);
      offset += static_cast<std::int64_t>(part);
      size -= static_cast<std::int64_t>(part);
    }
    return sum.value();
  }
  std::uint64_t checksum() const { return checksum(0, size_); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw SnapshotError("'" + path_.string() + "' " + what + ".");
  }

 private:
  [[noreturn]] void refuse_read() const {
    refuse("cannot be read (" + std::system_category().message(errno) + "): look after the disk, or take another copy");
  }

  std::filesystem::path path_;
  FileHandle file_;
  std::int64_t size_ = 0;
};

/// All bytes of a file of at most `most`; throws `SnapshotError` naming it otherwise.
inline std::string read_file(const std::filesystem::path& path, std::int64_t most) {
  return InputFile(path).read_all(most);
}
/// The XXH3-64 sum of a file, read in pieces; the same number that `xxhsum -H3` prints.
inline std::uint64_t file_checksum(const std::filesystem::path& path) {
  return InputFile(path).checksum();
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
