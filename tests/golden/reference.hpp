// SPDX-License-Identifier: Apache-2.0
// What PyTorch did: runs reference.py once and reads what it wrote.
#pragma once

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

/// The tensors that reference.py wrote for one device, by name, on the CPU.
class Reference {
 public:
  explicit Reference(const std::string& device) {
    static_assert(std::endian::native == std::endian::little, "the reference is written little-endian");
    const char* python = std::getenv("TREADLE_PYTHON");
    if (python == nullptr) throw std::runtime_error("TREADLE_PYTHON is not set: run this program through ctest");
    const char* temporary = std::getenv("TMPDIR");
    const std::string folder =
        std::string(temporary ? temporary : "/tmp") + "/treadle-golden-" + device + "-" + std::to_string(::getpid());
    const std::string command = "'" + std::string(python) +
                                "' -W ignore '" TREADLE_TEST_SOURCE_DIR "/golden/reference.py' --device " + device +
                                " --out '" + folder + "'";
    const int status = std::system(command.c_str());  // NOLINT: one thread, before any test
    if (status == 0) read(folder);
    // Not std::filesystem::remove_all: libtorch.so exports one of its own, which calls through a null pointer.
    for (const char* file : {"/index.txt", "/data.bin"}) ::unlink((folder + file).c_str());
    ::rmdir(folder.c_str());
    if (status != 0) throw std::runtime_error("failed: " + command);
  }

  bool has(const std::string& name) const { return tensors_.contains(name); }
  /// Throws for a name that was not written, so that a misspelt one cannot pass.
  const at::Tensor& operator()(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::runtime_error("reference.py wrote no '" + name + "'");
    return found->second;
  }
  double number(const std::string& name) const { return (*this)(name).item<double>(); }

  /// How many tensors are called `<prefix>0`, `<prefix>1` and so on, with `suffix` behind the number.
  int count(const std::string& prefix, const std::string& suffix = "") const {
    int n = 0;
    while (has(prefix + std::to_string(n) + suffix)) ++n;
    return n;
  }

 private:
  void read(const std::string& folder) {
    std::ifstream data(folder + "/data.bin", std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(data), std::istreambuf_iterator<char>()};
    std::ifstream index(folder + "/index.txt");
    for (std::string line; std::getline(index, line);) {
      std::istringstream words(line);
      std::string name, dtype;
      std::size_t offset = 0;
      words >> name >> dtype >> offset;
      const std::vector<std::int64_t> sizes{std::istream_iterator<std::int64_t>(words), {}};
      auto tensor = at::empty(sizes, dtype == "f32" ? at::kFloat : dtype == "f64" ? at::kDouble : at::kLong);
      if (offset + tensor.nbytes() > bytes.size()) throw std::runtime_error("data.bin is too short for " + name);
      std::copy_n(bytes.data() + offset, tensor.nbytes(), static_cast<char*>(tensor.data_ptr()));
      tensors_.emplace(name, tensor);
    }
  }

  std::map<std::string, at::Tensor> tensors_;
};

}  // namespace golden
