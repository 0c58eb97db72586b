// SPDX-License-Identifier: Apache-2.0
// In what form gradients travel between ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <vector>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// The form in which gradients travel: their own dtype, or half as many bytes at the price of their last digits.
enum class Wire { Native, Fp16, Bf16 };

namespace detail {

/// What LibTorch's FP16_COMPRESS does, in bfloat16: divides by the ranks, rounds, adds up, widens.
class CompressToBf16 : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor whole = bucket.getBufferRef();
    std::vector<at::Tensor> narrow{at::div(whole, state_->getSize()).to(at::kBFloat16)};
    return state_->allreduce(narrow)->getFuture()->then(
        [whole](c10::ivalue::Future& done) {
          const auto reduced = c10d::detail::parseCppCommHookResult(done.value());
          whole.copy_(reduced);
          return c10::IValue(whole);
        },
        c10::TensorType::get());
  }
};

inline void set_wire(c10d::Reducer& reducer, Wire wire, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (wire == Wire::Fp16) reducer.register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
  if (wire == Wire::Bf16) reducer.register_comm_hook(std::make_unique<CompressToBf16>(group));
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
