// SPDX-License-Identifier: Apache-2.0
// One pass through a loader, and where a loader stands between passes.
#pragma once

#include <cstddef>
#include <cstdint>
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
template <class Work>
class PassIterator {
 public:
  using iterator_concept = std::input_iterator_tag;
  using iterator_category = std::input_iterator_tag;
  using value_type = typename treadle::detail::Pipeline<Work>::Result;
  using difference_type = std::ptrdiff_t;
  using reference = const value_type&;
  using pointer = const value_type*;

  PassIterator() = default;
  PassIterator(Work work, const LoaderOptions& options, std::int64_t batches, std::shared_ptr<Position> place)
      : pass_(std::make_shared<Pass>(std::move(work), options, batches, std::move(place))) {
    pass_->fetch();
  }

  reference operator*() const { return *pass_->batch; }
  pointer operator->() const { return &*pass_->batch; }
  PassIterator& operator++() {
    pass_->fetch();
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const PassIterator& it, std::default_sentinel_t) { return !it.pass_ || !it.pass_->batch; }

  /// Random numbers for each row of this batch that depend on the row's sample, the seed and the epoch alone, and are
  /// others than those that `get` and transforms of samples are given.
  std::vector<KeyedGenerator> generators() const {
    return pass_->pipeline.work().generators(pass_->index - 1, treadle::rows(*pass_->batch));
  }

 private:
  struct Pass {
    Pass(Work work, const LoaderOptions& options, std::int64_t batch_count, std::shared_ptr<Position> where)
        : pipeline(std::move(work), options.workers, options.depth()),
          batches(batch_count),
          place(std::move(where)),
          epoch(place->epoch),
          index(place->batch) {}

    void fetch() {
      if (ended) return;
      ended = true;   // a batch that cannot be made ends the pass, whose position stays in front of it
      batch.reset();  // before the next one is asked for, so that its memory may be used again
      batch = pipeline.next();
      ended = !batch;
      if (batch) place->batch = ++index;
      if (index == batches || ended) *place = {epoch + 1, 0};
    }

    treadle::detail::Pipeline<Work> pipeline;
    std::int64_t batches;  // -1: not known
    std::shared_ptr<Position> place;
    std::int64_t epoch;
    std::int64_t index;  // of the batch that comes next
    bool ended = false;
    std::optional<value_type> batch;
  };

  std::shared_ptr<Pass> pass_;
};

}  // namespace data

namespace detail {

/// Which epoch, and which batch of it, a loader gives next.
class Turns {
 public:
  Turns() = default;
  Turns(const Turns& other) : next_(other.next_) {
    if (other.at_) at_ = std::make_shared<data::Position>(*other.at_);
  }
  Turns(Turns&&) = default;
  Turns& operator=(Turns other) {
    next_ = other.next_;
    at_ = std::move(other.at_);
    return *this;
  }
  ~Turns() = default;

  data::Position start() const { return next_; }
  /// Begins the pass of `start()`, and gives the place where it says how far it is.
  std::shared_ptr<data::Position> begin_pass() {
    at_ = std::make_shared<data::Position>(next_);
    next_ = {next_.epoch + 1, 0};
    return at_;
  }
  template <class Work>
  data::PassIterator<Work> begin(Work work, const data::LoaderOptions& options, std::int64_t batches) {
    return {std::move(work), options, batches, begin_pass()};
  }

  void set_epoch(std::int64_t epoch) {
    if (epoch != next_.epoch) next_ = {epoch, 0};
    at_.reset();
  }
  data::Position position() const { return at_ ? *at_ : next_; }
  /// `batches` of an epoch; -1: not known.
  void seek(data::Position position, std::int64_t batches) {
    if (position.epoch < 0 || position.batch < 0 || (batches >= 0 && position.batch > batches))
      throw ConfigError("data::Loader: batch " + std::to_string(position.batch) + " of epoch " +
                        std::to_string(position.epoch) + " was sought, and an epoch has " +
                        (batches < 0 ? "no batches of negative numbers" : std::to_string(batches) + " batches") +
                        "; seek what position() gave for the same data and options.");
    next_ = position.batch == batches ? data::Position{position.epoch + 1, 0} : position;
    at_.reset();
  }

 private:
  data::Position next_;
  std::shared_ptr<data::Position> at_;  // of the pass that began last
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
