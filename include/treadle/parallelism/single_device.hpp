// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "treadle/axis.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace parallelism {

/// One process and one device: the first CUDA device if there is one, else the CPU, unless `device` names one.
///
/// This is the axis's no-op policy and the worked example of `parallelism/concept.hpp`.
struct SingleDevice {
  using policy_axis = axis::Parallelism;
  static constexpr bool replicates = false;
  static constexpr bool slices = false;
  static constexpr bool threads = false;
  static constexpr bool finds_unused = false;

  std::optional<at::Device> device{};  ///< where the model is moved to and the steps run

  bool operator==(const SingleDevice&) const = default;
  void check() const {}

  class State {
   public:
    explicit State(const SingleDevice& policy) : device_(resolve_device(policy.device)) {}

    at::Device device() const { return device_; }
    std::int64_t rank() const { return 0; }
    std::int64_t world_size() const { return 1; }
    /// After the model is moved and its weights converted, before any rule state exists.
    template <class Model, class Parameters, class Buffers>
    void prepare(Model&, Parameters&, Buffers&) {}
    /// The number that all ranks use: rank 0's.
    double agree(double value) const { return value; }
    /// Runs `micro_batch(model, batch)`; a parallel policy holds its sync guard over it and reduces if `reduces`.
    template <class Model, class Batch, class MicroBatch>
    [[gnu::always_inline]] void run(Model& model, const Batch& batch, bool /*reduces*/, MicroBatch&& micro_batch) {
      std::forward<MicroBatch>(micro_batch)(model, batch);
    }
    /// Called once a step after its last micro-batch: gradients are reduced when it returns.
    void finish_reduction() const {}

   private:
    at::Device device_;
  };
};

}  // namespace parallelism
}  // namespace v0_1
}  // namespace treadle
