// SPDX-License-Identifier: Apache-2.0
// One pass through a loader, and where a loader stands between passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/data/random.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Goes through one pass; copies go through it together. It outlives its loader, and its threads end with its last
/// copy.
///
/// `Work` is one for a `Pipeline`, whose results have a `batch`. It also has `arrive(result)` and `leave(result)`,
/// const, which the thread that goes through the pass calls before and after it uses a result, and `generators(k,
/// result)`.
template <class Work>
class PassIterator {
  using Result = typename treadle::detail::Pipeline<Work>::Result;

 public:
  using iterator_concept = std::input_iterator_tag;
  using iterator_category = std::input_iterator_tag;
  using value_type = decltype(Result::batch);
  using difference_type = std::ptrdiff_t;
  using reference = const value_type&;
  using pointer = const value_type*;

  PassIterator() = default;
  PassIterator(Work work, int workers, int depth, std::int64_t batches, std::shared_ptr<Position> place)
      : pass_(std::make_shared<Pass>(std::move(work), workers, depth, batches, std::move(place))) {
    pass_->fetch();
  }

  reference operator*() const { return pass_->made->batch; }
  pointer operator->() const { return &pass_->made->batch; }
  PassIterator& operator++() {
    pass_->fetch();
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const PassIterator& it, std::default_sentinel_t) { return !it.pass_ || !it.pass_->made; }

  /// Which batch this is.
  Position at() const { return {pass_->epoch, pass_->index - 1}; }
  /// Whether no batch follows this one. Where the loader does not know its size, the next one is waited for, and kept;
  /// the loader's position stays behind this one, and a fault of the next one is thrown when it is its turn.
  bool is_last() const { return pass_->is_last(); }
  /// Random numbers for each row of this batch that depend on the row's sample, the seed and the epoch alone, and are
  /// others than those that `get` and transforms of samples are given.
  std::vector<KeyedGenerator> generators() const {
    return pass_->pipeline.work().generators(pass_->index - 1, *pass_->made);
  }
  /// From any thread: lets one that waits for a batch of this pass give up. No further batch comes.
  void cancel() const {
    if (pass_) pass_->pipeline.cancel();
  }

 private:
  struct Pass {
    Pass(Work work, int workers, int depth, std::int64_t batch_count, std::shared_ptr<Position> where)
        : pipeline(std::move(work), workers, depth),
          batches(batch_count),
          place(std::move(where)),
          epoch(place->epoch),
          index(place->batch) {}

    void fetch() {
      if (ended) return;
      ended = true;  // a batch that cannot be made ends the pass, whose position stays in front of it
      if (made) pipeline.work().leave(*made);
      made.reset();  // before the next one is asked for, so that its memory may be used again
      made = looked ? looked_at() : pipeline.next();
      ended = !made;
      if (made) {
        pipeline.work().arrive(*made);
        place->batch = ++index;
      }
      if (index == batches || ended) *place = {epoch + 1, 0};
    }
    bool is_last() {
      if (batches >= 0) return index == batches;
      if (!std::exchange(looked, true)) try {
          ahead = pipeline.next();
        } catch (...) {
          error = std::current_exception();
        }
      return !ahead && !error;
    }
    std::optional<Result> looked_at() {
      looked = false;
      if (error) std::rethrow_exception(std::exchange(error, nullptr));
      return std::exchange(ahead, std::nullopt);
    }

    treadle::detail::Pipeline<Work> pipeline;
    std::int64_t batches;  // -1: not known
    std::shared_ptr<Position> place;
    std::int64_t epoch;
    std::int64_t index;  // of the batch that comes next
    bool ended = false;
    std::optional<Result> made;
    bool looked = false;  // whether the next batch was asked for: it is `ahead`, or its fault, or there is none
    std::optional<Result> ahead;
    std::exception_ptr error;
  };

  std::shared_ptr<Pass> pass_;
};

}  // namespace data

namespace detail {

/// Which epoch, and which batch of it, a loader gives next.
class Turns {
 public:
  Turns() = default;
  explicit Turns(data::Position next, bool sought) : next_(next), sought_(sought) {}
  Turns(const Turns& other) : next_(other.next_), sought_(other.sought_) {
    if (other.at_) at_ = std::make_shared<data::Position>(*other.at_);
  }
  Turns(Turns&&) = default;
  Turns& operator=(Turns other) {
    next_ = other.next_;
    sought_ = other.sought_;
    at_ = std::move(other.at_);
    return *this;
  }
  ~Turns() = default;

  data::Position start() const { return next_; }
  /// Begins the pass of `start()`, and gives the place where it says how far it is.
  std::shared_ptr<data::Position> begin_pass() {
    at_ = std::make_shared<data::Position>(next_);
    next_ = {next_.epoch + 1, 0};
    sought_ = false;
    return at_;
  }
  template <class Work>
  data::PassIterator<Work> begin(Work work, int workers, int depth, std::int64_t batches) {
    auto place = begin_pass();
    return {std::move(work), workers, depth, batches, std::move(place)};
  }

  void set_epoch(std::int64_t epoch) {
    if (epoch != next_.epoch) {
      next_ = {epoch, 0};
      sought_ = false;
    }
    at_.reset();
  }
  /// Where `seek` said that the next pass begins, if it is to begin there.
  std::optional<data::Position> sought() const { return sought_ ? std::optional(next_) : std::nullopt; }
  data::Position position() const { return at_ ? *at_ : next_; }
  /// `batches` of an epoch; -1: not known.
  void seek(data::Position position, std::int64_t batches) {
    if (position.epoch < 0 || position.batch < 0 || (batches >= 0 && position.batch > batches))
      throw ConfigError("data::Loader: batch " + std::to_string(position.batch) + " of epoch " +
                        std::to_string(position.epoch) + " was sought, and an epoch has " +
                        (batches < 0 ? "no batches of negative numbers" : std::to_string(batches) + " batches") +
                        "; seek what position() gave for the same data and options.");
    next_ = position.batch == batches ? data::Position{position.epoch + 1, 0} : position;
    sought_ = true;
    at_.reset();
  }

 private:
  data::Position next_;
  bool sought_ = false;
  std::shared_ptr<data::Position> at_;  // of the pass that began last
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
