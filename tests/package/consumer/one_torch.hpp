// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <iostream>
#include <set>
#include <string>

/// Whether exactly one libtorch_cpu.so is mapped into this process; prints the list otherwise.
inline bool one_torch() {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto slash = line.find('/');
    if (slash != std::string::npos && line.find("libtorch_cpu.so") != std::string::npos) {
      files.insert(line.substr(slash));
    }
  }
  if (files.size() == 1) return true;
  for (const auto& file : files) std::cout << "mapped: " << file << "\n";
  return false;
}
