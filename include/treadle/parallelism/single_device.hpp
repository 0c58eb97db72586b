// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "treadle/axis.hpp"
#include "treadle/loss.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {
/// The stages of a micro-batch that one model takes whole.
template <class Model, class Batch, class Context, class Stages>
[[gnu::always_inline]] inline void run_whole(Model& model, const Batch& batch, Context& context, const Stages& stages) {
  const Loss loss = stages.forward(model, batch, context);
  if (loss.counts_nothing()) [[unlikely]]
    return stages.skip();
  stages.backward(loss.value, stages.weigh(loss, batch));
}
}  // namespace detail

namespace parallelism {

/// One process and one device: the first CUDA device if there is one, else the CPU, unless `device` names one.
///
/// This is the axis's no-op policy and the worked example of `parallelism/concept.hpp`.
struct SingleDevice {
  using policy_axis = axis::Parallelism;
  static constexpr bool replicates = false;
  static constexpr bool slices = false;
  static constexpr bool processes = false;
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
    /// The number that all ranks use: the largest of theirs.
    double agree(double value, const char*) const { return value; }
    /// Before a window's first micro-batch.
    void begin_window() const {}
    /// Runs the stages of a micro-batch; a parallel policy holds its sync guard over them and reduces if `reduces`.
    template <class Model, class Batch, class Context, class Stages>
    [[gnu::always_inline]] void run(Model& model, const Batch& batch, bool /*reduces*/, Context& context,
                                    const Stages& stages) const {
      treadle::detail::run_whole(model, batch, context, stages);
    }
    /// Once a step after its last micro-batch: when it returns, gradients are reduced and `window` has all ranks'
    /// totals.
    template <class Window>
    void finish_reduction(Window&) const {}
    /// Drops what an open window has begun.
    void reset() const {}
    /// At a log point: throws if another rank has failed.
    void report() const {}
    /// After a throw: tells the other ranks, before `reset`.
    template <class Stages>
    void abandon(const Stages&) const {}

   private:
    at::Device device_;
  };
};

}  // namespace parallelism
}  // namespace v0_1
}  // namespace treadle
