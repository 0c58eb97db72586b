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
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The bytes of a file; of a gzip file, told by its first two bytes, those that it holds.
class ByteSource {
 public:
  /// Throws `DataError` for what is not a readable file.
  explicit ByteSource(const std::filesystem::path& path) : path_(path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
      throw DataError("'" + path.string() + "' is not there, or is not a file.");
    file_.open(path, std::ios::binary);
    if (!file_) fail("cannot be opened for reading");
    std::array<unsigned char, 2> magic{};
    read_file(magic.data(), magic.size());
    gzip_ = magic[0] == 0x1F && magic[1] == 0x8B;
    file_.clear();
    file_.seekg(0);
    if (gzip_) begin_gzip();
  }

  /// Reads up to `size` bytes; fewer only at the end.
  std::size_t read(unsigned char* to, std::size_t size) { return gzip_ ? read_gzip(to, size) : read_file(to, size); }

  /// Reads up to `size` bytes, taking memory only as they come.
  std::vector<unsigned char> read_up_to(std::size_t size) {
    std::vector<unsigned char> bytes;
    while (bytes.size() < size) {
      const std::size_t have = bytes.size();
      const std::size_t piece = std::min(size - have, std::max<std::size_t>(have, std::size_t{1} << 16));
      bytes.resize(have + piece);
      const std::size_t got = read(bytes.data() + have, piece);
      bytes.resize(have + got);
      if (got < piece) break;
    }
    return bytes;
  }

  [[noreturn]] void fail(const std::string& what) const { throw DataError("'" + path_.string() + "' " + what + "."); }

 private:
  std::size_t read_file(unsigned char* to, std::size_t size) {
    file_.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(size));
    if (file_.bad()) fail("cannot be read to its end");
    return static_cast<std::size_t>(file_.gcount());
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
      if (stream_->avail_in == 0) {
        stream_->next_in = input_.data();
        stream_->avail_in = static_cast<uInt>(read_file(input_.data(), input_.size()));
        if (stream_->avail_in == 0) fail("is truncated: its gzip data stop before their end");
      }
      const std::size_t piece = std::min(size - done, std::size_t{1} << 30);  // zlib counts in 32 bits
      stream_->next_out = to + done;
      stream_->avail_out = static_cast<uInt>(piece);
      const int status = inflate(stream_.get(), Z_NO_FLUSH);
      done += piece - stream_->avail_out;
      if (status == Z_STREAM_END) {
        ended_ = true;
        unsigned char next = 0;
        if (stream_->avail_in > 0 || read_file(&next, 1) > 0) fail("has trailing bytes after its gzip data");
      } else if (status != Z_OK) {
        fail("is damaged: its gzip data or their checksum are wrong");
      }
    }
    return done;
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

  std::filesystem::path path_;
  std::ifstream file_;
  bool gzip_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
