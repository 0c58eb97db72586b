// SPDX-License-Identifier: Apache-2.0
// A folder of files that a test writes.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace treadle_test {

/// A new folder. It is emptied by the shell: LibTorch's libraries bring a remove_all of their own that crashes.
struct Folder {
  std::filesystem::path path = std::filesystem::current_path() / ("test_folder_" + std::to_string(getpid()));
  Folder() {
    clear();
    std::filesystem::create_directories(path);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { clear(); }
  void clear() const {
    if (std::system(("rm -rf '" + path.string() + "'").c_str()) != 0) std::abort();
  }
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name, std::ios::binary) << bytes;
    return path / name;
  }
};

}  // namespace treadle_test
