// SPDX-License-Identifier: Apache-2.0
// ResNet-50 (He et al. 2015), with the stride in the 3x3 convolutions, as torchvision has it.
#pragma once

#include <ATen/ops/max_pool2d.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace resnet {

inline torch::nn::Conv2d convolution(std::int64_t from, std::int64_t to, std::int64_t size, std::int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, size).stride(stride).padding(size / 2).bias(false));
}

struct BottleneckImpl : torch::nn::Module {
  static constexpr std::int64_t expansion = 4;

  BottleneckImpl(std::int64_t from, std::int64_t width, std::int64_t stride)
      : conv1(register_module("conv1", convolution(from, width, 1, 1))),
        norm1(register_module("norm1", torch::nn::BatchNorm2d(width))),
        conv2(register_module("conv2", convolution(width, width, 3, stride))),
        norm2(register_module("norm2", torch::nn::BatchNorm2d(width))),
        conv3(register_module("conv3", convolution(width, expansion * width, 1, 1))),
        norm3(register_module("norm3", torch::nn::BatchNorm2d(expansion * width))) {
    if (stride == 1 && from == expansion * width) return;
    shortcut = register_module("shortcut", torch::nn::Sequential(convolution(from, expansion * width, 1, stride),
                                                                 torch::nn::BatchNorm2d(expansion * width)));
  }

  at::Tensor forward(const at::Tensor& x) {
    auto y = norm1(conv1(x)).relu_();
    y = norm2(conv2(y)).relu_();
    return norm3(conv3(y)).add_(shortcut ? shortcut->forward(x) : x).relu_();
  }

  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d norm1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d norm2;
  torch::nn::Conv2d conv3;
  torch::nn::BatchNorm2d norm3;
  torch::nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Bottleneck);

/// Logits `[N, classes]` of images `[N, 3, H, W]`.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(std::int64_t classes = 1000)
      : stem(register_module("stem", convolution(3, 64, 7, 2))),
        norm(register_module("norm", torch::nn::BatchNorm2d(64))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        head(register_module("head", torch::nn::Linear(512 * BottleneckImpl::expansion, classes))) {
    constexpr std::int64_t depths[] = {3, 4, 6, 3};
    std::int64_t from = 64;
    for (std::int64_t stage = 0; stage < 4; ++stage)
      for (std::int64_t i = 0; i < depths[stage]; ++i) {
        const std::int64_t width = 64 << stage;
        blocks->push_back(Bottleneck(from, width, i == 0 && stage > 0 ? 2 : 1));
        from = width * BottleneckImpl::expansion;
      }
    for (auto& module : modules(/*include_self=*/false))
      if (auto* conv = module->as<torch::nn::Conv2d>())
        torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = at::max_pool2d(norm(stem(x)).relu_(), {3, 3}, {2, 2}, {1, 1});
    return head(blocks->forward(y).mean({2, 3}));
  }

  /// Weights of convolutions with their channels last in memory, as images then should be.
  void channels_last() {
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters())
      if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
  }

  torch::nn::Conv2d stem;
  torch::nn::BatchNorm2d norm;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Model);

}  // namespace resnet
