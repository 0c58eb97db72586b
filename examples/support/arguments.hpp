// SPDX-License-Identifier: Apache-2.0
// The command line of the examples: options with a value, `--help`, and a sentence for everything else.
#pragma once

#include <charconv>
#include <cstdint>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef TREADLE_FASHION_MNIST_DIR
#define TREADLE_FASHION_MNIST_DIR "/usr/share/datasets/fashion-mnist"  // where Debian puts it
#endif

namespace examples {

/// Ask for each option, then call `finish`.
class Arguments {
 public:
  Arguments(int argc, char** argv, std::string about)
      : program_(argv[0]), about_(std::move(about)), given_(argv + 1, argv + argc) {}

  /// The whole number given as `--name 3` or `--name=3`.
  std::int64_t integer(std::string_view name, std::int64_t standard, std::string_view help, std::int64_t least = 1) {
    const auto text = take(name, "number", std::to_string(standard), help);
    if (!text) return standard;
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size() || value < least) {
      complain(std::string(name) + " needs a whole number of at least " + std::to_string(least) + ", not '" + *text +
               "'");
      return standard;
    }
    return value;
  }

  std::string text(std::string_view name, std::string standard, std::string_view help) {
    return take(name, "text", standard, help).value_or(standard);
  }

  /// The code to exit with, if the program was asked for help (0) or was given what it does not know (2).
  std::optional<int> finish() {
    for (const auto& word : given_) {
      if (word != "--help" && word != "-h") continue;
      std::cout << about_ << "\n\nUsage: " << program_ << " [options]\n"
                << help_ << "  --help\n      print this and stop\n";
      return 0;
    }
    if (problem_.empty() && !given_.empty()) complain("there is no option '" + given_.front() + "'");
    if (problem_.empty()) return std::nullopt;
    std::cerr << program_ << ": " << problem_ << "; --help lists the options.\n";
    return 2;
  }

 private:
  std::optional<std::string> take(std::string_view name, std::string_view kind, const std::string& standard,
                                  std::string_view help) {
    help_.append("  ").append(name).append(" <").append(kind).append(">\n      ").append(help);
    help_.append(" (default: ").append(standard).append(")\n");
    std::optional<std::string> value;  // of an option that is given twice the last one counts
    for (std::size_t i = 0; i < given_.size();) {
      const auto at = given_.begin() + static_cast<std::ptrdiff_t>(i);
      if (at->starts_with(std::string(name) + "=")) {
        value = at->substr(name.size() + 1);
        given_.erase(at);
      } else if (*at == name && at + 1 != given_.end()) {
        value = *(at + 1);
        given_.erase(at, at + 2);
      } else if (*at == name) {
        complain(std::string(name) + " needs a value");
        given_.erase(at);
      } else {
        ++i;
      }
    }
    return value;
  }
  void complain(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }

  std::string program_, about_, help_, problem_;
  std::vector<std::string> given_;
};

}  // namespace examples
