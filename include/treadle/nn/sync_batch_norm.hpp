// SPDX-License-Identifier: Apache-2.0
// Batch norm over the rows of all ranks.
//
// In Python a finished model is converted: its batch norms are replaced, and attributes are looked up when they are
// used. In C++ a class holds its children in members of a type (`torch::nn::BatchNorm2d norm;`), which no library can
// change behind it: replacing the registered child would leave the member, which forward() calls, as it was. So a class
// uses `nn::SyncBatchNorm` from the start, in place of BatchNorm1d, 2d or 3d, and it is plain batch norm, bit by bit,
// until `nn::synchronize(model, group)` tells it whom to share with:
//
//   td::Trainer trainer{net, ..., td::policies(td::parallelism::DistributedDataParallel<>{})};
//   td::nn::synchronize(*net, trainer.parallelism().group());
//
// What is held by no member can be replaced: `nn::convert_sync_batch_norm` does so for children of
// torch::nn::Sequential and refuses a model with others, by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/nn/sync_batch_norm_function.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nn {

/// Batch norm for inputs of 2 to 5 dimensions `[N, C, ...]`, of the options, parameters and buffers of
/// `torch::nn::BatchNorm`, whose statistics in training are those of all ranks' rows together.
///
/// Ranks may have different numbers of rows, and an empty input; all must call it equally often, or those that do wait
/// until the group's timeout and throw `DistributedError`. A trainer does not run its model where a rank has no batch
/// or no rows, so each rank needs rows for every micro-batch. In evaluation, and without a group, it is plain batch
/// norm.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  explicit SyncBatchNormImpl(std::int64_t features) : SyncBatchNormImpl(torch::nn::BatchNormOptions(features)) {}
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group = {})
      : options(options), group_(std::move(group)) {
    SyncBatchNormImpl::reset();
  }
  /// Takes the place of a batch norm of torch::nn, with its own tensors, options and mode.
  template <std::size_t D, class Norm>
  explicit SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Norm>& norm) : options(norm.options) {
    hold(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked);
    train(norm.is_training());
  }

  void reset() override {
    const at::IntArrayRef sizes(options.num_features());
    const auto made = [](bool wanted, const auto& make) { return wanted ? make() : at::Tensor(); };
    const bool tracks = options.track_running_stats();
    const auto ones = [&] { return at::ones(sizes).set_requires_grad(true); };
    const auto zeros = [&] { return at::zeros(sizes).set_requires_grad(true); };
    hold(made(options.affine(), ones), made(options.affine(), zeros), made(tracks, [&] { return at::zeros(sizes); }),
         made(tracks, [&] { return at::ones(sizes); }), made(tracks, [] { return at::zeros({}, at::kLong); }));
  }

  /// The ranks to share statistics with; null for none. It is kept alive.
  void set_group(Group group) { group_ = std::move(group); }
  const Group& group() const { return group_; }

  at::Tensor forward(const at::Tensor& input) {
    check(input);
    const bool of_batch = is_training() || !options.track_running_stats();
    double momentum = options.momentum().value_or(0.0);
    if (is_training() && num_batches_tracked.defined()) {
      num_batches_tracked += 1;
      if (!options.momentum()) momentum = 1.0 / num_batches_tracked.item<double>();  // sync: a cumulative mean needs it
    }
    if (!is_training() || !group_ || group_->getSize() == 1)
      return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias, of_batch,
                                                       momentum, options.eps());
    return detail::SyncBatchNormFunction::over_ranks(input, weight, bias, running_mean, running_var, group_, momentum,
                                                     options.eps());
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "treadle::nn::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ")";
  }

  torch::nn::BatchNormOptions options;
  at::Tensor weight;  ///< `[C]`; undefined without `affine`, as `bias`
  at::Tensor bias;
  at::Tensor running_mean;  ///< `[C]`; undefined without `track_running_stats`, as the two below
  at::Tensor running_var;
  at::Tensor num_batches_tracked;

 private:
  void check(const at::Tensor& input) const {
    if (input.dim() < 2 || input.dim() > 5 || input.size(1) != options.num_features())
      throw DataError("treadle::nn::SyncBatchNorm: the input has sizes " + c10::str(input.sizes()) +
                      "; it must be [N, C] to [N, C, D, H, W] with C = " + std::to_string(options.num_features()) +
                      ".");
  }

  void hold(const at::Tensor& w, const at::Tensor& b, const at::Tensor& mean, const at::Tensor& var,
            const at::Tensor& batches) {
    weight = register_parameter("weight", w, w.defined() && w.requires_grad());
    bias = register_parameter("bias", b, b.defined() && b.requires_grad());
    running_mean = register_buffer("running_mean", mean);
    running_var = register_buffer("running_var", var);
    num_batches_tracked = register_buffer("num_batches_tracked", batches);
  }

  Group group_;
};
TORCH_MODULE(SyncBatchNorm);

namespace detail {
inline const SyncBatchNormImpl::Group& c10d_group(const SyncBatchNormImpl::Group& group) {
  return group;
}
template <class Group>
const SyncBatchNormImpl::Group& c10d_group(const Group& group) {
  return group.c10d();
}

inline std::size_t set_groups(torch::nn::Module& module, const SyncBatchNormImpl::Group& group) {
  std::size_t count = 0;
  const auto set = [&](torch::nn::Module& one) {
    if (auto* norm = dynamic_cast<SyncBatchNormImpl*>(&one)) norm->set_group(group), ++count;
  };
  set(module);
  for (const auto& child : module.modules(/*include_self=*/false)) set(*child);
  return count;
}

// The module in whose place a synchronized one can stand, or null.
inline std::shared_ptr<SyncBatchNormImpl> replacement(const torch::nn::Module& module) {
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*norm);
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*norm);
  if (const auto* norm = dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*norm);
  return nullptr;
}
inline void refuse_members(const torch::nn::Module& module, const std::string& path) {
  const bool sequential = dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
  for (const auto& child : module.named_children()) {
    const std::string name = path.empty() ? child.key() : path + "." + child.key();
    if (!sequential && replacement(*child.value()))
      throw ConfigError("treadle::nn::convert_sync_batch_norm: '" + name +
                        "' is no child of a torch::nn::Sequential, so its owner holds it by type and would go on to "
                        "use it; make it an nn::SyncBatchNorm in that class, and call nn::synchronize.");
    refuse_members(*child.value(), name);
  }
}
inline void convert_children(torch::nn::Module& module) {
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module)) {
    const auto names = module.named_children().keys();
    for (std::size_t i = 0; i < names.size(); ++i) {
      auto& held = *(sequential->begin() + static_cast<std::ptrdiff_t>(i));
      if (auto sync = replacement(*held.ptr())) {
        module.replace_module(names[i], sync);
        held = torch::nn::AnyModule(std::move(sync));
      }
    }
  }
  for (const auto& child : module.children()) convert_children(*child);
}
}  // namespace detail

/// Lets every `SyncBatchNorm` of `model` share its statistics among the ranks of `group` (a `treadle::ProcessGroup`, or
/// LibTorch's own; null ends it); gives their number. Throws `ConfigError` if there is none.
template <class Group>
std::size_t synchronize(torch::nn::Module& model, const Group& group) {
  const std::size_t count = detail::set_groups(model, detail::c10d_group(group));
  if (count == 0)
    throw ConfigError(
        "treadle::nn::synchronize: the model has no nn::SyncBatchNorm; use it in the model's class in place of "
        "torch::nn::BatchNorm1d, 2d and 3d.");
  return count;
}

/// Replaces the BatchNorm1d, 2d and 3d of all torch::nn::Sequentials in `model` by synchronized ones, which keep
/// parameters, buffers (the same tensors), names, mode and options, and synchronizes the model. Throws `ConfigError`,
/// with the model unchanged, for a batch norm that some class holds by type.
template <class Group>
std::size_t convert_sync_batch_norm(torch::nn::Module& model, const Group& group) {
  detail::refuse_members(model, "");
  detail::convert_children(model);
  return synchronize(model, group);
}

}  // namespace nn
}  // namespace v0_1
}  // namespace treadle
