// SPDX-License-Identifier: Apache-2.0
// The command line of the examples.

#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "../examples/support/arguments.hpp"
#include "support/doctest.hpp"

namespace {

struct Outcome {
  std::int64_t epochs = 0;
  std::string data;
  std::optional<int> code;
  std::string out, err;
};

Outcome parse(std::vector<std::string> words) {
  words.insert(words.begin(), "program");
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Outcome outcome;
  std::ostringstream out, err;
  auto* const out_before = std::cout.rdbuf(out.rdbuf());
  auto* const err_before = std::cerr.rdbuf(err.rdbuf());
  examples::Arguments arguments(static_cast<int>(argv.size()), argv.data(), "Does something.");
  outcome.epochs = arguments.integer("--epochs", 4, "passes");
  outcome.data = arguments.text("--data", "here", "folder");
  outcome.code = arguments.finish();
  std::cout.rdbuf(out_before);
  std::cerr.rdbuf(err_before);
  outcome.out = out.str();
  outcome.err = err.str();
  return outcome;
}

}  // namespace

TEST_CASE("options have defaults, two spellings, and the last one counts") {
  const auto none = parse({});
  CHECK(none.epochs == 4);
  CHECK(none.data == "here");
  CHECK(!none.code.has_value());
  const auto some = parse({"--epochs", "2", "--data=/a folder=b", "--epochs=3"});
  CHECK(some.epochs == 3);
  CHECK(some.data == "/a folder=b");
  CHECK(!some.code.has_value());
  CHECK(some.out.empty());
  CHECK(some.err.empty());
}

TEST_CASE("help goes to standard output with code 0") {
  const auto help = parse({"--epochs", "x", "--help"});
  CHECK(help.code == 0);
  CHECK(help.out.find("--epochs <number>\n      passes (default: 4)") != std::string::npos);
  CHECK(help.err.empty());
}

TEST_CASE("what is not understood is a sentence with code 2") {
  const std::vector<std::pair<std::vector<std::string>, std::string>> bad{
      {{"--epoch", "3"}, "there is no option '--epoch'"},
      {{"3"}, "there is no option '3'"},
      {{"--epochs"}, "--epochs needs a value"},
      {{"--epochs", "3x"}, "--epochs needs a whole number of at least 1, not '3x'"},
      {{"--epochs", ""}, "not ''"},
      {{"--epochs=0"}, "not '0'"},
      {{"--epochs", "-2"}, "not '-2'"},
      {{"--epochs", "1.5"}, "not '1.5'"},
      {{"--epochs", "99999999999999999999"}, "not '99999999999999999999'"}};
  for (const auto& [words, sentence] : bad) {
    const auto outcome = parse(words);
    CHECK(outcome.code == 2);
    CHECK_MESSAGE(outcome.err.find(sentence) != std::string::npos, outcome.err);
    CHECK(outcome.out.empty());
  }
}
