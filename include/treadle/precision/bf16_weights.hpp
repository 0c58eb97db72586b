// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/batch.hpp"
#include "treadle/error.hpp"
#include "treadle/precision/switches.hpp"
#include "treadle/runtime/glob.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// bfloat16 weights and activations with fp32 master weights, which the rule, averages, snapshots and exports read.
///
/// Floating inputs of a batch are cast to bfloat16 (not its `target`). Buffers stay fp32, and so do the parameters of a
/// module that owns floating buffers (batch norm) and those that match `keep_fp32`. Parameters that are bfloat16
/// already get masters too; trained float16 ones are refused with `ConfigError`, as is a bfloat16 one that matches
/// `keep_fp32`.
struct Bf16Weights {
  using policy_axis = axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = true;
  static constexpr bool casts_inputs = true;

  std::vector<std::string> keep_fp32{};  ///< names or patterns (`*`, `?`) of parameters that stay fp32

  bool operator==(const Bf16Weights&) const = default;
  void check() const {}

  class State {
   public:
    /// Takes the masters before it rounds the weights. With windows of several micro-batches the weights' gradients
    /// are accumulated in fp32: 64 bf16 sums lose about 1 %.
    State(const Bf16Weights& policy, ParameterList& parameters, const BufferList& buffers, bool window) {
      const at::NoGradGuard no_grad;
      for (const auto& pattern : policy.keep_fp32) require_match(pattern, parameters);
      for (const auto& parameter : parameters) require_dtype(policy, parameter);
      for (auto& parameter : parameters) {
        const bool trained = parameter.model.requires_grad();
        const bool rounded = parameter.model.scalar_type() == at::kBFloat16;  // by another trainer, say
        if (!rounded && (parameter.model.scalar_type() != at::kFloat || stays_fp32(policy, parameter.name, buffers)))
          continue;
        if (rounded && !trained) continue;
        auto master = parameter.model.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
        if (!rounded) parameter.model.set_data(master.to(at::kBFloat16));
        if (!trained) continue;  // frozen weights need no master
        if (window) parameter.model.set_grad_dtype(at::kFloat);
        parameter.master = master;
        weights_.push_back(parameter.model.detach());
        masters_.push_back(master);
      }
    }

    Switches math() const { return Switches(false); }
    NoGuard autocast() const { return {}; }

    template <class Batch>
    void cast_inputs(Batch& batch) const {
      for_each_input(batch, [](at::Tensor& tensor) {
        if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(at::kBFloat16);
      });
    }

    /// Replaces bf16 gradients by fp32 copies at fixed addresses; others are left alone.
    void gradients(std::span<at::Tensor> gradients) {
      high_.clear();
      wide_.resize(gradients.size());
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        if (gradients[i].scalar_type() != at::kBFloat16) continue;
        if (!wide_[i].defined() || wide_[i].sizes() != gradients[i].sizes())
          wide_[i] = at::empty_like(gradients[i], at::kFloat);
        low_.push_back(gradients[i]);
        high_.push_back(wide_[i]);
        gradients[i] = wide_[i];
      }
      if (!low_.empty()) at::_foreach_copy_(high_, low_);
      low_.clear();  // or the bf16 gradients would outlive the step
    }

    /// Rounds the masters into the weights; after a skipped step this writes what was there.
    void publish() const {
      const at::NoGradGuard no_grad;
      if (!weights_.empty()) at::_foreach_copy_(weights_, masters_);
    }

    template <class Visitor>
    void for_each_state(Visitor&&) {}

   private:
    static bool kept(const Bf16Weights& policy, std::string_view name) {
      return std::ranges::any_of(policy.keep_fp32, [&](const auto& pattern) { return glob_match(pattern, name); });
    }
    static bool stays_fp32(const Bf16Weights& policy, std::string_view name, const BufferList& buffers) {
      if (kept(policy, name)) return true;
      return std::ranges::any_of(buffers, [&](const Buffer& buffer) {
        return buffer.tensor.is_floating_point() && module_of(buffer.name) == module_of(name);
      });
    }
    static std::string_view module_of(std::string_view name) {
      const auto dot = name.rfind('.');
      return dot == std::string_view::npos ? std::string_view{} : name.substr(0, dot);
    }
    static void require_dtype(const Bf16Weights& policy, const Parameter& parameter) {
      const auto dtype = parameter.model.scalar_type();
      const std::string found = "'" + parameter.name + "'";
      if (dtype == at::kHalf && parameter.model.requires_grad())
        throw ConfigError("precision::Bf16Weights: parameter " + found +
                          " is float16, which masters and inputs here do not fit; convert the model with "
                          "to(at::kFloat) before the trainer is made.");
      if (dtype == at::kBFloat16 && kept(policy, parameter.name))
        throw ConfigError("precision::Bf16Weights: keep_fp32 names parameter " + found +
                          ", which is bfloat16 already; convert it to fp32 before the trainer is made, or leave it "
                          "out of keep_fp32.");
    }
    static void require_match(const std::string& pattern, const ParameterList& parameters) {
      if (std::ranges::none_of(parameters, [&](const auto& p) { return glob_match(pattern, p.name); }))
        throw ConfigError(
            "precision::Bf16Weights: keep_fp32 pattern '" + pattern +
            "' matches no parameter; use a name from named_parameters(), with * for any run of characters.");
    }

    std::vector<at::Tensor> weights_;
    std::vector<at::Tensor> masters_;
    std::vector<at::Tensor> wide_;  // fp32 gradients, by position
    std::vector<at::Tensor> low_;   // scratch, kept for its capacity
    std::vector<at::Tensor> high_;
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
