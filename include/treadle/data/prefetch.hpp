// SPDX-License-Identifier: Apache-2.0
// Batches brought to a device ahead of their use, on a thread and a stream of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/data/copy_ring.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/pass.hpp"
#include "treadle/data/random.hpp"
#include "treadle/error.hpp"
#include "treadle/loader.hpp"
#include "treadle/runtime/device.hpp"
#include "treadle/runtime/rank_device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A batch on its way.
template <class B>
struct Sent {
  B batch;
  std::optional<c10::Event> arrived{};
  std::vector<data::KeyedGenerator> generators{};
};

/// Takes batches from a loader and sends them to the device; one thread does so.
template <class Range>
class PrefetchWork {
 public:
  using Batch = std::remove_cvref_t<decltype(*std::declval<Range&>().begin())>;

  PrefetchWork(Range& loader, std::shared_ptr<CopyRing> ring) : loader_(&loader), ring_(std::move(ring)) {}

  std::optional<Sent<Batch>> claim() {
    if (pass_)
      ++pass_->it;
    else  // here, so that all of the loader's work on a device is that of one thread
      pass_.emplace(Pass{loader_->begin(), loader_->end()});
    auto& it = pass_->it;
    if (!(it != pass_->end)) return std::nullopt;
    Sent<Batch> sent{.batch = *it};
    if constexpr (requires { it.generators(); }) sent.generators = it.generators();
    return sent;
  }
  Sent<Batch> make(Sent<Batch> sent, const std::atomic<bool>& stop) const {
    if (ring_) sent.arrived.emplace(ring_->copy(sent.batch, stop));
    return sent;
  }
  void cancel() const {
    if constexpr (requires { pass_->it.cancel(); })
      if (pass_) pass_->it.cancel();
  }
  void arrive(Sent<Batch>& sent) const {
    if (sent.arrived) ring_->arrive(sent.batch, *sent.arrived);
  }
  void leave(Sent<Batch>&) const {
    if (ring_) ring_->release();
  }
  std::vector<data::KeyedGenerator> generators(std::int64_t, const Sent<Batch>& sent) const { return sent.generators; }

 private:
  struct Pass {
    decltype(std::declval<Range&>().begin()) it;
    decltype(std::declval<Range&>().end()) end;
  };

  Range* loader_;  // until the first batch
  std::optional<Pass> pass_;
  std::shared_ptr<CopyRing> ring_;
};

}  // namespace detail

namespace data {

struct PrefetchOptions {
  std::optional<at::Device> device{};  ///< none: that of this rank of the job, as DistributedDataParallel's
  int depth = 2;                       ///< batches that are under way or there, beside the one in use
};

/// A loader whose batches are on the device when they are asked for: see `prefetch`. `L` may be a reference.
template <class L>
class Prefetched {
  using Range = std::remove_reference_t<L>;
  using Work = treadle::detail::PrefetchWork<Range>;

 public:
  explicit Prefetched(L&& loader, PrefetchOptions options)
      : loader_(std::forward<L>(loader)),
        device_(options.device ? resolve_device(options.device) : rank_device()),
        depth_(options.depth) {
    if (depth_ < 1) throw ConfigError("data::prefetch: depth must be at least 1 batch.");
    if constexpr (resumable<Range>) turns_ = turns_of_loader();
  }

  using Iterator = PassIterator<Work>;

  Iterator begin() {
    if constexpr (resumable<Range>) loader_.seek(turns_.start());
    auto place = turns_.begin_pass();
    return Iterator(Work(loader_, ring_.for_pass(device_, depth_)), /*workers=*/1, depth_,
                    treadle::detail::batches_of(loader_), std::move(place));
  }
  std::default_sentinel_t end() const { return {}; }

  std::int64_t size() const requires sized_loader<Range> { return loader_.size(); }
  void set_epoch(std::int64_t epoch) requires reseedable_loader<Range> {
    loader_.set_epoch(epoch);
    turns_.set_epoch(epoch);
  }
  /// Which batch comes next, whatever was fetched ahead.
  Position position() const requires resumable<Range> { return turns_.position(); }
  void seek(Position position) requires resumable<Range> {
    loader_.seek(position);
    turns_.seek(loader_.position(), -1);
  }
  auto sought() const requires resumable<Range> { return turns_.sought(); }
  const auto& options() const requires requires(const Range& r) { r.options(); }
  { return loader_.options(); }
  std::string advice() const requires requires(const Range& r) { r.advice(); }
  { return loader_.advice(); }
  at::Device device() const { return device_; }

 private:
  /// Those with which the loader itself would begin its next pass.
  treadle::detail::Turns turns_of_loader() const {
    const Position position = loader_.position();
    if constexpr (requires { loader_.sought(); }) {
      const bool sought = static_cast<bool>(loader_.sought());
      const bool left = !sought && position.batch > 0;  // in the middle of a pass: a new one is a new epoch
      return treadle::detail::Turns(left ? Position{position.epoch + 1, 0} : position, sought);
    } else {
      return treadle::detail::Turns(position, false);
    }
  }

  L loader_;
  at::Device device_;
  int depth_;
  treadle::detail::Turns turns_;
  treadle::detail::RingOfLoader ring_;
};

/// `loader` with its batches brought to `options.device` by a thread and on a stream of their own, while the device
/// computes: asking for a batch makes the current stream wait for its copy, and calls nothing that waits for the
/// device. The host waits for the loader, and, where it is `depth` + 1 batches ahead of the device, until that is done
/// with one.
///
/// Any range of batches will do. It is kept by reference if it has a name, and is used by the other thread as long as a
/// pass lives. What is not page-locked is copied through a ring of max(2, depth) page-locked batches; on the device are
/// at most depth + 2 batches that Treadle keeps, however far the host runs ahead. On a CPU batches are only fetched
/// ahead.
template <class L>
Prefetched<L> prefetch(L&& loader, PrefetchOptions options = {}) {
  return Prefetched<L>(std::forward<L>(loader), options);
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
