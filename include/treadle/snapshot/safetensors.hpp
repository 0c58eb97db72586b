// SPDX-License-Identifier: Apache-2.0
// Tensors in safetensors files: written straight from memory, read as views of the file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/snapshot/checksum.hpp"
#include "treadle/snapshot/durable_file.hpp"
#include "treadle/snapshot/input_file.hpp"
#include "treadle/snapshot/safetensors_layout.hpp"

namespace treadle {
inline namespace v0_1 {

/// Tensors by name, in an order of their own.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

/// As `safetensors_dtypes`.
inline constexpr std::array<at::ScalarType, safetensors_dtypes.size()> safetensors_types{
    at::kBool,     at::kByte, at::kChar,   at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kShort, at::kUInt16, at::kHalf,
    at::kBFloat16, at::kInt,  at::kUInt32, at::kFloat,       at::kDouble,        at::kLong,  at::kUInt64};

/// What was written into a file.
struct WrittenFile {
  std::int64_t bytes = 0;
  std::uint64_t checksum = 0;  ///< XXH3-64
};

/// Writes a safetensors file into an empty `file`: its tensors must be dense, of a dtype that the format has, and of
/// different names, else `SnapshotError` names the one that is not. A tensor of another device or with strides is
/// copied when its turn comes, so that there is one such copy at a time.
inline WrittenFile write_safetensors(DurableFile& file, const NamedTensors& tensors,
                                     SafetensorsMetadata metadata = {}) {
  const std::string source = file.path().string();
  SafetensorsHeader header;
  header.metadata = std::move(metadata);
  std::unordered_map<std::string_view, const at::Tensor*> by_name;
  for (const auto& [name, tensor] : tensors) {
    const auto refuse = [&, &name = name](const std::string& what) {
      throw SnapshotError("'" + source + "' cannot be written: tensor " + shown(name) + " " + what + ".");
    };
    if (!tensor.defined()) refuse("is undefined; leave it out");
    if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
      refuse("is sparse, quantized or without memory; save its dense parts under names of their own");
    const auto type = std::ranges::find(safetensors_types, tensor.scalar_type());
    if (type == safetensors_types.end())
      refuse("is of dtype " + std::string(c10::toString(tensor.scalar_type())) +
             ", which safetensors does not have; save real and imaginary parts (view_as_real), or convert it");
    if (name == "__metadata__") refuse("has a name that the format keeps for itself; rename it");
    if (!by_name.emplace(name, &tensor).second) refuse("is there twice; give each a name of its own");
    header.tensors.push_back({name, static_cast<std::size_t>(type - safetensors_types.begin()), tensor.sizes().vec()});
  }
  const at::NoGradGuard no_grad;
  const std::string start = lay_out_safetensors(header, source);
  file.reserve(header.data_begin + (header.tensors.empty() ? 0 : header.tensors.back().end));
  Checksum sum;
  const auto write = [&](const void* bytes, std::size_t size) {
    // Piece by piece, so that the sum reads from memory what the system then copies from the cache.
    constexpr std::size_t piece = std::size_t{1} << 20;
    for (const char *at = static_cast<const char*>(bytes), *end = at + size; at < end;) {
      const auto part = std::min(piece, static_cast<std::size_t>(end - at));
      sum.add(at, part);
      file.write(at, part);
      at += part;
    }
  };
  write(start.data(), start.size());
  for (const auto& entry : header.tensors) {
    const at::Tensor here = by_name.at(entry.name)->detach().cpu().contiguous().resolve_neg();
    if (entry.end > entry.begin) write(here.const_data_ptr(), static_cast<std::size_t>(entry.end - entry.begin));
  }
  return {file.size(), sum.value()};
}

}  // namespace detail

/// Writes `tensors` into the file `path` in Hugging Face's safetensors format, which replaces an older file in one
/// piece and is on the disk afterwards. Throws `SnapshotError`, with the older file in its place, if that fails.
inline void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                             SafetensorsMetadata metadata = {}) {
  detail::AtomicFile atomic(path);
  detail::write_safetensors(atomic.file(), tensors, std::move(metadata));
  atomic.commit();
}

/// A safetensors file that is open for reading. Copies share it.
///
/// Its header is checked when it is opened: whatever the file holds, nothing is read beyond its end, and what does not
/// add up is a `SnapshotError` that names file and tensor. The file's bytes are read when a tensor is. A file that
/// somebody cuts meanwhile ends the program with SIGBUS, as all mapped files do: replace files, by `save_safetensors`
/// or by renaming, and do not write into them.
class SafetensorsFile {
 public:
  struct Info {
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> shape{};
    std::int64_t bytes = 0;
  };

  explicit SafetensorsFile(const std::filesystem::path& path) : open_(std::make_shared<const Open>(path)) {}

  const std::filesystem::path& path() const noexcept { return open_->file.path(); }
  const SafetensorsMetadata& metadata() const noexcept { return open_->header.metadata; }
  /// In the order in which the tensors lie in the file.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : open_->header.tensors) names.push_back(entry.name);
    return names;
  }
  bool contains(std::string_view name) const { return open_->by_name.contains(name); }
  Info info(std::string_view name) const {
    const auto& entry = find(name);
    return {detail::safetensors_types[entry.dtype], entry.shape, entry.end - entry.begin};
  }

  /// The tensor `name`, on the CPU. It is a view of the file, which stays open while the tensor lives: loading costs
  /// the pages that are read. Writing to it changes neither the file nor other openings of it, but other views of this
  /// one. A tensor that does not lie on a multiple of its elements' size is a copy.
  at::Tensor tensor(std::string_view name) const {
    const auto& entry = find(name);
    const auto dtype = detail::safetensors_types[entry.dtype];
    char* const bytes = open_->data + entry.begin;
    const auto size = static_cast<std::size_t>(entry.end - entry.begin);
    if (dtype == at::kBool && std::any_of(bytes, bytes + size, [](char c) { return c != 0 && c != 1; }))
      open_->file.refuse("is damaged or foreign: its tensor " + detail::shown(name) +
                         " is of dtype BOOL and holds other bytes than 0 and 1; take another copy of the file");
    const auto options = at::TensorOptions().dtype(dtype);
    const auto element = static_cast<std::uintptr_t>(detail::safetensors_dtypes[entry.dtype].bytes);
    if (size == 0 || reinterpret_cast<std::uintptr_t>(bytes) % element != 0) {
      auto copy = at::empty(entry.shape, options);
      if (size > 0) std::memcpy(copy.mutable_data_ptr(), bytes, size);
      return copy;
    }
    return at::for_blob(bytes, entry.shape)
        .deleter([open = open_](void*) {})  // holds the mapping
        .options(options)
        .target_device(at::Device(at::kCPU))
        .make_tensor();
  }
  /// All of them, in the file's order.
  NamedTensors tensors() const {
    NamedTensors all;
    for (const auto& entry : open_->header.tensors) all.emplace_back(entry.name, tensor(entry.name));
    return all;
  }

 private:
  struct Open {
    explicit Open(const std::filesystem::path& path) : file(path), header(detail::read_safetensors_header(file)) {
      for (const auto& entry : header.tensors) by_name.emplace(entry.name, &entry);
      // Private and writable: a write into a tensor makes a page of this process's own. Unreserved, as most tensors are
      // only read.
      void* const at = ::mmap(nullptr, static_cast<std::size_t>(file.size()), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_NORESERVE, file.descriptor(), 0);
      if (at == MAP_FAILED)
        file.refuse("cannot be mapped (" + std::system_category().message(errno) + "): copy it to another disk");
      mapping = at;
      data = static_cast<char*>(at) + header.data_begin;
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;
    ~Open() { ::munmap(mapping, static_cast<std::size_t>(file.size())); }

    detail::InputFile file;
    detail::SafetensorsHeader header;
    std::unordered_map<std::string_view, const detail::SafetensorsEntry*> by_name;
    void* mapping = nullptr;
    char* data = nullptr;
  };

  const detail::SafetensorsEntry& find(std::string_view name) const {
    const auto found = open_->by_name.find(name);
    if (found == open_->by_name.end())
      open_->file.refuse("has no tensor " + detail::shown(name) + ": ask for one of its names()");
    return *found->second;
  }

  std::shared_ptr<const Open> open_;
};

}  // namespace v0_1
}  // namespace treadle
