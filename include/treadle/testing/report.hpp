// SPDX-License-Identifier: Apache-2.0
// What the contract checks share: a list of broken promises, and comparisons that no rounding excuses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

/// What a contract check returns: one sentence for each promise that was broken; empty if all were kept.
using Violations = std::vector<std::string>;

/// Collects broken promises, each once.
class Report {
 public:
  explicit Report(std::string contract) : contract_(std::move(contract)) {}
  void require(bool kept, const std::string& promise) {
    const std::string sentence = contract_ + " contract: " + promise;
    if (kept) return;
    for (const auto& known : violations_)
      if (known == sentence) return;
    violations_.push_back(sentence);
  }
  /// Runs `f`; an exception breaks `promise`.
  template <class F>
  void require_no_throw(F&& f, const std::string& promise) {
    try {
      f();
    } catch (const std::exception& error) {
      require(false, promise + " (it threw: " + error.what() + ")");
    }
  }
  Violations take() { return std::move(violations_); }

 private:
  std::string contract_;
  Violations violations_;
};

namespace detail {

/// Same dtype, shape and bits; NaN equals NaN.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (a.numel() == 0) return true;
  const auto bytes = [](const at::Tensor& t) { return t.detach().cpu().contiguous().flatten().view(at::kByte); };
  return at::equal(bytes(a), bytes(b));
}
inline bool close(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return a.sizes() == b.sizes() &&
         a.detach().to(at::kDouble).allclose(b.detach().to(at::kDouble), tolerance, tolerance);
}
inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}
inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_bits(a[i], b[i])) return false;
  return true;
}
/// Copies of the tensors that a state shows.
template <class State>
std::vector<at::Tensor> visited(State& state) {
  std::vector<at::Tensor> tensors;
  state.for_each_state([&](const auto&, at::Tensor& tensor) { tensors.push_back(tensor.clone()); });
  return tensors;
}

/// Two trained parameters, one frozen one, and one that belongs to a module with a floating buffer.
inline ParameterList probe_parameters(at::Device device) {
  const auto make = [&](at::IntArrayRef sizes, bool trained) {
    return at::randn(sizes, at::TensorOptions().device(device)).set_requires_grad(trained);
  };
  std::vector<Parameter> list;
  const auto add = [&](const char* name, const at::Tensor& tensor) { list.push_back({name, tensor, tensor}); };
  add("linear.weight", make({4, 3}, true));
  add("linear.bias", make({4}, true));
  add("frozen.weight", make({3}, false));
  add("norm.weight", make({4}, true));
  return {std::move(list), device};
}
inline BufferList probe_buffers(at::Device device) {
  return {{"norm.running_mean", at::randn({4}, at::TensorOptions().device(device))}};
}

}  // namespace detail
}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
