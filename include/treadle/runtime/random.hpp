// SPDX-License-Identifier: Apache-2.0
// The default random generators, left as they were found.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// Restores the default generators of the CPU and of `device`, or of every CUDA device, when it ends, so that what runs
/// meanwhile leaves no trace in the random numbers of training.
class GeneratorGuard {
 public:
  GeneratorGuard() {
    save(at::Device(at::kCPU));
    for (std::size_t i = 0; i < at::getNumGPUs(); ++i) save(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(i)));
  }
  explicit GeneratorGuard(at::Device device) {
    save(at::Device(at::kCPU));
    if (!device.is_cpu()) save(device);
  }
  GeneratorGuard(const GeneratorGuard&) = delete;
  GeneratorGuard& operator=(const GeneratorGuard&) = delete;
  ~GeneratorGuard() {
    for (auto& [generator, state] : saved_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void save(at::Device device) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    auto state = generator.get_state();
    saved_.emplace_back(std::move(generator), std::move(state));
  }

  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

}  // namespace v0_1
}  // namespace treadle
