// SPDX-License-Identifier: Apache-2.0
// JSON that somebody else may have written: read within bounds, written in one form. No torch here.
#pragma once

#if !__has_include(<nlohmann/json.hpp>)
#error \
    "treadle: snapshots need nlohmann/json.hpp: install the Debian package nlohmann-json3-dev, or set TREADLE_JSON_INCLUDE_DIR to the folder that holds nlohmann/json.hpp, and link treadle::snapshot."
#endif
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/observe/escape.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What a JSON text may be at most: its size in bytes, and how deep its arrays and objects may be inside each other.
struct JsonLimits {
  std::size_t bytes = std::size_t{16} << 20;
  int depth = 64;
};

/// A name out of a file as a sentence can show it: on one line, in quotes, cut after 100 bytes.
inline std::string shown(std::string_view name) {
  std::size_t most = 100;
  if (name.size() <= most) return "'" + one_line(name) + "'";
  while (most > 90 && (static_cast<unsigned char>(name[most]) & 0xC0) == 0x80) --most;  // no part of a character
  return "'" + one_line(name.substr(0, most)) + "...'";
}

/// Throws the sentence for a JSON text in `source` that is wrong near `byte`, counted from 1 in the text.
[[noreturn]] inline void refuse_json(const std::string& source, std::size_t byte, const std::string& what) {
  throw SnapshotError("'" + source + "' is damaged or foreign: its JSON " + what + " near byte " +
                      std::to_string(byte) + "; take another copy of the file.");
}

/// Goes through bytes and tells where it is, which nlohmann's parser does not tell the receiver of its events.
class JsonCursor {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  JsonCursor(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  JsonCursor& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  JsonCursor operator++(int) {
    const JsonCursor before = *this;
    ++*this;
    return before;
  }
  bool operator==(const JsonCursor& other) const { return at_ == other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

/// Receives the events of a text and passes them to `Receiver`, which has `value(json)`, `begin(is_object)`, `end()`
/// and `key(string)` and may call `refuse`. Depth is bounded here; the parser itself does not recurse.
template <class Receiver>
class JsonEvents {
 public:
  using Json = nlohmann::json;

  JsonEvents(Receiver& receiver, std::string_view text, const std::string& source, int depth)
      : receiver_(receiver), text_(text), source_(source), seen_(text.data()), depth_left_(depth) {}

  bool parse() {
    JsonCursor begin(text_.data(), &seen_);
    JsonCursor end(text_.data() + text_.size(), &seen_);
    return Json::sax_parse(begin, end, this);
  }
  [[noreturn]] void refuse(const std::string& what) const {
    refuse_json(source_, static_cast<std::size_t>(seen_ - text_.data()), what);
  }

  bool null() { return value(nullptr); }
  bool boolean(bool is) { return value(is); }
  bool number_integer(std::int64_t number) { return value(number); }
  bool number_unsigned(std::uint64_t number) { return value(number); }
  bool number_float(double number, const std::string&) { return value(number); }
  bool string(std::string& text) { return value(std::move(text)); }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(std::size_t) { return begin(true); }
  bool start_array(std::size_t) { return begin(false); }
  bool end_object() { return end(); }
  bool end_array() { return end(); }
  bool key(std::string& name) {
    receiver_.key(std::move(name), *this);
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&, const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ...; last read: 'token'":
    // the middle is kept, because a token can be as long as the text.
    std::string reason = error.what();
    reason.resize(std::min({reason.size(), reason.find("; last read"), reason.find(" parsing '")}));
    for (const char* before : {"] ", ": "})
      if (const auto found = reason.find(before); found != std::string::npos) reason.erase(0, found + 2);
    refuse_json(source_, byte, "cannot be parsed (" + one_line(reason.substr(0, 200)) + ")");
  }

 private:
  template <class Value>
  bool value(Value&& it) {
    receiver_.value(Json(std::forward<Value>(it)), *this);
    return true;
  }
  bool begin(bool is_object) {
    if (--depth_left_ < 0) refuse("is nested too deep");
    receiver_.begin(is_object, *this);
    return true;
  }
  bool end() {
    ++depth_left_;
    receiver_.end(*this);
    return true;
  }

  Receiver& receiver_;
  std::string_view text_;
  const std::string& source_;
  const char* seen_;
  int depth_left_;
};

/// Passes the events of `text` to `receiver`; throws `SnapshotError` for what is not exactly one JSON value in limits.
template <class Receiver>
void scan_json(Receiver& receiver, std::string_view text, const std::string& source, JsonLimits limits) {
  if (text.size() > limits.bytes)
    throw SnapshotError("'" + source + "' holds " + std::to_string(text.size()) + " bytes of JSON, and " +
                        std::to_string(limits.bytes) + " are the most; take another copy of the file.");
  // The parser takes a zero byte for the end of the text and would not look at what follows.
  const auto zero = text.find('\0');
  if (zero != std::string_view::npos) refuse_json(source, zero + 1, "has a zero byte");
  JsonEvents<Receiver> events(receiver, text, source, limits.depth);
  events.parse();
}

/// Builds the value of a text; a key that an object has twice is refused, because readers disagree on what it means.
class JsonBuilder {
 public:
  using Json = nlohmann::json;

  template <class Events>
  void value(Json it, Events&) {
    place(std::move(it));
  }
  template <class Events>
  void begin(bool is_object, Events&) {
    open_.push_back(place(is_object ? Json::object() : Json::array()));
  }
  template <class Events>
  void end(Events&) {
    open_.pop_back();
  }
  template <class Events>
  void key(std::string name, Events& events) {
    auto [member, is_new] = open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    if (!is_new) events.refuse("has the key " + shown(member->first) + " twice");
    member_ = &member->second;
  }
  Json take() { return std::move(root_); }

 private:
  Json* place(Json it) {
    if (open_.empty()) return &(root_ = std::move(it));
    if (open_.back()->is_object()) return &(*member_ = std::move(it));
    open_.back()->push_back(std::move(it));
    return &open_.back()->back();
  }

  Json root_;
  std::vector<Json*> open_;  // an array grows only while its last element is no longer open
  Json* member_ = nullptr;
};

/// The value of a JSON text out of the file `source`.
///
/// Throws `SnapshotError` naming the file and the byte for a syntax error, bytes behind the value, invalid UTF-8, a key
/// that an object has twice, and more bytes or depth than `limits`.
inline nlohmann::json parse_json(std::string_view text, const std::string& source, JsonLimits limits = {}) {
  JsonBuilder builder;
  scan_json(builder, text, source, limits);
  return builder.take();
}

/// Throws `SnapshotError` for a number in `value` that JSON cannot hold.
inline void require_finite(const nlohmann::json& value, const std::string& source) {
  if (value.is_number_float() && !std::isfinite(value.get<double>()))
    throw SnapshotError("'" + source +
                        "' cannot be written: JSON has no infinity and no NaN; store the number's bits.");
  if (value.is_structured())
    for (const auto& element : value) require_finite(element, source);
}

/// `value` as the text for the file `source`: keys in order, numbers as short as they can be read back exactly, two
/// spaces a level, a line feed at the end, so that equal values are equal bytes.
///
/// Throws `SnapshotError` for infinity, NaN and strings that are not UTF-8.
inline std::string dump_json(const nlohmann::json& value, const std::string& source) {
  require_finite(value, source);
  try {
    return value.dump(2) + '\n';
  } catch (const nlohmann::json::exception&) {
    throw SnapshotError("'" + source + "' cannot be written: one of its strings is not UTF-8.");
  }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
