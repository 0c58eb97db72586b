// SPDX-License-Identifier: Apache-2.0
// Copies of a trainer's tensors as they are at one step, made where they lie, so that the step goes on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treadle/checkpointing/streams.hpp"
#include "treadle/snapshot/trainer_state.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Copies on the device, in memory that is kept from one time to the next.
class Staging {
 public:
  /// The copy that `add` makes is what `tensor` holds after all that is queued on the calling thread's stream.
  void begin() { used_ = 0; }
  void add(Part part, std::string name, const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    if (used_ == copies_.size()) copies_.emplace_back();
    auto& [home, label, copy] = copies_[used_++];
    home = part;
    label = std::move(name);
    const bool fits = copy.defined() && copy.sizes() == tensor.sizes() && copy.scalar_type() == tensor.scalar_type() &&
                      copy.device() == tensor.device();
    if (!fits) copy = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
    copy.copy_(tensor, /*non_blocking=*/true);
  }
  /// After the last copy: what `take` has to wait for.
  void end(at::Device device) {
    copies_.resize(used_);
    if (device.is_cpu()) return;
    copied_.emplace(device.type());
    copied_->record(stream_here(device));
  }

  /// On any thread, until the next `begin`: the copies of each part in the host's memory.
  std::map<Part, NamedTensors> take() {
    std::map<Part, NamedTensors> parts;
    std::optional<c10::Stream> stream;
    for (auto& [part, name, copy] : copies_) {
      if (copy.is_cpu()) {
        parts[part].emplace_back(name, copy);
        continue;
      }
      const c10::impl::VirtualGuardImpl device(copy.device().type());
      if (!stream) {  // one of its own, so that the step's kernels do not stand behind copies
        stream = device.getStreamFromGlobalPool(copy.device(), /*isHighPriority=*/false);
        copied_->block(*stream);
      }
      const auto before = device.exchangeStream(*stream);
      auto host = at::empty(copy.sizes(), copy.options().device(at::kCPU).pinned_memory(true));
      host.copy_(copy, /*non_blocking=*/true);
      device.exchangeStream(before);
      parts[part].emplace_back(name, std::move(host));
    }
    if (stream) stream->synchronize();
    return parts;
  }

 private:
  struct Copy {
    Part part = Part::Model;
    std::string name;
    at::Tensor tensor;
  };
  std::vector<Copy> copies_;
  std::size_t used_ = 0;
  std::optional<c10::Event> copied_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
