// SPDX-License-Identifier: Apache-2.0
// Where the tensors of a safetensors file lie: its header, read within bounds and written in one form. No torch here.
//
// A file is 8 bytes with the header's length, the header (JSON, spaces behind it) and the tensors' bytes without gaps.
#pragma once

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "treadle: safetensors files are little-endian, and this machine is not."
#endif
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/snapshot/input_file.hpp"
#include "treadle/snapshot/json.hpp"

namespace treadle {
inline namespace v0_1 {

/// The `__metadata__` of a safetensors file.
using SafetensorsMetadata = std::map<std::string, std::string>;

namespace detail {

struct SafetensorsDtype {
  std::string_view name;
  std::int64_t bytes;
};
/// In the order in which Python's safetensors lays them out from the back: the widest comes first in a file, so that
/// each tensor is aligned.
inline constexpr std::array<SafetensorsDtype, 15> safetensors_dtypes{{{"BOOL", 1},
                                                                      {"U8", 1},
                                                                      {"I8", 1},
                                                                      {"F8_E5M2", 1},
                                                                      {"F8_E4M3", 1},
                                                                      {"I16", 2},
                                                                      {"U16", 2},
                                                                      {"F16", 2},
                                                                      {"BF16", 2},
                                                                      {"I32", 4},
                                                                      {"U32", 4},
                                                                      {"F32", 4},
                                                                      {"F64", 8},
                                                                      {"I64", 8},
                                                                      {"U64", 8}}};

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name{};
  std::size_t dtype = safetensors_dtypes.size();  ///< place in `safetensors_dtypes`
  std::vector<std::int64_t> shape{};
  std::int64_t begin = 0;  ///< first byte, counted from the end of the header
  std::int64_t end = 0;    ///< behind the last byte
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors{};  ///< in the order in which their bytes lie
  SafetensorsMetadata metadata{};
  std::int64_t data_begin = 0;  ///< bytes before those of the tensors
};

/// The most that a header may hold: what other readers take, too.
inline constexpr std::size_t most_safetensors_header = 100'000'000;
/// More dimensions than that no operator takes.
inline constexpr std::size_t most_safetensors_dimensions = 64;

/// The bytes of a tensor, or nothing if they are more than 63 bits can say. Dimensions of 0 count as 1 until the end,
/// because strides are products of the others.
inline std::optional<std::int64_t> safetensors_bytes(const std::vector<std::int64_t>& shape, std::size_t dtype) {
  std::int64_t bytes = safetensors_dtypes[dtype].bytes;
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty |= size == 0;
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes;
}

/// Receives a header's JSON and takes nothing that does not belong there, so that memory stays within a small multiple
/// of the text.
class SafetensorsReceiver {
 public:
  explicit SafetensorsReceiver(const std::string& source) : source_(source) {}

  template <class Events>
  void key(std::string name, Events& events) {
    if (level_ == 1) {
      in_metadata_ = name == "__metadata__";
      if (in_metadata_ && std::exchange(has_metadata_, true)) events.refuse("has the key '__metadata__' twice");
      if (!in_metadata_) header_.tensors.emplace_back().name = std::move(name);
    } else if (in_metadata_) {
      const auto [member, is_new] = header_.metadata.emplace(std::move(name), "");
      if (!is_new) events.refuse("has the key " + shown(member->first) + " twice");
      text_ = &member->second;
    } else {
      const auto field = std::find(fields.begin(), fields.end(), name);
      if (field == fields.end()) events.refuse("has an unknown key " + shown(name) + " in " + here());
      field_ = static_cast<std::size_t>(field - fields.begin());
      if (std::exchange(has_[field_], true)) events.refuse("has the key " + shown(name) + " twice in " + here());
    }
  }
  template <class Events>
  void begin(bool is_object, Events& events) {
    const bool is_right =
        level_ < 2 ? is_object : level_ == 2 && !is_object && !in_metadata_ && field_ != 0;  // shape and data_offsets
    if (!is_right) refuse_value(events);
    if (++level_ == 2) has_ = {};
  }
  template <class Events>
  void end(Events& events) {
    if (--level_ != 1 || in_metadata_) return;
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (!has_[i]) events.refuse("has no " + std::string(fields[i]) + " for " + here());
    if (offsets_ != 2) events.refuse("has no two data_offsets for " + here());
    offsets_ = 0;
  }
  template <class Events>
  void value(nlohmann::json it, Events& events) {
    if (level_ == 2 && in_metadata_ && it.is_string()) {
      *text_ = std::move(it.get_ref<std::string&>());
    } else if (level_ == 2 && !in_metadata_ && field_ == 0 && it.is_string()) {
      const auto& name = it.get_ref<const std::string&>();
      const auto known = std::ranges::find(safetensors_dtypes, name, &SafetensorsDtype::name);
      if (known == safetensors_dtypes.end())
        throw SnapshotError("'" + source_ + "' cannot be read: " + here() + " is of dtype " + shown(name) +
                            ", which Treadle does not know; convert it to F32 in Python.");
      header_.tensors.back().dtype = static_cast<std::size_t>(known - safetensors_dtypes.begin());
    } else if (level_ == 3 && it.is_number_unsigned() && it.get<std::uint64_t>() <= std::uint64_t{INT64_MAX}) {
      number(it.get<std::int64_t>(), events);
    } else {
      refuse_value(events);
    }
  }
  SafetensorsHeader take() { return std::move(header_); }

 private:
  static constexpr std::array<std::string_view, 3> fields{"dtype", "shape", "data_offsets"};

  std::string here() const { return "the tensor " + shown(header_.tensors.back().name); }
  template <class Events>
  [[noreturn]] void refuse_value(Events& events) {
    if (level_ == 0) events.refuse("is no object");
    if (in_metadata_) events.refuse("has a __metadata__ that is no object of strings");
    if (level_ == 1) events.refuse("has no object for " + here());
    events.refuse("has a " + std::string(fields[field_]) + " that is none for " + here());
  }
  template <class Events>
  void number(std::int64_t it, Events& events) {
    auto& tensor = header_.tensors.back();
    if (field_ == 1) {
      if (tensor.shape.size() == most_safetensors_dimensions)
        events.refuse("has more than " + std::to_string(most_safetensors_dimensions) + " dimensions for " + here());
      tensor.shape.push_back(it);
    } else {
      if (offsets_ == 2) events.refuse("has more than two data_offsets for " + here());
      (offsets_++ == 0 ? tensor.begin : tensor.end) = it;
    }
  }

  const std::string& source_;
  SafetensorsHeader header_;
  std::string* text_ = nullptr;
  std::array<bool, 3> has_{};
  std::size_t field_ = 0;
  std::size_t offsets_ = 0;
  int level_ = 0;
  bool in_metadata_ = false;
  bool has_metadata_ = false;
};

/// The header whose JSON is `text`, for `data_bytes` bytes of tensors. Throws `SnapshotError` naming `source` and the
/// tensor unless every byte belongs to exactly one tensor, whose shape and dtype need as many.
inline SafetensorsHeader parse_safetensors(std::string_view text, std::int64_t data_bytes, const std::string& source) {
  SafetensorsReceiver receiver(source);
  scan_json(receiver, text, source, {.bytes = most_safetensors_header, .depth = 4});
  auto header = receiver.take();
  const auto refuse = [&](const SafetensorsEntry& tensor, const std::string& what) {
    throw SnapshotError("'" + source + "' is damaged or foreign: its tensor " + shown(tensor.name) + " " + what +
                        "; take another copy of the file.");
  };
  std::ranges::sort(header.tensors, {}, &SafetensorsEntry::name);
  const auto twice = std::ranges::adjacent_find(header.tensors, {}, &SafetensorsEntry::name);
  if (twice != header.tensors.end()) refuse(*twice, "is there twice");
  // By where they lie, and by name where several are empty.
  std::ranges::stable_sort(header.tensors, [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t at = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.end < tensor.begin || tensor.end > data_bytes)
      refuse(tensor, "has the data_offsets " + std::to_string(tensor.begin) + " and " + std::to_string(tensor.end) +
                         ", and the file holds " + std::to_string(data_bytes) + " bytes of tensors");
    const auto bytes = safetensors_bytes(tensor.shape, tensor.dtype);
    if (!bytes) refuse(tensor, "has a shape that no memory holds");
    if (*bytes != tensor.end - tensor.begin)
      refuse(tensor, "has " + std::to_string(tensor.end - tensor.begin) + " bytes, and its shape and dtype need " +
                         std::to_string(*bytes));
    if (tensor.begin < at) refuse(tensor, "overlaps another one");
    if (tensor.begin > at) refuse(tensor, "has a hole of bytes before it that are no tensor's");
    at = tensor.end;
  }
  if (at != data_bytes)
    throw SnapshotError("'" + source + "' is damaged or foreign: behind its last tensor are " +
                        std::to_string(data_bytes - at) +
                        " bytes that are no tensor's; take another copy of the file.");
  return header;
}

/// Whether a file begins as what `torch.save` writes: a zip archive or, of old, a pickle.
inline bool begins_as_pt(std::string_view bytes) {
  return bytes.starts_with("PK\x03\x04") || (bytes.size() > 1 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5);
}

/// The header of an open file. Throws `SnapshotError` for everything that is no safetensors file; for what `torch.save`
/// wrote with the line of Python that converts it.
inline SafetensorsHeader read_safetensors_header(const InputFile& file) {
  std::array<char, 9> start{};  // the length, and the brace that a header begins with
  const auto available = static_cast<std::size_t>(std::min<std::int64_t>(file.size(), start.size()));
  file.read(start.data(), available, 0);
  std::uint64_t length = 0;
  std::memcpy(&length, start.data(), sizeof length);
  const bool whole = available == start.size() && length <= static_cast<std::uint64_t>(file.size()) - 8;
  if (!whole || length > most_safetensors_header || start[8] != '{') {
    if (begins_as_pt({start.data(), available}))
      file.refuse(
          "was written by torch.save, and only safetensors files are read: convert it in Python with "
          "safetensors.torch.save_file(torch.load(\"x.pt\", weights_only=True), \"x.safetensors\")");
    if (whole && length > most_safetensors_header)
      file.refuse("has a header of " + std::to_string(length) + " bytes, and " +
                  std::to_string(most_safetensors_header) + " are the most: take another copy of the file");
    file.refuse("is no safetensors file, or is cut off in its header: take another copy of the file");
  }
  std::string text(length, '\0');
  file.read(text.data(), text.size(), 8);
  const auto data_begin = static_cast<std::int64_t>(8 + length);
  auto header = parse_safetensors(text, file.size() - data_begin, file.path().string());
  header.data_begin = data_begin;
  return header;
}

/// Puts the tensors into the order that their bytes will have, sets their places, and returns the file's first bytes:
/// length, JSON, and spaces up to a multiple of 8. `source` names the file in a `SnapshotError`.
inline std::string lay_out_safetensors(SafetensorsHeader& header, const std::string& source) {
  std::ranges::sort(header.tensors, [](const auto& a, const auto& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  const auto quoted = [&](const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
      throw SnapshotError("'" + source + "' cannot be written: the name or metadata " + shown(text) + " is not UTF-8.");
    }
  };
  std::string text(8, '\0');
  const char* between = "{";
  if (!header.metadata.empty()) {
    text += "{\"__metadata__\":";
    for (const auto& [key, value] : header.metadata) {
      ((text += std::exchange(between, ",")) += quoted(key) + ":") += quoted(value);
    }
    text += "}";
    between = ",";
  }
  std::int64_t at = 0;
  for (auto& tensor : header.tensors) {
    tensor.begin = at;
    tensor.end = at += safetensors_bytes(tensor.shape, tensor.dtype).value();
    text += std::exchange(between, ",") + quoted(tensor.name) + ":{\"dtype\":\"";
    (text += safetensors_dtypes[tensor.dtype].name) += "\",\"shape\":[";
    const char* comma = "";
    for (const auto size : tensor.shape) (text += std::exchange(comma, ",")) += std::to_string(size);
    text += "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
  }
  text += *between == '{' ? "{}" : "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size() - 8;
  if (length > most_safetensors_header)
    throw SnapshotError("'" + source + "' cannot be written: its header would hold " + std::to_string(length) +
                        " bytes, and " + std::to_string(most_safetensors_header) +
                        " are the most; save fewer tensors a file.");
  std::memcpy(text.data(), &length, sizeof length);
  header.data_begin = static_cast<std::int64_t>(text.size());
  return text;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
