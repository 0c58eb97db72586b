// SPDX-License-Identifier: Apache-2.0
// Batches of a stream: a data set that is gone through from its beginning.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/collate.hpp"
#include "treadle/data/dataset.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/make_batch.hpp"
#include "treadle/data/pass.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/data/random.hpp"
#include "treadle/data/ready.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

template <class S, class Collate>
struct StreamParts {
  std::shared_ptr<const S> stream;
  data::LoaderOptions options;
  Collate collate;
};

/// Makes the batches of a pass over a stream: it is read in order by whoever's turn it is, and the rest is done at
/// once.
template <class Stream, class Parts>
class StreamWork {
  using Reader = std::remove_cvref_t<decltype(std::declval<const Stream&>().open(0))>;
  using Read = ReadBy<Stream>;

 public:
  struct Job {
    std::int64_t batch = 0;
    std::vector<std::pair<std::int64_t, Read>> samples;  // with their numbers in the stream
  };

  StreamWork(std::shared_ptr<const Parts> parts, data::Position start)
      : parts_(std::move(parts)), epoch_(start.epoch), first_(start.batch), next_(start.batch) {}

  std::optional<Job> claim() {
    const data::LoaderOptions& options = parts_->options;
    if (ended_) return std::nullopt;
    Job job{.batch = next_++, .samples = {}};
    return guarded(
        [&]() -> std::optional<Job> {
          if (!reader_) open();
          bool whole = true;
          for (std::int64_t i = 0; whole && i < options.batch_size; ++i) {
            std::optional<std::pair<std::int64_t, Read>> own;
            for (int rank = 0; whole && rank < options.world_size; ++rank) {
              auto read = reader_->next();
              whole = static_cast<bool>(read);
              if (whole && rank == options.rank) own.emplace(number_, std::move(*read));
              number_ += whole;
            }
            if (own && (whole || options.ends == data::RaggedEnds::Join)) job.samples.push_back(std::move(*own));
          }
          ended_ = !whole;
          if (job.samples.empty() || (!whole && options.drop_last)) return std::nullopt;
          return std::move(job);
        },
        [&] { return "what follows sample " + std::to_string(number_ - 1) + " of the stream"; });
  }

  auto make(Job job, const std::atomic<bool>& stop) const {
    using Sample = data::sample_of<Stream>;
    const at::NoGradGuard no_grad;
    const BatchName name{job.batch, epoch_};
    std::vector<Sample> samples;
    samples.reserve(job.samples.size());
    for (auto& [number, read] : job.samples) {
      if (stop.load(std::memory_order_relaxed)) throw Abandoned{};
      guarded(
          [&, &raw = read, at = number] {
            data::KeyedGenerator random(parts_->options.seed, epoch_, at);
            samples.push_back(prepare_sample(*parts_->stream, std::move(raw), random));
          },
          [&, at = number] { return name.sample(at); });
    }
    Made made{collate_batch(parts_->collate, std::span<const Sample>(samples), pin_, name,
                            [&](std::int64_t i) { return job.samples[static_cast<std::size_t>(i)].first; })};
    if (pin_) pin(made.batch);
    if (parts_->options.workers > 0) made.ready.mark(made.batch);
    return made;
  }
  template <class B>
  void arrive(Made<B>& made) const {
    made.ready.arrive(made.batch);
  }
  template <class B>
  void leave(Made<B>&) const {}

  /// Random numbers for the rows of batch `k`, for who changes batches; no more rows than a whole batch has.
  template <class B>
  std::vector<data::KeyedGenerator> generators(std::int64_t k, const Made<B>& made) const {
    const data::LoaderOptions& options = parts_->options;
    std::vector<data::KeyedGenerator> all;
    const std::int64_t rows = treadle::rows(made.batch);
    for (std::int64_t i = 0; i < rows; ++i)
      all.emplace_back(options.seed ^ for_batches, epoch_,
                       (k * options.batch_size + i) * options.world_size + options.rank);
    return all;
  }

 private:
  void open() {
    reader_.emplace(parts_->stream->open(epoch_));
    const std::int64_t behind = first_ * parts_->options.batch_size * parts_->options.world_size;
    if constexpr (requires { reader_->skip(behind); }) {
      reader_->skip(behind);
      number_ = behind;
    } else {
      while (number_ < behind && reader_->next()) ++number_;
    }
  }

  std::shared_ptr<const Parts> parts_;
  std::int64_t epoch_;
  std::int64_t first_;
  std::int64_t next_;
  std::int64_t number_ = 0;  // of the sample that is read next
  bool ended_ = false;
  std::optional<Reader> reader_;
  bool pin_ = parts_->options.pin_memory && cuda_available();
};

}  // namespace detail

namespace data {

/// Batches of a stream: an input range that gives an epoch each time it is gone through, and that may be left early.
///
/// All is as with `Loader`, but for what needs a known size: there is no `size()`, no sampler and no `shuffle` (a
/// stream may change its order with the epoch that it is opened for), and `RaggedEnds::Pad` is refused. Every rank
/// reads the whole stream and keeps its samples. `seek` makes the next pass skip samples, by the reader's `skip(n)` or
/// else by reading them. Where a stream ends is not known before it is reached: `position()` may stand behind the last
/// batch, and the pass from there gives nothing.
///
/// Throws `ConfigError` for options that cannot be.
template <stream_dataset S, class CollateFunction = Collate>
class StreamLoader {
  using Parts = treadle::detail::StreamParts<S, CollateFunction>;
  using Work = treadle::detail::StreamWork<S, Parts>;

 public:
  using Iterator = PassIterator<Work>;

  explicit StreamLoader(S stream, LoaderOptions options = {}, CollateFunction collate = {})
      : StreamLoader(Parts{std::make_shared<const S>(std::move(stream)), options, std::move(collate)}) {}

  /// Begins the next epoch, or where `seek` said.
  Iterator begin() {
    return turns_.begin(Work(parts_, turns_.start()), parts_->options.workers, parts_->options.depth(), -1);
  }
  std::default_sentinel_t end() const { return {}; }

  /// Makes `epoch` the one that the next `begin` gives.
  void set_epoch(std::int64_t epoch) { turns_.set_epoch(epoch); }
  /// Which batch comes next: of the pass that began last, behind what it has given.
  Position position() const { return turns_.position(); }
  /// Makes the next `begin` start at `position`. Throws `ConfigError` for one that has no sample in any stream.
  void seek(Position position) {
    const LoaderOptions& options = parts_->options;
    std::int64_t samples = 0;
    if (__builtin_mul_overflow(position.batch, options.batch_size, &samples) ||
        __builtin_mul_overflow(samples, std::int64_t{options.world_size}, &samples))
      throw ConfigError("data::StreamLoader: batch " + std::to_string(position.batch) +
                        " was sought, before which there would be more than 2^63 samples; seek what position() gave "
                        "for the same data and options.");
    turns_.seek(position, -1);
  }
  /// Where `seek` said that the next pass begins; none where it begins an epoch as ever.
  std::optional<Position> sought() const { return turns_.sought(); }

  const LoaderOptions& options() const { return parts_->options; }
  /// What to change where it is too slow.
  std::string advice() const { return loading_advice(parts_->options); }
  /// The same loader with other options; both share the stream.
  StreamLoader with(LoaderOptions options) const {
    return StreamLoader(Parts{parts_->stream, options, parts_->collate});
  }

 private:
  explicit StreamLoader(Parts parts) : parts_(std::make_shared<const Parts>(std::move(parts))) {
    const LoaderOptions& options = parts_->options;
    options.check("data::StreamLoader");
    static_cast<void>(Shard(0, options.rank, options.world_size, options.ends));  // which checks the rank
    if (options.shuffle)
      throw ConfigError(
          "data::StreamLoader: a stream cannot be shuffled by its loader; let its open(epoch) change the order.");
    if (options.ends == RaggedEnds::Pad)
      throw ConfigError(
          "data::StreamLoader: RaggedEnds::Pad needs a data set whose beginning can be had again; use Join or Drop.");
  }

  std::shared_ptr<const Parts> parts_;
  treadle::detail::Turns turns_;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
