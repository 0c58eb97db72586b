// SPDX-License-Identifier: Apache-2.0
// One process a device: every rank trains on its own batches, and gradients are averaged over all of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treadle/axis.hpp"
#include "treadle/distributed/gradient_reducer.hpp"
#include "treadle/distributed/identical.hpp"
#include "treadle/distributed/master_gradients.hpp"
#include "treadle/distributed/process_group.hpp"
#include "treadle/distributed/window_totals.hpp"
#include "treadle/distributed/wire.hpp"
#include "treadle/error.hpp"
#include "treadle/loss.hpp"
#include "treadle/parallelism/single_device.hpp"
#include "treadle/runtime/device.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/runtime/rank.hpp"
#include "treadle/runtime/rank_device.hpp"
#include "treadle/runtime/sink.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {
namespace parallelism {

/// A process a device, over `c10d`: Gloo for CPUs, NCCL for CUDA devices.
///
/// The gradient of a step is the mean over everything that all ranks counted, however ragged. It is reduced during the
/// backward pass of a window's last micro-batch. World, ranks and devices are what the launcher has set
/// (`World::from_environment`); a world of one process trains bitwise as `SingleDevice` does.
template <ParameterUse Use = ParameterUse::Every>
struct DistributedDataParallel {
  using policy_axis = axis::Parallelism;
  static constexpr bool replicates = true;
  static constexpr bool slices = false;
  static constexpr bool processes = true;
  static constexpr bool threads = false;
  static constexpr bool finds_unused = Use == ParameterUse::Find;

  std::optional<at::Device> device{};               ///< default: the GPU numbered by the local rank, else the CPU
  std::optional<World> world{};                     ///< default: `World::from_environment()`
  std::int64_t bucket_bytes = 25 << 20;             ///< gradients that travel together
  std::int64_t first_bucket_bytes = 1 << 20;        ///< of the bucket that is ready first
  bool bucket_views = true;                         ///< gradients lie in the buckets: saves a copy and its memory
  bool broadcast_buffers = true;                    ///< rank 0's buffers to all before each window
  Wire wire = Wire::Native;                         ///< dtype on the way
  std::chrono::milliseconds start_timeout{300000};  ///< longest wait for other ranks until the first step is made
  std::chrono::milliseconds timeout{30000};         ///< and in every later step

  bool operator==(const DistributedDataParallel&) const = default;
  void check() const {
    if (bucket_bytes < 1 || first_bucket_bytes < 1)
      throw ConfigError("parallelism::DistributedDataParallel: bucket_bytes and first_bucket_bytes must be positive.");
    if (start_timeout.count() <= 0 || timeout.count() <= 0)
      throw ConfigError("parallelism::DistributedDataParallel: start_timeout and timeout must be positive.");
  }

  class State;
};

template <ParameterUse Use>
class DistributedDataParallel<Use>::State {
 public:
  explicit State(const DistributedDataParallel& policy)
      : State(policy, policy.world ? *policy.world : World::from_environment()) {}

  at::Device device() const { return device_; }
  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }
  ProcessGroup& group() { return group_; }
  double agree(double value, const char* what) { return group_.max(value, what); }
  std::vector<std::string> gather(const std::string& mine, const char* what) { return group_.gather(mine, what); }
  void forget_failures(const char* what) { group_.forget_failures(what); }
  at::DDPLoggingData statistics() const { return reducer_->statistics(); }

  /// Makes all ranks start from rank 0's model. Throws `ConfigError` on all ranks if their models differ in shape.
  template <class Model>
  void prepare(Model&, ParameterList& parameters, BufferList& buffers) {
    detail::require_same_shapes(group_, options(), parameters, buffers);
    std::vector<at::Tensor> all;
    for (const auto& parameter : parameters) {
      all.push_back(parameter.model.detach());
      if (!parameter.master.is_same(parameter.model)) all.push_back(parameter.master.detach());
    }
    for (const auto& buffer : buffers) buffers_.push_back(buffer.tensor);
    all.insert(all.end(), buffers_.begin(), buffers_.end());
    if (world_size() > 1) group_.broadcast(all);
    detail::require_identical(group_, all);
    masters_ = std::make_unique<detail::MasterGradients>(parameters);
    parameters_ = &parameters;
    make_reducer();
  }

  void begin_window() {
    if (group_.lost()) group_.fail("the step before", "it was given up");
    stage_ = Stage::Open;
    last_on_all_ = false;
    share_buffers();
  }
  void share_buffers() {
    if (policy_.broadcast_buffers && world_size() > 1) group_.broadcast(buffers_);
  }

  template <class Model, class Batch, class Context, class Stages>
  void run(Model& model, const Batch& batch, bool reduces, Context& context, const Stages& stages) {
    if (!reduces && !reduces_always()) return detail::run_whole(model, batch, context, stages);
    prepare_reduction();
    const Loss loss = stages.forward(model, batch, context);
    if (loss.counts_nothing()) {
      stages.skip();
      if (!is_last(reduces)) reduce([&] { reducer_->reduce_zeros(); });
      return;  // a window that ends without a reduction makes up for it in finish_reduction
    }
    const detail::Weight weight = stages.weigh(loss, batch);
    const bool last = is_last(reduces);
    if (last) totals_.start(stages.share());
    reduce([&] {
      const bool searches = Use == ParameterUse::Find;
      reducer_->before_backward(loss.value, searches ? masters_->graphs_of(loss.value) : std::vector<at::Tensor>{});
      stages.backward(loss.value, weight);
      reducer_->after_backward();
    });
    if (last) stage_ = Stage::Reduced;
  }

  template <class Window>
  void finish_reduction(Window& window) {
    if (stage_ != Stage::Reduced) reduce_nothing(window.share());
    stage_ = Stage::Closed;
    totals_.take(window);
    masters_->hand_over();
    if (first_window_) end_first_window();
  }

  bool shares_buffers() const { return policy_.broadcast_buffers; }
  /// Before a snapshot: the buckets are those of the next step, and their order is known.
  void settle() {
    if (world_size() == 1 || first_window_) return;
    prepare_reduction();
    order_ = reducer_->order();
  }
  template <class Visitor>
  void for_each_value(Visitor&& visit) {
    visit("reduction_order", order_);
  }
  void restored() {
    if (world_size() == 1 || order_.empty()) return;
    make_reducer();
    reduce([&] { reducer_->rehearse(order_); });
    masters_->drop();
    end_first_window();
    use_settled_ = true;
  }

  /// Throws `DistributedError` if another rank has failed.
  void report() {
    totals_.report();
    if (group_.lost()) group_.fail("a step", "it was given up");
  }
  /// Drops what an open window has begun.
  void reset() {
    if (masters_) masters_->drop();
    if (stage_ == Stage::Reducing) reducer_->reset();
    prepared_ = false;
    totals_.drop();
    stage_ = Stage::Closed;
  }

  /// In a handler: leaves word for the other ranks of what failed here.
  void leave_word() { group_.report_failure(detail::first_line(detail::text_of_current_exception())); }
  /// In a handler: the other ranks wait for this one's part in the window, so it is given, with word that it failed.
  template <class Stages>
  void abandon(const Stages& stages) {
    leave_word();
    // Only within a window is it known what the others do next; elsewhere the word that was left, a connection that
    // closes or a timeout tells them.
    if (world_size() == 1 || group_.lost() || stage_ != Stage::Open) return;
    try {
      stages.skip();
      auto failed = stages.share();
      failed.zero_();
      failed[2].fill_(1);
      reduce_nothing(failed);
      totals_.finish();
    } catch (const std::exception&) {  // what was thrown first is what the caller hears of
    }
  }

 private:
  enum class Stage { Closed, Open, Reducing, Reduced };

  State(const DistributedDataParallel& policy, const World& world)
      : policy_(policy), device_(choose_device(policy, world)), group_(world, device_, policy.start_timeout) {
    set_speaker(rank() == 0, "rank " + std::to_string(rank()) + " of " + std::to_string(world_size()) + ": ");
  }
  void make_reducer() {
    // Alone, a rank keeps gradients where the single device has them: where they lie decides how a GPU adds up a norm.
    const bool views = policy_.bucket_views && world_size() > 1;
    reducer_.reset();  // whose hooks go first
    reducer_ = std::make_unique<detail::GradientReducer<Use>>(
        *parameters_, group_,
        detail::ReducerOptions{policy_.bucket_bytes, policy_.first_bucket_bytes, views, policy_.wire});
  }
  void end_first_window() {
    first_window_ = false;
    group_.set_timeout(policy_.timeout);
  }
  static at::Device choose_device(const DistributedDataParallel& policy, const World& world) {
    return policy.device ? resolve_device(policy.device) : rank_device(world);
  }

  /// What all ranks must do alike, a line each.
  std::string options() const {
    constexpr const char* names[] = {"Every", "Find", "Static"};
    const auto number = [](const char* name, std::int64_t value) { return name + std::to_string(value) + '\n'; };
    return std::string("ParameterUse::") + names[static_cast<int>(Use)] + '\n' +
           number("bucket_bytes ", policy_.bucket_bytes) + number("first_bucket_bytes ", policy_.first_bucket_bytes) +
           number("broadcast_buffers ", policy_.broadcast_buffers) + number("Wire ", static_cast<int>(policy_.wire));
  }

  /// Whether each micro-batch is reduced, as in the first window of a static graph; anything else and it never is
  /// again.
  bool reduces_always() const { return Use == ParameterUse::Static && first_window_; }
  /// Whether the next reduction is the window's last. Where each micro-batch is reduced, ranks may have different
  /// numbers of them and ask each other: it is the last if it is for `mine`, this rank, and for all others.
  bool is_last(bool mine) {
    if (!reduces_always() || last_on_all_) return mine;
    return last_on_all_ = group_.max(mine ? 0.0 : 1.0, "a reduction of a static graph") == 0;
  }

  void prepare_reduction() {
    if (std::exchange(prepared_, true)) return;
    group_.guarded("the buckets' rebuilding", [&] { reducer_->before_forward(); });
  }
  /// A backward pass whose gradients are reduced. Its own errors go on as they are, lost ranks become a
  /// DistributedError.
  template <class Pass>
  void reduce(Pass&& pass) {
    const Stage before = std::exchange(stage_, Stage::Reducing);
    prepared_ = false;
    try {
      pass();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (ProcessGroup::is_collective_failure(error))
        group_.fail("the reduction of gradients", detail::first_line(error.what()));
      throw;
    }
    stage_ = before;
    if (Use == ParameterUse::Static && !std::exchange(use_settled_, true))
      reducer_->require_same_use(group_.gather(reducer_->use(), "a static graph's first reduction"));
  }
  /// The window's last reduction for a rank that has nothing for it.
  void reduce_nothing(const at::Tensor& counts) {
    prepare_reduction();
    while (!is_last(true)) {
      reduce([&] { reducer_->reduce_zeros(); });
      prepare_reduction();
    }
    totals_.start(counts);
    reduce([&] { reducer_->reduce_zeros(); });
    stage_ = Stage::Reduced;
  }

  DistributedDataParallel policy_;
  at::Device device_;
  ProcessGroup group_;
  const ParameterList* parameters_ = nullptr;
  std::vector<at::Tensor> buffers_;
  std::unique_ptr<detail::MasterGradients> masters_;
  std::unique_ptr<detail::GradientReducer<Use>> reducer_;
  detail::WindowTotals totals_{group_};
  Stage stage_ = Stage::Closed;
  std::vector<std::int64_t> order_;  // in which gradients are reduced, as snapshots know it
  bool prepared_ = false;
  bool first_window_ = true;
  bool use_settled_ = false;  // of a static graph
  bool last_on_all_ = false;  // where each micro-batch is reduced: whether this is the last one on all ranks
};

}  // namespace parallelism
}  // namespace v0_1
}  // namespace treadle
