// SPDX-License-Identifier: Apache-2.0
// Files of tokens, as language models are trained on: documents one after the other, cut into pieces of one length.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "treadle/data/dataset.hpp"
#include "treadle/data/file_bytes.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Pieces of text, int64 `[N, length]` each.
struct TokenBatch {
  at::Tensor data;      ///< tokens
  at::Tensor target;    ///< the token after each of them
  at::Tensor document;  ///< which document of its row a token is of, from 0; undefined without `end_of_document`

  TokenBatch slice_rows(std::int64_t begin, std::int64_t end) const {
    const auto cut = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, begin, end - begin) : t; };
    return {cut(data), cut(target), cut(document)};
  }
};

struct TokensOptions {
  std::int64_t length = 1024;  ///< tokens of a piece
  int bytes = 2;               ///< of a token, 2 or 4, little endian and unsigned; a file's header knows better
  std::optional<std::int64_t> end_of_document{};  ///< the token that ends a document, if one does
  std::int64_t vocabulary = 0;                    ///< tokens must be below this; 0: not checked
};

/// Token files as a map-style data set that gives whole batches: piece i is tokens i * length to (i + 1) * length, and
/// its targets are one further. Pieces do not reach across files; what is left at a file's end is not used.
///
/// A file holds tokens and nothing else (as nanoGPT's), or has llm.c's header of 256 integers. Nothing is read before
/// it is asked for; the files may be larger than the memory. Throws `DataError` that names the file and the token: for
/// sizes that do not fit, tokens outside the vocabulary, files that have changed since.
class Tokens {
 public:
  explicit Tokens(const std::vector<std::filesystem::path>& paths, TokensOptions options = {}) : options_(options) {
    if (options.length < 1 || (options.bytes != 2 && options.bytes != 4) || options.vocabulary < 0)
      throw ConfigError("data::Tokens: length must be at least 1, bytes 2 or 4, and vocabulary not negative.");
    if (paths.empty()) throw ConfigError("data::Tokens: no file was named.");
    for (const auto& path : paths) {
      parts_.push_back(open(path));
      ends_.push_back(size() + std::max<std::int64_t>(parts_.back().tokens - 1, 0) / options_.length);
    }
    if (size() == 0)
      parts_.front().file->fail("is too short: " + std::to_string(parts_.front().tokens) +
                                " tokens make no piece of length " + std::to_string(options_.length) +
                                " and its targets");
  }
  explicit Tokens(const std::filesystem::path& path, TokensOptions options = {})
      : Tokens(std::vector<std::filesystem::path>{path}, options) {}

  /// Pieces.
  std::int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  /// Tokens of all files.
  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const auto& part : parts_) sum += part.tokens;
    return sum;
  }

  TokenBatch get_batch(const Rows& rows) const {
    TokenBatch batch{.data = at::empty({rows.size(), options_.length}, at::kLong),
                     .target = at::empty({rows.size(), options_.length}, at::kLong),
                     .document = {}};
    if (options_.end_of_document) batch.document = at::empty_like(batch.data);
    const auto length = static_cast<std::size_t>(options_.length);
    std::vector<std::byte> raw;
    std::vector<std::int64_t> piece(length + 1);
    const Part* checked = nullptr;
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      const auto which = std::ranges::upper_bound(ends_, rows[i]) - ends_.begin();
      const Part& part = parts_[static_cast<std::size_t>(which)];
      if (&part != checked) part.file->check_unchanged();
      checked = &part;
      const std::int64_t begin =
          (rows[i] - (which == 0 ? 0 : ends_[static_cast<std::size_t>(which) - 1])) * options_.length;
      raw.resize(piece.size() * static_cast<std::size_t>(part.bytes));
      part.file->read(raw.data(), raw.size(), part.begin + begin * part.bytes);
      if (part.bytes == 2)
        widen<std::uint16_t>(raw.data(), piece);
      else
        widen<std::uint32_t>(raw.data(), piece);
      check(piece, part, begin);
      std::copy_n(piece.begin(), length, batch.data.mutable_data_ptr<std::int64_t>() + i * options_.length);
      std::copy_n(piece.begin() + 1, length, batch.target.mutable_data_ptr<std::int64_t>() + i * options_.length);
      if (!options_.end_of_document) continue;
      auto* document = batch.document.mutable_data_ptr<std::int64_t>() + i * options_.length;
      std::int64_t number = 0;
      for (std::size_t t = 0; t < length; ++t) {
        document[t] = number;
        number += piece[t] == *options_.end_of_document;
      }
    }
    return batch;
  }

 private:
  struct Part {
    std::shared_ptr<const treadle::detail::FileBytes> file;
    std::int64_t begin = 0;  // of the tokens, in bytes
    std::int64_t tokens = 0;
    int bytes = 2;
  };

  Part open(const std::filesystem::path& path) const {
    static_assert(std::endian::native == std::endian::little);  // as the files are
    Part part{.file = std::make_shared<const treadle::detail::FileBytes>(path), .bytes = options_.bytes};
    constexpr std::int64_t header_bytes = 1024;
    std::array<std::int32_t, 3> header{};
    if (part.file->size() >= header_bytes) part.file->read(header.data(), sizeof header, 0);
    const bool two = header[0] == 20240520 && header[1] == 1;   // llm.c's numbers for GPT-2's tokens
    const bool four = header[0] == 20240801 && header[1] == 7;  // and for Llama 3's
    if (two || four) {
      part.begin = header_bytes;
      part.bytes = two ? 2 : 4;
    }
    const std::int64_t bytes = part.file->size() - part.begin;
    if (bytes % part.bytes != 0)
      part.file->fail("does not hold whole tokens: " + std::to_string(bytes) + " bytes are no multiple of " +
                      std::to_string(part.bytes) + "; it is truncated, or has tokens of another size");
    part.tokens = bytes / part.bytes;
    if ((two || four) && header[2] != part.tokens)
      part.file->fail("is truncated or damaged: its header says " + std::to_string(header[2]) + " tokens, and it has " +
                      std::to_string(part.tokens));
    return part;
  }

  template <class Token>
  static void widen(const std::byte* raw, std::vector<std::int64_t>& piece) {
    const auto* tokens = reinterpret_cast<const Token*>(raw);  // new memory, aligned for all
    std::copy_n(tokens, piece.size(), piece.begin());
  }

  void check(const std::vector<std::int64_t>& piece, const Part& part, std::int64_t begin) const {
    if (options_.vocabulary == 0) return;
    const auto largest = std::ranges::max_element(piece);
    if (*largest >= options_.vocabulary)
      part.file->fail("has the token " + std::to_string(*largest) + " at place " +
                      std::to_string(begin + (largest - piece.begin())) + ", and the vocabulary has " +
                      std::to_string(options_.vocabulary) + "; it may have tokens of another size");
  }

  TokensOptions options_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> ends_;  // pieces up to the end of each file
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
