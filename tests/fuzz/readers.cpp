// SPDX-License-Identifier: Apache-2.0
// Gives one reader of files whatever libFuzzer thinks of: it may throw a treadle::DataError or, for saved state,
// a treadle::SnapshotError, and nothing else may happen. TREADLE_FUZZ_READER chooses the reader; tests/fuzz/run builds
// and runs them all, readers.test.cpp gives each a few thousand inputs that are always the same.
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
#include "treadle/snapshot/manifest.hpp"
#include "treadle/snapshot/safetensors.hpp"

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

enum Reader { Idx, Cifar, Tokens, Csv, Image, Safetensors, Manifest };

[[maybe_unused]] void read_tokens(const std::filesystem::path& path, std::uint8_t choice) {
  const td::data::Tokens tokens(path, {.length = 1 + choice % 32,
                                       .bytes = choice % 2 == 0 ? 2 : 4,
                                       .end_of_document = 0,
                                       .vocabulary = choice < 128 ? 0 : 60'000});
  const std::int64_t rows = std::min<std::int64_t>(tokens.size(), 64);
  tokens.get_batch({tokens.size() - rows, rows});
}

[[maybe_unused]] void read_safetensors(const std::filesystem::path& path) {
  const td::SafetensorsFile file(path);
  td::NamedTensors tensors;
  std::int64_t bytes = 0;
  for (auto& [name, tensor] : file.tensors()) {
    if (tensor.nbytes() != static_cast<std::size_t>(file.info(name).bytes)) std::abort();
    // The first and the last byte of each are there, and can be written.
    if (tensor.nbytes() > 0) {
      auto* const at = static_cast<volatile char*>(tensor.mutable_data_ptr());
      at[0] = at[tensor.nbytes() - 1];
    }
    bytes += static_cast<std::int64_t>(tensor.nbytes());
    tensors.emplace_back(name, tensor);
  }
  // What was read can be written: every byte behind the header is in one tensor.
  td::detail::SafetensorsHeader header{.tensors = {}, .metadata = file.metadata()};
  for (const auto& [name, tensor] : tensors)
    header.tensors.push_back({name, 0, {static_cast<std::int64_t>(tensor.nbytes())}});
  const auto text = td::detail::lay_out_safetensors(header, "input");
  const auto again = td::detail::parse_safetensors(std::string_view(text).substr(8), bytes, "input");
  if (again.tensors.size() != tensors.size() || again.metadata != file.metadata()) std::abort();
}

void read_manifest(std::string text) {
  // No chance finds a checksum, so that all but a few inputs get the right one.
  if (!text.empty() && text.back() != '#') {
    auto json = td::detail::parse_json(text, "input");
    if (json.is_object() && json.contains("content")) {
      json["xxh3"] = td::detail::checksum_text(td::detail::checksum(td::detail::dump_json(json["content"], "input")));
      text = json.dump();
    }
  }
  const auto manifest = td::detail::parse_manifest(text, "input");
  const auto written = td::detail::manifest_text(manifest);
  if (td::detail::manifest_text(td::detail::parse_manifest(written, "input")) != written) std::abort();
}

void read(Reader reader, const std::uint8_t* bytes, std::size_t size) {
  // Options are chosen by the last byte, which is data as well.
  const std::uint8_t choice = size == 0 ? 0 : bytes[size - 1];
  if (reader == Image) {
    td::data::decode_image({bytes, size}, "input", {.channels = choice % 2 == 0 ? 1 : 3, .most_pixels = 1 << 20});
    return;
  }
  if (reader == Manifest) {
    read_manifest({reinterpret_cast<const char*>(bytes), size});
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
    case Safetensors:
      read_safetensors(MemoryFile::path());
      break;
    default: {
      td::data::CsvOptions options{.delimiter = choice % 3 == 0 ? ';' : ',', .header = choice % 2 == 0};
      if (choice > 200) options.missing = 0;
      td::data::read_csv(MemoryFile::path(), options);
    }
  }
}

void require_sentence(const td::Error& error) {
  if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  try {
    read(TREADLE_FUZZ_READER, bytes, size);
  } catch (const td::DataError& error) {
    require_sentence(error);
  } catch (const td::SnapshotError& error) {
    require_sentence(error);
  }
  return 0;
}
