// SPDX-License-Identifier: Apache-2.0
// treadle-test: PYTHON TIMEOUT 600
// The fuzzer's readers, as ctest knows them: every seed, cut off anywhere, and with each of its bytes changed.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace {
int reader_in_turn = 0;
}
#define TREADLE_FUZZ_READER static_cast<Reader>(reader_in_turn)
#include "readers.cpp"

#include "support/doctest.hpp"
#include "support/folder.hpp"

namespace {
void give(const std::string& bytes) {
  CHECK(LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()) == 0);
}
}  // namespace

TEST_CASE("no reader of files does anything but throw a sentence, whatever its file holds") {
  const char* python = std::getenv("TREADLE_PYTHON");
  REQUIRE(python != nullptr);
  const treadle_test::Folder folder;
  const char* const names[] = {"Idx", "Cifar", "Tokens", "Csv", "Image", "Safetensors", "Manifest"};
  for (; reader_in_turn < 7; ++reader_in_turn) {
    const std::string name = names[reader_in_turn];
    CAPTURE(name);
    const auto own = folder.path / name;
    std::filesystem::create_directories(own);
    REQUIRE(std::system((std::string(python) + " -B " + TREADLE_TEST_SOURCE_DIR + "/fuzz/seeds.py " + name + " '" +
                         own.string() + "'")
                            .c_str()) == 0);
    int seeds = 0;
    for (const auto& seed : std::filesystem::directory_iterator(own)) {
      std::ifstream file(seed.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      ++seeds;
      give(bytes);
      const std::size_t step = 1 + bytes.size() / 200;
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        give(bytes.substr(0, at));
        for (const int change : {0x01, 0x80, 0xFF}) {
          std::string changed = bytes;
          changed[at] = static_cast<char>(changed[at] ^ change);
          give(changed);
        }
      }
    }
    CHECK(seeds >= 3);
  }
}
