// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "treadle/data/byte_source.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// The tensor in an IDX file (the format of MNIST), plain or gzip: uint8, int8, int16, int32, float or double on the
/// CPU.
///
/// Throws `DataError` that names the file and what is wrong with it: missing, truncated, damaged, not IDX, sizes that
/// do not fit, trailing bytes; gzip data of more than `most_bytes`, and all where Treadle was built without zlib.
/// Memory is taken as bytes come, whatever the header says: about twice what is there.
inline at::Tensor read_idx(const std::filesystem::path& path,
                           std::int64_t most_bytes = treadle::detail::most_unpacked) {
  constexpr int most_dimensions = 8;
  treadle::detail::ByteSource source(path, most_bytes);
  std::array<unsigned char, 4> magic{};
  if (source.read(magic.data(), magic.size()) < magic.size())
    source.fail("is truncated: an IDX file begins with 4 bytes");
  const auto type = [&]() -> at::ScalarType {
    switch (magic[2]) {
      case 0x08:
        return at::kByte;
      case 0x09:
        return at::kChar;
      case 0x0B:
        return at::kShort;
      case 0x0C:
        return at::kInt;
      case 0x0D:
        return at::kFloat;
      case 0x0E:
        return at::kDouble;
      default:
        return at::ScalarType::Undefined;
    }
  }();
  if (magic[0] != 0 || magic[1] != 0 || type == at::ScalarType::Undefined)
    source.fail("is not an IDX file: its first bytes are wrong");
  if (magic[3] < 1 || magic[3] > most_dimensions)
    source.fail("has " + std::to_string(magic[3]) + " dimensions; 1 to " + std::to_string(most_dimensions) +
                " can be read");

  const std::size_t element = c10::elementSize(type);
  std::uint64_t bytes = element;
  std::vector<std::int64_t> sizes;
  std::string shape;
  for (int i = 0; i < magic[3]; ++i) {
    std::array<unsigned char, 4> big{};
    if (source.read(big.data(), big.size()) < big.size()) source.fail("is truncated: it ends within its header");
    const std::uint64_t size =
        std::uint64_t{big[0]} << 24 | std::uint64_t{big[1]} << 16 | std::uint64_t{big[2]} << 8 | big[3];
    if (size == 0) source.fail("holds nothing: a dimension has size 0");
    if (bytes > INT64_MAX / size) source.fail("has sizes that do not fit: its header claims more than 2^63 bytes");
    bytes *= size;
    sizes.push_back(static_cast<std::int64_t>(size));
    shape += (shape.empty() ? "" : "x") + std::to_string(size);
  }

  auto content = std::make_unique<std::vector<unsigned char>>(source.read_up_to(bytes));
  if (content->size() < bytes)
    source.fail("is truncated: its header says " + shape + ", which is " + std::to_string(bytes) +
                " bytes, but it has " + std::to_string(content->size()));
  unsigned char more = 0;
  if (source.read(&more, 1) > 0)
    source.fail("has trailing bytes after the " + shape + " elements that its header says");
  if constexpr (std::endian::native == std::endian::little)
    if (element > 1)
      for (auto at = content->begin(); at != content->end(); at += static_cast<std::ptrdiff_t>(element))
        std::reverse(at, at + static_cast<std::ptrdiff_t>(element));

  auto* owner = content.get();
  at::Tensor tensor = at::from_blob(
      owner->data(), sizes, [owner](void*) { delete owner; }, type);
  content.release();  // NOLINT: the tensor owns it from here on
  return tensor;
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
