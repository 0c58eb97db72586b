// SPDX-License-Identifier: Apache-2.0
// What all ranks have counted in a window, added up beside its backward pass; a rank that has failed says so there.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "treadle/distributed/process_group.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// The sum over ranks of what `Window::share` gives.
class WindowTotals {
 public:
  explicit WindowTotals(ProcessGroup& group) : group_(group) {}

  /// Begins to add up, beside the backward pass.
  void start(const at::Tensor& share) {
    if (group_.world_size() == 1) return;
    totals_ = share;
    work_ = group_.start_sum(totals_);
  }
  /// Gives the sum to `window`. Throws `DistributedError` on CPUs if a rank has failed.
  template <class Window>
  void take(Window& window) {
    if (!work_) return;
    group_.wait(work_);
    work_.reset();
    if (totals_.is_cpu()) {
      if (totals_.const_data_ptr<double>()[2] > 0) refuse();
    } else {
      // The host does not wait to know: from the first window with a failed rank in it none counts anything, whatever
      // a lost communicator leaves in its gradients, and a log point reports it.
      failed_ = failed_.defined() ? failed_.add_(totals_[2]) : totals_[2].clone();
      totals_[0].masked_fill_(failed_.ne(0), 0);
    }
    window.take_totals(totals_);
  }
  /// Waits for the sum and lets go of it.
  void finish() {
    group_.wait(work_);
    static_cast<void>(totals_.cpu());  // sync: this process may end next, and the others' devices wait for its part
  }
  /// Reads whether a rank has failed; throws `DistributedError` then.
  void report() {
    if (failed_.defined() && failed_.item<double>() > 0) refuse();  // sync: log point
  }
  void drop() { work_.reset(); }

 private:
  [[noreturn]] void refuse() {
    throw DistributedError("parallelism::DistributedDataParallel: rank " + std::to_string(group_.rank()) +
                           " stops, because another rank has failed; the first to fail was " + group_.first_failure());
  }

  ProcessGroup& group_;
  at::Tensor totals_;
  at::Tensor failed_;  // on a CUDA device: how many ranks have failed so far
  ProcessGroup::Work work_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
