// SPDX-License-Identifier: Apache-2.0
// The arithmetic of nn::SyncBatchNorm, forward and backward, with the collectives between.
#pragma once

#include <ATen/AccumulateType.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace nn {
namespace detail {

using SharedGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Runs a collective; what it throws becomes a `DistributedError`.
template <class F>
void collective(const SharedGroup& group, F&& f) {
  try {
    f()->wait();
  } catch (const std::exception& error) {
    throw DistributedError(
        "treadle::nn::SyncBatchNorm: rank " + std::to_string(group->getRank()) + " lost the others (" +
        treadle::detail::first_line(error.what()) +
        "); all ranks must run the model equally often, and a trainer does not where a rank has no batch or no "
        "rows: give each rank rows for every micro-batch.");
  }
}
/// `row` of every rank, by rank: `[ranks, row]`.
inline at::Tensor gather_rows(const SharedGroup& group, at::Tensor row) {
  auto all = at::empty({group->getSize() * row.numel()}, row.options());
  collective(group, [&] { return group->_allgather_base(all, row); });
  return all.view({group->getSize(), row.numel()});
}
inline void sum_over_ranks(const SharedGroup& group, at::Tensor tensor) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  collective(group, [&] { return group->allreduce(tensors); });
}

/// Every dimension but that of the channels.
inline std::vector<std::int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}
/// `[C]` as it broadcasts over `x`.
inline at::Tensor over_rows(const at::Tensor& channels, const at::Tensor& x) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = channels.numel();
  return channels.view(sizes);
}
inline at::Tensor as(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}
/// As the CUDA kernels want it.
inline at::Tensor in_order(const at::Tensor& x) {
  const bool channels_last = (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
                             (x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  return channels_last ? x : x.contiguous();
}

/// The statistics of all ranks' rows: mean and 1 / sqrt(variance + eps), `[C]`, and how many values a channel has.
struct JoinedStatistics {
  at::Tensor mean;
  at::Tensor invstd;
  at::Tensor variance;  // CPU only
  at::Tensor count;     // CPU: of the dtype of the mean; CUDA: int32, `[1]`
};

/// On the CPU, in fp64: squares around each rank's own mean, then around the joined one, so that nothing cancels.
inline JoinedStatistics join_on_cpu(const at::Tensor& x, const at::Tensor& running_mean, const at::Tensor& running_var,
                                    const SharedGroup& group, double momentum, double eps, at::ScalarType dtype) {
  const std::int64_t channels = x.size(1);
  auto row = at::zeros({2 * channels + 1}, x.options().dtype(at::kDouble));
  if (x.numel() > 0) {
    const auto [variance, mean] = at::var_mean(x.to(dtype), all_but_channels(x), /*correction=*/0);
    row.narrow(0, 0, channels).copy_(mean);
    row.narrow(0, channels, channels).copy_(variance);
    row[2 * channels].fill_(static_cast<double>(x.numel() / channels));
  }
  const auto all = gather_rows(group, std::move(row));
  const auto means = all.narrow(1, 0, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  const auto count = counts.sum();
  const double values = *count.const_data_ptr<double>();
  if (values == 1)
    throw DataError(
        "treadle::nn::SyncBatchNorm: all ranks together have 1 value a channel, which has no variance; train on "
        "larger batches.");
  const auto mean = (means * counts).sum(0).div_(values == 0 ? 1 : values);
  const auto deviation = means - mean;
  const auto squares = ((all.narrow(1, channels, channels) + deviation * deviation) * counts).sum(0);
  const auto variance = squares / (values == 0 ? 1 : values);
  if (running_mean.defined() && values > 0) {
    running_mean.copy_(running_mean.to(at::kDouble).lerp_(mean, momentum));
    running_var.copy_(running_var.to(at::kDouble).lerp_(squares / (values - 1), momentum));
  }
  return {mean.to(dtype), (variance + eps).rsqrt_().to(dtype), variance.to(dtype), count.to(dtype)};
}

/// Tensors as they were, if they may have to be put back: decided on the device.
class KeptStatistics {
 public:
  KeptStatistics(bool keep, std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    if (keep)
      for (const auto& tensor : tensors_) before_.push_back(tensor.clone());
  }
  /// Where `condition` (one element) holds.
  void restore(const at::Tensor& condition) const {
    for (std::size_t i = 0; i < before_.size(); ++i) tensors_[i].copy_(at::where(condition, before_[i], tensors_[i]));
  }

 private:
  std::vector<at::Tensor> tensors_, before_;
};

/// On CUDA, without the host reading how many rows other ranks have. A rank without any says that it has 1e-30 of one,
/// which changes no sum and spares the kernel 0 / 0.
inline JoinedStatistics join_on_cuda(const at::Tensor& x, const at::Tensor& running_mean, const at::Tensor& running_var,
                                     const SharedGroup& group, double momentum, double eps, at::ScalarType dtype) {
  const std::int64_t channels = x.size(1);
  const auto options = x.options().dtype(dtype);
  at::Tensor mean = at::zeros({channels}, options);
  at::Tensor invstd = at::full({channels}, 1.0, options);
  if (x.numel() > 0) std::tie(mean, invstd) = at::batch_norm_stats(x, eps);
  const double values = static_cast<double>(x.numel() / channels);
  const auto all = gather_rows(group, at::cat({mean, invstd, at::full({1}, std::max(values, 1e-30), options)}));
  const auto counts = all.select(1, 2 * channels).contiguous();
  // The kernel divides by the joined count less one, and takes that none has zeros for its mean. That all ranks
  // together have less than two values is possible only where this one has.
  const KeptStatistics kept(running_mean.defined() && values < 2, {running_mean, running_var});
  std::tie(mean, invstd) = at::batch_norm_gather_stats_with_counts(
      x, all.narrow(1, 0, channels).contiguous(), all.narrow(1, channels, channels).contiguous(), running_mean,
      running_var, momentum, eps, running_mean.defined() ? counts.to(running_mean.scalar_type()) : counts);
  auto count = counts.sum(0, /*keepdim=*/true).round();
  kept.restore(count.lt(2));
  return {mean, invstd, {}, count.to(at::kInt)};
}

/// Batch norm in training over the rows of all ranks. Gradients of weight and bias are those of this rank's rows, as
/// everywhere in distributed training; that of the input knows all ranks.
struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  using Given = std::optional<at::Tensor>;

  /// Undefined tensors stand for what is not there.
  static at::Tensor over_ranks(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                               const at::Tensor& running_mean, const at::Tensor& running_var, const SharedGroup& group,
                               double momentum, double eps) {
    return apply(input, given(weight), given(bias), given(running_mean), given(running_var), group, momentum, eps);
  }

  static at::Tensor forward(Context* context, const at::Tensor& input, const Given& of_weight, const Given& of_bias,
                            const Given& of_mean, const Given& of_var, const SharedGroup& group, double momentum,
                            double eps) {
    const auto weight = of_weight.value_or(at::Tensor());
    const auto bias = of_bias.value_or(at::Tensor());
    const auto running_mean = of_mean.value_or(at::Tensor());
    const auto running_var = of_var.value_or(at::Tensor());
    const bool cpu = input.is_cpu();
    const at::Tensor x = cpu ? input : in_order(input);
    const auto dtype = at::toAccumulateType(x.scalar_type(), /*is_cuda=*/true);  // float, or double for double
    const auto join = cpu ? join_on_cpu : join_on_cuda;
    const auto joined = join(x, running_mean, running_var, group, momentum, eps, dtype);
    context->save_for_backward({x, weight, joined.mean, joined.invstd, joined.count});
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    if (x.numel() == 0) return at::empty_like(x);
    if (!cpu) return at::batch_norm_elemt(x, weight, bias, joined.mean, joined.invstd, eps);
    return std::get<0>(at::native_batch_norm(x, as(weight, dtype), as(bias, dtype), joined.mean, joined.variance,
                                             /*training=*/false, /*momentum=*/0, eps));
  }

  static Tensors backward(Context* context, Tensors gradients) {
    if (at::GradMode::is_enabled())
      throw ConfigError(
          "treadle::nn::SyncBatchNorm: there are no gradients of its gradients; call backward without "
          "create_graph.");
    const auto saved = context->get_saved_variables();
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
    auto result = saved[0].is_cpu() ? backward_on_cpu(*context, saved, gradients[0], group)
                                    : backward_on_cuda(*context, saved, gradients[0], group);
    result.resize(8);  // the others take none
    return result;
  }

 private:
  static Given given(const at::Tensor& tensor) { return tensor.defined() ? Given(tensor) : std::nullopt; }

  static Tensors backward_on_cpu(Context& context, const Tensors& saved, const at::Tensor& gradient,
                                 const SharedGroup& group) {
    const auto &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3], &count = saved[4];
    const auto dtype = mean.scalar_type();
    const auto dims = all_but_channels(x);
    const auto dy = gradient.to(dtype);
    const auto centered = x.to(dtype) - over_rows(mean, x);
    const auto sums = at::cat({dy.sum(dims), (dy * centered).sum(dims)});
    const std::int64_t channels = x.size(1);
    Tensors result(3);
    if (weight.defined()) {
      result[1] = (sums.narrow(0, channels, channels) * invstd).to(weight.scalar_type());
      result[2] = sums.narrow(0, 0, channels).to(weight.scalar_type(), false, /*copy=*/true);
    }
    if (!context.needs_input_grad(0)) return result;
    sum_over_ranks(group, sums);  // in place: what this rank needs of its own has been taken
    if (x.numel() == 0) {
      result[0] = at::zeros_like(x);
      return result;
    }
    const auto mean_dy = over_rows(sums.narrow(0, 0, channels) / count, x);
    const auto slope = over_rows(sums.narrow(0, channels, channels) / count * invstd * invstd, x);
    const auto scale = weight.defined() ? invstd * weight.to(dtype) : invstd;
    result[0] = (dy - mean_dy).sub_(centered * slope).mul_(over_rows(scale, x)).to(x.scalar_type());
    return result;
  }

  static Tensors backward_on_cuda(Context& context, const Tensors& saved, const at::Tensor& gradient,
                                  const SharedGroup& group) {
    const auto &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3], &count = saved[4];
    const bool of_input = context.needs_input_grad(0);
    const bool affine = weight.defined();
    Tensors result(3);
    auto sums = at::zeros({2, x.size(1)}, mean.options());
    const auto dy = in_order(gradient);
    if (x.numel() > 0) {
      auto [sum_dy, sum_dy_xmu, of_weight, of_bias] =
          at::batch_norm_backward_reduce(dy, x, mean, invstd, weight, of_input, affine, affine);
      if (affine) result[1] = of_weight, result[2] = of_bias;
      if (of_input) sums = at::cat({sum_dy, sum_dy_xmu}).view({2, -1});
    } else if (affine) {
      result[1] = at::zeros_like(weight);
      result[2] = at::zeros_like(weight);
    }
    if (!of_input) return result;
    sum_over_ranks(group, sums);
    result[0] = x.numel() == 0 ? at::zeros_like(x)
                               : at::batch_norm_backward_elemt(dy, x, mean, invstd, as(weight, mean.scalar_type()),
                                                               sums[0], sums[1], count);
    return result;
  }
};

}  // namespace detail
}  // namespace nn
}  // namespace v0_1
}  // namespace treadle
