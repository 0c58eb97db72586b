// SPDX-License-Identifier: Apache-2.0
// Strings inside CSV, JSON and XML. No torch here.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// `text` as a CSV field on one line: quoted where it has to be, control characters replaced by spaces.
inline std::string csv_field(std::string_view text) {
  std::string field;
  bool quoted = false;
  for (const char c : text) {
    quoted |= c == ',' || c == '"' || c == ' ';
    if (c == '"') field += '"';
    field += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    quoted |= field.back() == ' ';
  }
  return quoted ? '"' + field + '"' : field;
}

/// `text` on one line: control characters and backslashes as in JSON, so that different texts stay different.
inline std::string one_line(std::string_view text) {
  static constexpr std::string_view hex = "0123456789abcdef";
  std::string name;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '\\')
      name += "\\\\";
    else if (c == '\n')
      name += "\\n";
    else if (c == '\t')
      name += "\\t";
    else if (code < 0x20)
      (name += "\\u00") += {hex[code / 16], hex[code % 16]};
    else
      name += c;
  }
  return name;
}

/// The fields of one CSV line; nothing if its quotes do not match up.
inline std::optional<std::vector<std::string>> csv_split(std::string_view line) {
  std::vector<std::string> fields(1);
  bool inside = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (inside) {
      if (c != '"')
        fields.back() += c;
      else if (i + 1 < line.size() && line[i + 1] == '"')
        fields.back() += line[++i];
      else
        inside = false;
    } else if (c == '"') {
      inside = true;
    } else if (c == ',') {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  if (inside) return std::nullopt;
  return fields;
}

/// `text` as a JSON string, quotes included.
inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : one_line(text)) (out += c == '"' ? "\\" : "") += c;
  return out += '"';
}

/// `text` as XML character data or an attribute's value.
inline std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
