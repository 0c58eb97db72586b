// SPDX-License-Identifier: Apache-2.0
// The ranks of a job as one group: collectives on CPU tensors go over Gloo, those on CUDA tensors over NCCL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "treadle/distributed/failure_watch.hpp"
#include "treadle/distributed/gloo.hpp"
#include "treadle/distributed/nccl.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/store.hpp"
#include "treadle/runtime/world.hpp"

namespace treadle {
inline namespace v0_1 {

/// The ranks of a job, with the collectives that a training loop needs; all ranks call them in the same order.
///
/// A collective that fails throws `DistributedError`, which names the first rank that reported a failure, if one did.
class ProcessGroup {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// Meets the other ranks of `world`. `timeout` is the longest wait for each collective until `set_timeout`.
  ProcessGroup(World world, at::Device device, std::chrono::milliseconds timeout)
      : world_(std::move(world)),
        store_(connect(world_, timeout)),
        group_(c10::make_intrusive<c10d::ProcessGroup>(prefixed("group"), world_.rank, world_.world_size)) {
    using Type = c10d::ProcessGroup::BackendType;
    guarded("the start", [&] {
      gloo_ = detail::make_gloo(prefixed("gloo"), world_.rank, world_.world_size, timeout);
      group_->setBackend(c10::DeviceType::CPU, Type::GLOO, gloo_);
      group_->setDefaultBackend(Type::GLOO);
      if (device.is_cuda()) {
        const auto nccl = detail::make_nccl(prefixed("nccl"), world_.rank, world_.world_size, device, timeout);
        group_->setBackend(c10::DeviceType::CUDA, Type::NCCL, nccl);
        group_->setDefaultBackend(Type::NCCL);
        nccl_ = nccl;
        if (world_.world_size > 1) watch_for_failures();
      }
    });
  }
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;
  ~ProcessGroup() {
    watch_.reset();  // it uses the communicator
    if (!nccl_ || given_up_) return;
    try {
      lost() || reported_ ? nccl_->abort() : nccl_->shutdown();
    } catch (const std::exception&) {  // a lost communicator cannot be ended properly
    }
  }

  const World& world() const { return world_; }
  int rank() const { return world_.rank; }
  int world_size() const { return world_.world_size; }
  /// LibTorch's own object, for collectives that are not here.
  const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const { return group_; }
  void set_timeout(std::chrono::milliseconds timeout) { group_->setTimeout(timeout); }
  /// Whether a collective has failed, after which the ranks can no longer meet.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

  /// Begins to add `tensor` up over all ranks, in place.
  Work start_sum(at::Tensor& tensor) {
    return guarded("an all-reduce", [&] {
      std::vector<at::Tensor> tensors{tensor};
      return group_->allreduce(tensors);
    });
  }
  /// Waits for a collective; on CUDA only the current stream does.
  void wait(const Work& work) {
    guarded("an all-reduce", [&] { nccl_ ? static_cast<void>(work->wait()) : wait_on_host(work); });
  }
  void sum(at::Tensor& tensor) { wait(start_sum(tensor)); }
  /// The largest of all ranks' numbers, over the host. `what` names the call, for the error where ranks are at
  /// different ones.
  double max(double value, const char* what = "an agreement") {
    return world_.world_size == 1 ? value : std::ranges::max(meet(what, value));
  }
  /// Every rank's bytes, by rank, over the host; `what` as in `max`.
  std::vector<std::string> gather(const std::string& mine, const char* what = "a gathering") {
    if (world_.world_size == 1) return {mine};
    const auto sizes = meet(what, static_cast<double>(mine.size()));
    const auto longest = static_cast<std::size_t>(std::ranges::max(sizes));
    std::string padded = mine;
    padded.resize(longest);
    const std::string all = longest == 0 ? std::string() : gather_equal(what, padded);
    std::vector<std::string> texts;
    for (std::size_t r = 0; r < sizes.size(); ++r)
      texts.push_back(all.substr(r * longest, static_cast<std::size_t>(sizes[r])));
    return texts;
  }
  /// Overwrites `tensors` with rank 0's, a flat copy a dtype at a time.
  void broadcast(std::vector<at::Tensor> tensors) {
    if (tensors.empty()) return;
    const at::NoGradGuard no_grad;
    std::vector<std::pair<at::Tensor, at::Tensor>> as_bytes;  // of dtypes that a backend may not know
    for (auto& tensor : tensors) {
      if (tensor.scalar_type() == at::kBool) tensor = tensor.view(at::kByte);
      if (is_sent(tensor.scalar_type())) continue;
      const auto flat = tensor.contiguous().view({-1});
      as_bytes.emplace_back(tensor, flat);
      tensor = flat.view(at::kByte);
    }
    constexpr std::size_t at_a_time = 250 << 20;
    guarded("a broadcast", [&] { c10d::broadcast_coalesced(group_, tensors, at_a_time, 0); });
    for (const auto& [tensor, flat] : as_bytes)
      if (!tensor.is_alias_of(flat)) tensor.copy_(flat.view(tensor.sizes()));
  }

  /// Leaves word of why this rank fails, for the others' errors; the first word stays.
  void report_failure(const std::string& text) noexcept {
    reported_ = true;
    if (watch_) watch_->stop();
    try {
      const std::string note = "rank " + std::to_string(world_.rank) + ": " + text;
      store_->compareSet("failure", {}, std::vector<std::uint8_t>(note.begin(), note.end()));
    } catch (const std::exception&) {  // the store may be gone as well
    }
  }
  /// Where all ranks go on after failures that they handled: takes back the word that was left of them.
  void forget_failures(const char* what) {
    if (world_.world_size == 1 || max(reported_ ? 1 : 0, what) == 0) return;
    if (world_.rank == 0) store_->deleteKey("failure");
    max(0, what);  // only then does anyone look again
    if (!std::exchange(reported_, false) || !watch_) return;
    watch_.reset();
    watch_for_failures();
  }
  /// What the first failing rank has reported, or nothing.
  std::string first_failure() const noexcept {
    try {
      if (!store_->check({"failure"})) return {};
      const auto note = store_->get("failure");
      return {note.begin(), note.end()};
    } catch (const std::exception&) {
      return {};
    }
  }
  /// Throws `DistributedError` about `what`, with the first failure that a rank has reported.
  [[noreturn]] void fail(const std::string& what, const std::string& reason) {
    lost_ = true;
    const std::string first = first_failure();
    throw DistributedError(
        "treadle::ProcessGroup: rank " + std::to_string(world_.rank) + " of " + std::to_string(world_.world_size) +
        " lost the others in " + what + " (" + reason + "); " +
        (first.empty() ? "look at the first rank that ended or stood still." : "the first to fail was " + first));
  }

  /// Runs `f`, whose exceptions are taken as failures of `what`.
  template <class F>
  std::invoke_result_t<F> guarded(const char* what, F&& f) {
    try {
      return std::forward<F>(f)();
    } catch (const DistributedError&) {
      throw;
    } catch (const std::exception& error) {
      fail(what, detail::first_line(error.what()));
    }
  }
  /// Whether an exception that came through other code is a collective's.
  static bool is_collective_failure(const std::exception& error) {
    if (dynamic_cast<const c10::DistError*>(&error) != nullptr) return true;
    const std::string_view type = typeid(error).name();  // Gloo's own types are known here by name only
    const std::string_view text = error.what();
    return type.find("gloo") != type.npos || text.find("gloo") != text.npos || text.find("NCCL") != text.npos ||
           text.find("pair closure") != text.npos;
  }

 private:
  /// What a rank brings to a meeting.
  struct Note {
    double value;
    char what[56];
  };
  /// Every rank's number, by rank. Throws `DistributedError`, on every rank, where they have come for different things:
  /// what one then took for an answer would be another question's.
  std::vector<double> meet(const char* what, double value) {
    Note mine{value, {}};
    std::strncpy(mine.what, what, sizeof mine.what - 1);
    const std::string all = gather_equal(what, {reinterpret_cast<const char*>(&mine), sizeof mine});
    std::vector<double> values;
    for (int r = 0; r < world_.world_size; ++r) {
      Note note;
      std::memcpy(&note, all.data() + static_cast<std::size_t>(r) * sizeof note, sizeof note);
      values.push_back(note.value);
      if (std::strncmp(note.what, mine.what, sizeof note.what) == 0) continue;
      lost_ = true;
      note.what[sizeof note.what - 1] = '\0';
      throw DistributedError("treadle::ProcessGroup: rank " + std::to_string(world_.rank) + " is at " + mine.what +
                             " while rank " + std::to_string(r) + " is at " + note.what +
                             "; make the same calls in the same order on all ranks.");
    }
    return values;
  }
  /// The bytes of all ranks, which have equally many, one after the other.
  std::string gather_equal(const char* what, const std::string& mine) {
    const auto size = static_cast<std::int64_t>(mine.size());
    auto one = at::empty({size}, at::kByte);
    std::memcpy(one.mutable_data_ptr(), mine.data(), mine.size());
    auto all = at::empty({world_.world_size * size}, at::kByte);
    guarded(what, [&] { wait_on_host(group_->_allgather_base(all, one)); });
    return {static_cast<const char*>(all.const_data_ptr()), all.nbytes()};
  }
  /// Waits until all have taken part in a collective over Gloo, or another rank has left word that it has failed and
  /// has then had the time to take part in this one: a rank whose process lives on closes no connection.
  void wait_on_host(const Work& work) {
    constexpr std::chrono::milliseconds interval(500);
    const auto done = [&] {
      try {
        work->wait(interval);
      } catch (const std::exception&) {  // not done, or it failed: what is thrown says not which
      }
      return work->isCompleted();
    };
    for (bool told = false; !done(); told = !reported_ && !first_failure().empty())
      if (told) {
        leave_behind(gloo_);
        throw std::runtime_error("one has failed");
      }
    work->wait();
  }
  /// Never destroys `backend`: its destructor would wait for the collective that nobody ends.
  static void leave_behind(const c10::intrusive_ptr<c10d::Backend>& backend) {
    static auto* const left = new std::vector<c10::intrusive_ptr<c10d::Backend>>;  // outlives all static destructors
    left->push_back(backend);
  }
  /// Gloo ends waiting when a connection closes, as that of a rank that ends does. Kernels of NCCL on one host wait for
  /// memory that no one writes to any more, until the timeout: so the communicator is given up where a rank has left
  /// word, after which the device goes on, and what the host asks for next throws.
  void watch_for_failures() {
    using std::chrono::milliseconds;
    const auto interval = std::max(milliseconds(500), milliseconds(2) * world_.world_size);  // the store serves all
    watch_.emplace(store_, "failure", interval, milliseconds(1000), [this] {
      lost_ = given_up_ = true;
      nccl_->abort();
    });
  }
  /// Whether Gloo and NCCL both know it.
  static bool is_sent(at::ScalarType dtype) {
    switch (dtype) {
      case at::kFloat:
      case at::kDouble:
      case at::kHalf:
      case at::kBFloat16:
      case at::kLong:
      case at::kInt:
      case at::kByte:
      case at::kChar:
        return true;
      default:
        return false;
    }
  }
  c10::intrusive_ptr<c10d::Store> prefixed(const char* name) const {
    return c10::make_intrusive<c10d::PrefixStore>(name, store_);
  }

  World world_;
  Store store_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Backend> nccl_;
  std::atomic<bool> lost_ = false;
  std::atomic<bool> given_up_ = false;  // by the watch
  bool reported_ = false;
  std::optional<detail::FailureWatch> watch_;
};

}  // namespace v0_1
}  // namespace treadle
