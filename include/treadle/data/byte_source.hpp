// SPDX-License-Identifier: Apache-2.0
// Reads a file, plain or gzip, piece by piece: what a header claims never decides how much memory is taken. No torch
// here.
#pragma once

#if TREADLE_HAS_ZLIB
#include <zlib.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "treadle/data/file_bytes.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What a gzip file may unpack to unless its reader is told otherwise: 16 GiB.
inline constexpr std::int64_t most_unpacked = std::int64_t{1} << 34;

/// The bytes of a file; of a gzip file, told by its first two bytes, those that it holds in all its members.
class ByteSource {
 public:
  /// Throws `DataError` for what is not a readable file, and in `read` for gzip data of more than `most_bytes`.
  explicit ByteSource(const std::filesystem::path& path, std::int64_t most_bytes = most_unpacked)
      : file_(path), most_bytes_(most_bytes) {
    if (most_bytes < 1)
      throw ConfigError("treadle: most_bytes, which a gzip file may unpack to, must be at least 1, and is " +
                        std::to_string(most_bytes) + ".");
    std::array<unsigned char, 2> magic{};
    gzip_ = file_.read_up_to(magic.data(), magic.size(), 0) == magic.size() && magic[0] == 0x1F && magic[1] == 0x8B;
    if (gzip_) begin_gzip();
  }

  /// Reads up to `size` bytes; fewer only at the end.
  std::size_t read(unsigned char* to, std::size_t size) { return gzip_ ? read_gzip(to, size) : read_file(to, size); }

  /// Reads up to `size` bytes, taking memory only as they come.
  std::vector<unsigned char> read_up_to(std::size_t size) {
    std::vector<unsigned char> bytes;
    while (bytes.size() < size) {
      const std::size_t have = bytes.size();
      const std::size_t piece =
          std::min(size - have, std::clamp<std::size_t>(have, std::size_t{1} << 16, std::size_t{1} << 24));
      bytes.resize(have + piece);
      const std::size_t got = read(bytes.data() + have, piece);
      bytes.resize(have + got);
      if (got < piece) break;
    }
    return bytes;
  }

  [[noreturn]] void fail(const std::string& what) const { file_.fail(what); }

 private:
  std::size_t read_file(unsigned char* to, std::size_t size) {
    const std::size_t got = file_.read_up_to(to, size, offset_);
    offset_ += static_cast<std::int64_t>(got);
    return got;
  }

#if TREADLE_HAS_ZLIB
  void begin_gzip() {
    auto stream = std::make_unique<z_stream>();
    if (inflateInit2(stream.get(), 16 + MAX_WBITS) != Z_OK) fail("cannot be read: zlib does not start");
    stream_.reset(stream.release());
  }

  std::size_t read_gzip(unsigned char* to, std::size_t size) {
    std::size_t done = 0;
    while (done < size && !ended_) {
      if (!has_input()) fail("is truncated: its gzip data stop before their end");
      const std::size_t piece = std::min(size - done, std::size_t{1} << 30);  // zlib counts in 32 bits
      stream_->next_out = to + done;
      stream_->avail_out = static_cast<uInt>(piece);
      const int status = inflate(stream_.get(), Z_NO_FLUSH);
      done += piece - stream_->avail_out;
      unpacked_ += static_cast<std::int64_t>(piece - stream_->avail_out);
      if (unpacked_ > most_bytes_)
        fail("unpacks to more than " + std::to_string(most_bytes_) +
             " bytes, which most_bytes allows; allow more if it is what it should be");
      if (status == Z_STREAM_END) {
        ended_ = !has_input();
        if (!ended_ && *stream_->next_in != 0x1F) fail("has trailing bytes after its gzip data");
        if (!ended_ && inflateReset(stream_.get()) != Z_OK) fail("cannot be read: zlib does not start again");
      } else if (status != Z_OK) {
        fail("is damaged: its gzip data or their checksum are wrong");
      }
    }
    return done;
  }

  bool has_input() {
    if (stream_->avail_in > 0) return true;
    stream_->next_in = input_.data();
    stream_->avail_in = static_cast<uInt>(read_file(input_.data(), input_.size()));
    return stream_->avail_in > 0;
  }

  struct EndGzip {
    void operator()(z_stream* stream) const {
      inflateEnd(stream);
      delete stream;
    }
  };
  std::unique_ptr<z_stream, EndGzip> stream_;
  std::array<unsigned char, std::size_t{1} << 16> input_{};
  bool ended_ = false;
#else
  [[noreturn]] void begin_gzip() const {
    fail("is compressed with gzip, which this build cannot read; unpack it with gunzip, or build Treadle with zlib");
  }
  std::size_t read_gzip(unsigned char*, std::size_t) {
    begin_gzip();
  }
#endif

  FileBytes file_;
  std::int64_t offset_ = 0;
  std::int64_t most_bytes_;
  std::int64_t unpacked_ = 0;
  bool gzip_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
