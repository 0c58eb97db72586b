// SPDX-License-Identifier: Apache-2.0
// Gives one reader of files whatever libFuzzer thinks of: it may throw a treadle::DataError, and nothing else may
// happen. TREADLE_FUZZ_READER chooses the reader; tests/fuzz/run builds and runs them all, readers.test.cpp gives each
// a few thousand inputs that are always the same.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

#include "treadle/data/cifar.hpp"
#include "treadle/data/csv.hpp"
#include "treadle/data/dataset.hpp"
#include "treadle/data/idx.hpp"
#include "treadle/data/image.hpp"
#include "treadle/data/tokens.hpp"
#include "treadle/error.hpp"

namespace td = treadle;

namespace {

/// A file in memory with the bytes of an input.
class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* bytes, std::size_t size) {
    if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, bytes, size, 0) != static_cast<ssize_t>(size)) std::abort();
  }
  static std::filesystem::path path() { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  inline static const int file_ = ::memfd_create("input", MFD_CLOEXEC);
};

enum Reader { Idx, Cifar, Tokens, Csv, Image };

[[maybe_unused]] void read_tokens(const std::filesystem::path& path, std::uint8_t choice) {
  const td::data::Tokens tokens(path, {.length = 1 + choice % 32,
                                       .bytes = choice % 2 == 0 ? 2 : 4,
                                       .end_of_document = 0,
                                       .vocabulary = choice < 128 ? 0 : 60'000});
  const std::int64_t rows = std::min<std::int64_t>(tokens.size(), 64);
  tokens.get_batch({tokens.size() - rows, rows});
}

void read(Reader reader, const std::uint8_t* bytes, std::size_t size) {
  // Options are chosen by the last byte, which is data as well.
  const std::uint8_t choice = size == 0 ? 0 : bytes[size - 1];
  if (reader == Image) {
    td::data::decode_image({bytes, size}, "input", {.channels = choice % 2 == 0 ? 1 : 3, .most_pixels = 1 << 20});
    return;
  }
  const MemoryFile file(bytes, size);
  switch (reader) {
    case Idx:
      td::data::read_idx(MemoryFile::path());
      break;
    case Cifar:
      td::data::read_cifar(MemoryFile::path(), choice % 2 == 0 ? 10 : 100);
      break;
    case Tokens:
      read_tokens(MemoryFile::path(), choice);
      break;
    default: {
      td::data::CsvOptions options{.delimiter = choice % 3 == 0 ? ';' : ',', .header = choice % 2 == 0};
      if (choice > 200) options.missing = 0;
      td::data::read_csv(MemoryFile::path(), options);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  try {
    read(TREADLE_FUZZ_READER, bytes, size);
  } catch (const td::DataError& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();  // one sentence
  }
  return 0;
}
