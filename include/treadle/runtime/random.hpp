// SPDX-License-Identifier: Apache-2.0
// The default random generators, left as they were found.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The state of one default generator.
struct GeneratorState {
  at::Generator generator;
  at::Tensor state;

  static GeneratorState now(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    auto state = generator.get_state();
    return {std::move(generator), std::move(state)};
  }
  void restore() const {
    auto target = generator;
    const std::lock_guard lock(target.mutex());
    target.set_state(state);
  }
  bool is_current() const {
    const auto other = now(generator).state;
    return other.nbytes() == state.nbytes() &&
           std::memcmp(other.const_data_ptr(), state.const_data_ptr(), state.nbytes()) == 0;
  }
};

}  // namespace detail

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
    for (const auto& state : saved_) state.restore();
  }

 private:
  void save(at::Device device) {
    saved_.push_back(detail::GeneratorState::now(at::globalContext().defaultGenerator(device)));
  }

  std::vector<detail::GeneratorState> saved_;
};

}  // namespace v0_1
}  // namespace treadle
