// SPDX-License-Identifier: Apache-2.0
// A GPT of blocks that names them, and in them the regions that are cheap to recompute. Its precision is the
// trainer's: under autocast matrix products run in low precision and everything else in fp32.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <treadle/treadle.hpp>
#include <vector>

namespace gpt {

struct Options {
  std::int64_t vocabulary = 50304;
  std::int64_t context = 1024;
  std::int64_t blocks = 24;
  std::int64_t width = 1024;
  std::int64_t heads = 16;
  double dropout = 0.0;
};

/// A tensor in the dtype that autocast computes products in; itself where autocast is off.
inline at::Tensor lowered(const at::Tensor& x) {
  const auto kind = x.device().type();
  return at::autocast::is_autocast_enabled(kind) ? x.to(at::autocast::get_autocast_dtype(kind)) : x;
}

/// A linear layer whose weight's cast is a region of its own.
at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x, auto& step) {
  const auto weight = step.checkpoint.cheap("cast", lowered, layer->weight);
  return at::linear(x, weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Options& o)
      : options(o),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))),
        attention_in(register_module("attention_in", torch::nn::Linear(o.width, 3 * o.width))),
        attention_out(register_module("attention_out", torch::nn::Linear(o.width, o.width))),
        fc1(register_module("fc1", torch::nn::Linear(o.width, 4 * o.width))),
        fc2(register_module("fc2", torch::nn::Linear(4 * o.width, o.width))) {}

  at::Tensor forward(const at::Tensor& x, auto& step) {
    // Function objects live until the backward pass: what this call alone has they hold by value.
    const auto normed = [](torch::nn::LayerNorm norm) {
      return [norm](const at::Tensor& y) mutable { return lowered(norm(y)); };
    };
    const auto b = x.size(0);
    const auto t = x.size(1);
    auto y = step.checkpoint.cheap("norm", normed(norm1), x);
    const auto qkv = linear(attention_in, y, step).view({b, t, 3, options.heads, -1}).permute({2, 0, 3, 1, 4});
    const double drop = is_training() ? options.dropout : 0.0;
    y = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, drop, /*is_causal=*/true);
    y = y.transpose(1, 2).reshape({b, t, -1});
    const auto residual = step.checkpoint.cheap(
        "attention_out",
        [layer = attention_out, drop, &step](const at::Tensor& from, const at::Tensor& z) {
          return from + at::dropout(linear(layer, z, step), drop, true);
        },
        x, y);
    y = step.checkpoint.cheap("norm", normed(norm2), residual);
    y = step.checkpoint.cheap(
        "fc1", [layer = fc1, &step](const at::Tensor& z) { return linear(layer, z, step); }, y);
    y = step.checkpoint.cheap(
        "gelu", [](const at::Tensor& z) { return at::gelu(z, "tanh"); }, y);
    return residual + at::dropout(linear(fc2, y, step), drop, true);
  }

  Options options;
  torch::nn::LayerNorm norm1;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear attention_in;
  torch::nn::Linear attention_out;
  torch::nn::Linear fc1;
  torch::nn::Linear fc2;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Options& o)
      : tokens(register_module("tokens", torch::nn::Embedding(o.vocabulary, o.width))),
        positions(register_module("positions", torch::nn::Embedding(o.context, o.width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))) {
    for (std::int64_t i = 0; i < o.blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(o)));
    const torch::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      auto& p = item.value();
      if (p.dim() < 2) continue;
      p.normal_(0, 0.02);
    }
    for (auto& block : blocks)
      for (auto* layer : {&block->attention_in, &block->attention_out, &block->fc1, &block->fc2})
        (*layer)->bias.zero_();
  }

  /// What the head reads of `x` (batch, time): (batch, time, width).
  at::Tensor features(const at::Tensor& x, auto& step) {
    auto y = tokens(x) + positions(at::arange(x.size(1), x.options()));
    for (auto& block : blocks) y = step.checkpoint(block, y, step);
    return norm(y);
  }
  /// Logits of the next token after each place, by the tied embedding: (batch x time, vocabulary).
  at::Tensor head(const at::Tensor& y) { return at::linear(y, tokens->weight).flatten(0, 1); }

  torch::nn::Embedding tokens;
  torch::nn::Embedding positions;
  torch::nn::LayerNorm norm;
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

/// Mean cross entropy over all tokens, which autocast computes in fp32.
struct NextToken {
  bool head_in_block = false;  ///< head and loss are a block too, the largest one where the vocabulary is large

  treadle::Loss operator()(ModelImpl& model, const treadle::Batch& batch, auto& step) const {
    const auto loss = [&model](const at::Tensor& y, const at::Tensor& target) {
      return at::cross_entropy_loss(model.head(y), target);
    };
    const auto y = model.features(batch.data, step);
    const auto target = batch.target.flatten();
    return treadle::Loss::mean(head_in_block ? step.checkpoint(loss, y, target) : loss(y, target), target.numel());
  }
};

}  // namespace gpt
