// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/model.hpp"
#include "treadle/parallelism/concept.hpp"
#include "treadle/runtime/window.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

namespace detail {

/// A model that can be copied. Of row x its loss is sum(weight) x + bias, so that the gradient of a mean over rows is
/// their mean for each weight, and 1 for the bias.
struct RowModel : torch::nn::Cloneable<RowModel> {
  RowModel() { RowModel::reset(); }
  void reset() override {
    weight = register_parameter("weight", at::randn({4}));
    bias = register_parameter("bias", at::randn({1}));
    frozen = register_parameter("frozen", at::randn({3}), /*requires_grad=*/false);
    offset = register_buffer("offset", at::zeros({2}));
  }
  at::Tensor weight, bias, frozen, offset;
};

/// The stages of a trainer that trains `RowModel`; notes the rows that it is given.
template <class State>
struct StagesProbe {
  struct Seen {
    std::mutex mutex;  // a policy may run its replicas in threads
    std::multiset<std::int64_t> rows;
    std::size_t forwards = 0;
    std::size_t backwards = 0;
  };
  State& state;
  treadle::detail::Window<true>& window;
  Seen& seen;

  template <class Context>
  Loss forward(RowModel& model, const Batch& part, Context&) const {
    const std::lock_guard lock(seen.mutex);
    const std::int64_t rows = part.data.size(0);
    if (rows == 0) return Loss::mean({}, 0);
    for (std::int64_t i = 0; i < rows; ++i) seen.rows.insert(part.data[i].item<std::int64_t>());  // sync: a check looks
    ++seen.forwards;
    return Loss::mean((model.weight.sum() * part.data.to(at::kFloat) + model.bias).mean(), rows);
  }
  treadle::detail::Weight weigh(const Loss& loss, const Batch& part) const {
    return {window.add(
                loss, [&] { return part.data.size(0); },
                [&](double count) { return state.agree(count, "the nominal count"); }),
            true};
  }
  void skip() const {
    window.add_nothing([&](double count) { return state.agree(count, "the nominal count"); });
  }
  at::Tensor share() const { return window.share(); }
  treadle::detail::Root root(const at::Tensor& value, treadle::detail::Weight weight) const {
    ++seen.backwards;
    return {value, at::full_like(value, weight.factor)};
  }
  void backward(const at::Tensor& value, treadle::detail::Weight weight) const {
    const auto from = root(value, weight);
    torch::autograd::backward({from.value}, {from.seed});
  }
};

/// Micro-batch `part` of a window of rank `rank`: row numbers, of which no two are the same in a window.
inline at::Tensor rows_of_part(std::int64_t rank, std::int64_t part, std::int64_t count, at::Device device) {
  const std::int64_t first = 1000 * rank + 100 * part;
  return at::arange(first, first + count, at::TensorOptions().device(device).dtype(at::kLong));
}
/// The rows of a rank's micro-batches in window `number`: ragged; then the last one has none; then the last rank of
/// several has none at all.
inline std::vector<std::int64_t> sizes_of_window(int number, std::int64_t rank, std::int64_t ranks) {
  const bool last = ranks > 1 && rank + 1 == ranks;
  if (number == 1) return {3 + rank, 0};
  if (number == 2) return last ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{5};
  return {6, 4 + rank};
}
inline std::string bytes_of(const at::Tensor& tensor) {
  const auto plain = tensor.detach().cpu().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}
}  // namespace detail

/// Checks at run time what `parallelism_policy` promises and the compiler cannot see: windows of a small model, with
/// and without rows, against gradients known beforehand; one sentence a broken promise. A policy of several processes
/// is checked by all of them at once, which its launcher has started.
template <parallelism_policy P>
Violations check_parallelism_contract(const P& policy = {}) {
  Report report("parallelism");
  policy.check();
  typename P::State state(policy);
  const at::Device device = state.device();
  const std::int64_t rank = state.rank();
  const std::int64_t ranks = state.world_size();
  report.require(device.is_cpu() || device.has_index(), "device() must name a device with its index.");
  report.require(ranks >= 1 && rank >= 0 && rank < ranks, "rank() must lie in [0, world_size()).");
  const auto same_everywhere = [&]([[maybe_unused]] const std::string& mine) {
    if constexpr (P::processes)
      for (const auto& one : state.gather(mine, "the check"))
        if (one != mine) return false;
    return true;
  };
  if constexpr (P::processes) {
    const auto all = state.gather(std::string(static_cast<std::size_t>(rank) + 1, 'x'), "the check");
    bool in_order = static_cast<std::int64_t>(all.size()) == ranks;
    for (std::size_t r = 0; r < all.size(); ++r) in_order = in_order && all[r].size() == r + 1;
    report.require(in_order, "gather() must return the bytes of each rank, in the order of the ranks.");
  }
  report.require(state.agree(2.5, "the check") == 2.5, "agree() must return the number that all ranks gave.");
  report.require(same_everywhere(std::to_string(state.agree(static_cast<double>(rank), "the check"))),
                 "agree() must return the same number on every rank.");

  detail::RowModel model;
  model.to(device);
  auto parameters = treadle::detail::list_parameters(model, device);
  auto buffers = treadle::detail::list_buffers(model);
  state.prepare(model, parameters, buffers);
  report.require(same_everywhere(detail::bytes_of(model.weight) + detail::bytes_of(model.frozen)),
                 "prepare() must give all ranks the same parameters.");

  using Probe = detail::StagesProbe<typename P::State>;
  treadle::detail::Window<true> window(device, ranks, /*single=*/false);
  typename Probe::Seen seen;
  const Probe stages{state, window, seen};
  int context = 0;
  const auto run = [&](std::int64_t part, std::int64_t count, bool reduces) {
    const auto rows = detail::rows_of_part(rank, part, count, device);
    seen.rows.clear();
    seen.forwards = seen.backwards = 0;
    state.run(model, Batch{rows, rows}, reduces, context, stages);
    bool each = static_cast<std::int64_t>(seen.rows.size()) == count;
    for (std::int64_t i = 0; i < count; ++i) each = each && seen.rows.count(1000 * rank + 100 * part + i) == 1;
    report.require(each, "run() must pass on each row of its batch exactly once.");
    report.require(seen.forwards == seen.backwards,
                   "run() must call backward() once for each forward() that counts something.");
  };
  const auto drop = [&] {
    window.reset();
    parameters.release_gradients();
  };
  for (int number = 0; number < 4; ++number) {
    if (number == 3) {  // after a window that was dropped
      state.begin_window();
      run(0, 7, false);
      state.reset();
      drop();
    }
    const auto sizes = detail::sizes_of_window(number, rank, ranks);
    state.begin_window();
    for (std::size_t part = 0; part < sizes.size(); ++part)
      run(static_cast<std::int64_t>(part), sizes[part], part + 1 == sizes.size());
    report.require_no_throw([&] { state.finish_reduction(window); }, "finish_reduction() must end a step");
    double sum = 0;
    double count = 0;
    for (std::int64_t r = 0; r < ranks; ++r) {
      const auto of_rank = detail::sizes_of_window(number, r, ranks);
      for (std::size_t part = 0; part < of_rank.size(); ++part) {
        const auto rows = detail::rows_of_part(r, static_cast<std::int64_t>(part), of_rank[part], at::kCPU);
        sum += rows.sum().item<double>();  // sync: a check looks
        count += static_cast<double>(of_rank[part]);
      }
    }
    const at::Tensor* divisor = window.divisor(nullptr);
    const auto is_mean = [&](const at::Tensor& parameter, double mean) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) return false;
      const auto got = gradient.to(at::kDouble) / (divisor ? divisor->item<double>() : 1.0);  // sync: a check looks
      return detail::close(got, at::full_like(got, mean), 1e-4);
    };
    report.require(is_mean(model.weight, sum / count) && is_mean(model.bias, 1.0),
                   "after finish_reduction() the gradients over the window's divisor must be the mean over everything "
                   "that all ranks counted, those included that counted nothing.");
    report.require(!model.frozen.grad().defined(), "a frozen parameter must get no gradient.");
    const auto& weight = model.weight.grad();
    report.require(same_everywhere(weight.defined() ? detail::bytes_of(weight) : std::string()),
                   "finish_reduction() must leave the same gradients on every rank.");
    drop();
  }
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
