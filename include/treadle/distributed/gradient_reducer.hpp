// SPDX-License-Identifier: Apache-2.0
// LibTorch's Reducer, which turns gradients into their means over ranks during the backward pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/distributed/process_group.hpp"
#include "treadle/distributed/wire.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {

/// Which parameters a step uses: all of them; a part that varies and has to be searched for in each graph; or whatever
/// the first window used, for the whole run.
enum class ParameterUse { Every, Find, Static };

namespace detail {

struct ReducerOptions {
  std::int64_t bucket_bytes;
  std::int64_t first_bucket_bytes;
  bool bucket_views;
  Wire wire;
};

/// A Reducer over the masters that are trained, with the order of calls that it wants: before the forward pass, before
/// the backward pass, and that one backward pass through every tensor.
template <ParameterUse Use>
class GradientReducer {
 public:
  GradientReducer(const ParameterList& parameters, ProcessGroup& group, const ReducerOptions& options) {
    for (const auto& parameter : parameters) {
      if (!parameter.model.requires_grad()) continue;
      names_.push_back(parameter.name);
      tensors_.push_back(parameter.master);
    }
    const auto first = static_cast<std::size_t>(options.first_bucket_bytes);
    const auto others = static_cast<std::size_t>(options.bucket_bytes);
    const std::vector<bool> sparse(tensors_.size(), false);
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors_, {first, others}, sparse));
    std::ranges::reverse(buckets);  // gradients come about in the reverse order of use
    std::unordered_map<std::size_t, std::string> by_index;
    for (std::size_t i = 0; i < names_.size(); ++i) by_index[i] = names_[i];
    reducer_ = std::make_shared<c10d::Reducer>(tensors_, std::move(buckets), group.c10d(), sparse, options.bucket_bytes,
                                               /*find_unused_parameters=*/Use == ParameterUse::Find,
                                               options.bucket_views, std::move(by_index), options.first_bucket_bytes,
                                               /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
                                               std::vector<std::int64_t>{});
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    set_wire(*reducer_, options.wire, group.c10d());
    if constexpr (Use == ParameterUse::Static) {
      reducer_->set_static_graph();
      logger_->set_static_graph();
    }
  }
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Before the forward pass whose gradients are to be reduced.
  void before_forward() {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();  // once, after the first reduction
  }
  /// Between that pass and its backward pass, which starts from `root`; `graphs` is what a search looks through.
  void before_backward(const at::Tensor& root, const std::vector<at::Tensor>& graphs) {
    if constexpr (Use == ParameterUse::Find)
      reducer_->prepare_for_backward(graphs);
    else
      reducer_->prepare_for_backward({});
    if constexpr (Use == ParameterUse::Static) {
      if (delayed_) return;
      // In its first pass the static graph's Reducer only counts, and reduces when it is told to: at the pass's end.
      delayed_ = true;
      watch_use();
      root.register_hook([this](const at::Tensor& gradient) {
        torch::autograd::Engine::get_default_engine().queue_callback([this] { reducer_->delay_all_reduce(); });
        return gradient;
      });
    }
  }
  /// After it. Throws `ConfigError` naming the parameters that got no gradient, where every one has to.
  void after_backward() {
    try {
      reducer_->check_finalized();
    } catch (const c10::Error& error) {
      refuse_unused(error.what_without_backtrace());
    }
    for (std::size_t i = 0; i < watches_.size(); ++i) {
      tensors_[i].remove_hook(watches_[i]);
      if (use_[i] == '1') used_.push_back(tensors_[i]);
    }
    watches_.clear();
  }
  /// Both passes in place of a rank's that has nothing to count: its gradients are what they are, plus zero.
  void reduce_zeros() {
    if constexpr (Use == ParameterUse::Every) {
      before_backward({}, {});
      std::vector<at::Tensor> zeros;
      for (const auto& tensor : tensors_) zeros.push_back(at::zeros_like(tensor));
      torch::autograd::backward(tensors_, zeros);
    } else {
      // A graph is wanted here, through any parameter for Find, through those of every step for Static.
      const at::AutoGradMode with_grad(true);
      const auto& through = used_.empty() ? tensors_ : used_;
      at::Tensor root = through[0].sum().mul(0);
      if constexpr (Use == ParameterUse::Static)
        for (std::size_t i = 1; i < through.size(); ++i) root = root + through[i].sum().mul(0).to(root.scalar_type());
      before_backward(root, {root});
      torch::autograd::backward({root}, {at::zeros_like(root)});
    }
    after_backward();
  }
  /// Which parameters the first pass of a static graph went through, a character each.
  const std::string& use() const { return use_; }
  /// Throws `ConfigError` where ranks, of which `all` is what `use` gave, do not use the same parameters.
  void require_same_use(const std::vector<std::string>& all) const {
    for (std::size_t r = 1; r < all.size(); ++r)
      for (std::size_t i = 0; i < names_.size(); ++i)
        if (all[r][i] != all[0][i])
          throw ConfigError(
              "parallelism::DistributedDataParallel: parameter '" + names_[i] +
              "' is used on some ranks and not on others in the first micro-batch, which settles that for "
              "ParameterUse::Static (a rank without rows counts as using all); give each rank rows from "
              "the start, freeze what is never used, or use ParameterUse::Find.");
  }
  /// Numbers of the tensors in the order in which they are reduced, which decides how numbers of 3 ranks and more
  /// round, and for each 1 if it is used.
  std::vector<std::int64_t> order() const {
    std::vector<std::int64_t> order;
    for (const auto& bucket : reducer_->get_grad_buckets())
      for (const auto& tensor : bucket.getParameters())
        for (std::size_t i = 0; i < tensors_.size(); ++i)
          if (tensors_[i].is_same(tensor)) order.push_back(static_cast<std::int64_t>(i));
    for (const char used : use_) order.push_back(used == '1');
    return order;
  }
  /// Before the first pass: makes the buckets those of a Reducer that gave `order`, by a pass in that order in which
  /// nothing counts. LibTorch's Reducer settles them by its first pass, whatever it was told before.
  void rehearse(const std::vector<std::int64_t>& order) {
    if constexpr (Use == ParameterUse::Find) return;  // whose buckets stay as they were made
    const std::size_t count = tensors_.size();
    if (order.size() != (Use == ParameterUse::Static ? 2 * count : count) ||
        std::ranges::any_of(order, [&](std::int64_t i) { return i < 0 || i >= static_cast<std::int64_t>(count); }))
      throw SnapshotError(
          "parallelism::DistributedDataParallel: the snapshot's buckets are not those of this model's parameters; "
          "load its weights with treadle::load_weights instead of resuming.");
    const at::AutoGradMode with_grad(true);
    at::Tensor root;
    for (std::size_t i = count; i-- > 0;) {  // a backward pass runs first what was made last
      const auto which = static_cast<std::size_t>(order[i]);
      if (Use == ParameterUse::Static && order[count + which] == 0) continue;
      const auto part = tensors_[which].sum().mul(0).to(tensors_[0].scalar_type());
      root = root.defined() ? root + part : part;
    }
    before_forward();
    before_backward(root, {root});
    torch::autograd::backward({root}, {at::zeros_like(root)});
    after_backward();
    for (const auto& tensor : tensors_) tensor.mutable_grad().reset();
  }
  /// After a backward pass that did not come to its end.
  void reset() { reducer_->reset_state(); }

  /// LibTorch's figures about reductions: bucket sizes, times.
  at::DDPLoggingData statistics() const { return logger_->get_ddp_logging_data(); }

 private:
  // A gradient that is there afterwards says less: the reduction brings those of other ranks.
  void watch_use() {
    use_.assign(tensors_.size(), '0');
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      watches_.push_back(tensors_[i].register_hook([this, i](const at::Tensor& gradient) {
        use_[i] = '1';
        return gradient;
      }));
  }
  [[noreturn, gnu::cold]] void refuse_unused(const std::string& reason) const {
    std::string list;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      if (!tensors_[i].requires_grad())
        throw ConfigError("parallelism::DistributedDataParallel: parameter '" + names_[i] +
                          "' was frozen after the trainer was made; freeze before that, or make a new one.");
      if (!tensors_[i].grad().defined()) list += (list.empty() ? "'" : ", '") + names_[i] + "'";
    }
    if (list.empty()) throw DistributedError("parallelism::DistributedDataParallel: " + reason);
    throw ConfigError("parallelism::DistributedDataParallel: parameters " + list +
                      " got no gradient on this rank, and the others wait for them; freeze them with "
                      "requires_grad_(false), or use ParameterUse::Find (or Static, if they are never used).");
  }

  std::vector<std::string> names_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> used_;  // in a static graph; empty until a pass has shown them
  std::string use_;               // the same as text
  std::vector<unsigned> watches_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
  bool delayed_ = false;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
