// SPDX-License-Identifier: Apache-2.0
// Batches of a map-style data set, made by threads ahead of their use, in an order that they do not change.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
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
#include "treadle/data/epoch_plan.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/make_batch.hpp"
#include "treadle/data/pass.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/data/random.hpp"
#include "treadle/data/ready.hpp"
#include "treadle/data/sampler.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What a pass needs of its loader; passes and the loader share it, and no one changes it.
template <class D, class Sampler, class Collate>
struct LoaderParts {
  std::shared_ptr<const D> dataset;
  data::LoaderOptions options;
  Sampler sampler;
  Collate collate;
};

/// Makes the batches of a pass over a map-style data set.
template <class Parts>
class MapWork {
 public:
  MapWork(std::shared_ptr<const Parts> parts, data::Position start)
      : parts_(std::move(parts)),
        plan_(static_cast<std::int64_t>(parts_->dataset->size()), parts_->options, parts_->sampler, start.epoch),
        next_(start.batch) {
    if constexpr (requires { parts_->dataset->device(); }) plan_.move_to(parts_->dataset->device());
  }

  std::optional<std::int64_t> claim() {
    return next_ < plan_.batches() ? std::optional<std::int64_t>(next_++) : std::nullopt;
  }

  auto make(std::int64_t k, const std::atomic<bool>& stop) const {
    const at::NoGradGuard no_grad;
    Made made{collated(k, stop)};
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

  /// Random numbers for the rows of batch `k`, for who changes batches.
  template <class B>
  std::vector<data::KeyedGenerator> generators(std::int64_t k, const Made<B>& made) const {
    const data::Rows rows = plan_.rows(k);
    std::vector<data::KeyedGenerator> all;
    for (std::int64_t i = 0; i < std::min(rows.size(), treadle::rows(made.batch)); ++i)
      all.push_back(plan_.generator(k, i, rows[i], for_batches));
    return all;
  }

  const EpochPlan& plan() const { return plan_; }

 private:
  using Dataset = std::remove_cvref_t<decltype(*std::declval<Parts&>().dataset)>;

  auto collated(std::int64_t k, const std::atomic<bool>& stop) const {
    const data::Rows rows = plan_.rows(k);
    const BatchName name{k, plan_.epoch()};
    if constexpr (gives_batches<Dataset>) {
      return guarded([&] { return parts_->dataset->get_batch(rows); }, [&] { return name.text(); });
    } else {
      using Sample = data::sample_of<Dataset>;
      const auto number = [&](std::int64_t i) { return rows[i]; };
      std::vector<Sample> samples;
      samples.reserve(static_cast<std::size_t>(rows.size()));
      for (std::int64_t i = 0; i < rows.size(); ++i) {
        if (stop.load(std::memory_order_relaxed)) throw Abandoned{};
        guarded(
            [&] {
              auto random = plan_.generator(k, i, rows[i]);
              samples.push_back(get_sample(*parts_->dataset, rows[i], random));
            },
            [&] { return name.sample(rows[i]); });
      }
      return collate_batch(parts_->collate, std::span<const Sample>(samples), pin_, name, number);
    }
  }

  std::shared_ptr<const Parts> parts_;
  EpochPlan plan_;
  std::int64_t next_;
  bool pin_ = parts_->options.pin_memory && cuda_available();
};

template <class D>
consteval bool is_map_dataset() {
  static_assert(data::map_dataset<D>,
                "treadle::data::Loader: what was given is no data set; a data set has size() const, and get(i) const, "
                "get(i, random) const or get_batch(rows) const.");
  return data::map_dataset<D>;
}
template <class S>
consteval bool is_sampler() {
  static_assert(
      data::sampler<S>,
      "treadle::data::Loader: what was given is no sampler; a sampler has draws(rows) const and order(request) "
      "const, such as data::Weighted.");
  return data::sampler<S>;
}

}  // namespace detail

namespace data {

/// Batches of a map-style data set: an input range that gives an epoch each time it is gone through, and that may be
/// left early.
///
/// The order is a pure function of (seed, epoch), each sample's random numbers one of (seed, epoch, sample), and no
/// default generator is touched: neither `workers` nor the number of ranks changes what is given. The first pass is
/// epoch 0, each further one the next; `set_epoch` chooses, `seek` goes to any batch. Over several ranks all go through
/// the same order and rank r takes its rows r, r + world_size and so on: batch k of a rank is its part of batch k of
/// the job.
///
/// With `workers`, each pass has that many threads; `options.depth()` batches are in the making or ready at once,
/// beside the one in use. Leaving early waits for the samples that are being made. What a data set throws arrives as
/// `DataError` in its place in the order, with its text and the sample's number (the original is nested in it), and
/// ends the pass; the loader can be used on.
///
/// Throws `ConfigError` for options that cannot be.
template <class D, class Sampler = EveryRow, class CollateFunction = Collate>
requires(treadle::detail::is_map_dataset<D>() && treadle::detail::is_sampler<Sampler>()) class Loader {
  using Parts = treadle::detail::LoaderParts<D, Sampler, CollateFunction>;
  using Work = treadle::detail::MapWork<Parts>;

 public:
  using Iterator = PassIterator<Work>;

  explicit Loader(D dataset, LoaderOptions options = {}, Sampler sampler = {}, CollateFunction collate = {})
      : Loader(Parts{std::make_shared<const D>(std::move(dataset)), options, std::move(sampler), std::move(collate)}) {}

  /// Begins the next epoch, or where `seek` said.
  Iterator begin() {
    return turns_.begin(Work(parts_, turns_.start()), parts_->options.workers, parts_->options.depth(), size());
  }
  std::default_sentinel_t end() const { return {}; }

  /// Batches of a whole epoch on this rank.
  std::int64_t size() const { return shard().batches(parts_->options.batch_size, parts_->options.drop_last); }
  /// Rows of the data set, those of all ranks.
  std::int64_t rows() const { return static_cast<std::int64_t>(parts_->dataset->size()); }
  /// Rows of this rank in an epoch.
  std::int64_t own_rows() const { return shard().size(); }
  /// Makes `epoch` the one that the next `begin` gives.
  void set_epoch(std::int64_t epoch) { turns_.set_epoch(epoch); }
  /// Which batch comes next: of the pass that began last, behind what it has given.
  Position position() const { return turns_.position(); }
  /// Makes the next `begin` start at `position`. Throws `ConfigError` for one that no epoch of this loader has.
  void seek(Position position) { turns_.seek(position, size()); }
  /// Where `seek` said that the next pass begins; none where it begins an epoch as ever.
  std::optional<Position> sought() const { return turns_.sought(); }

  /// This rank's row numbers in the order of `epoch`, int64 `[own_rows]` on the data set's device; undefined where that
  /// is all rows as they lie.
  at::Tensor order(std::int64_t epoch) const { return Work(parts_, {epoch, 0}).plan().order(); }

  const D& dataset() const { return *parts_->dataset; }
  const LoaderOptions& options() const { return parts_->options; }
  /// What to change where it is too slow.
  std::string advice() const { return loading_advice(parts_->options); }
  /// The same loader with other options; both share the data set.
  Loader with(LoaderOptions options) const {
    return Loader(Parts{parts_->dataset, options, parts_->sampler, parts_->collate});
  }

 private:
  explicit Loader(Parts parts) : parts_(std::make_shared<const Parts>(std::move(parts))) {
    parts_->options.check("data::Loader");
    static_cast<void>(shard());  // which checks the rank
  }
  Shard shard() const { return treadle::detail::EpochPlan::shard(rows(), parts_->options, parts_->sampler); }

  std::shared_ptr<const Parts> parts_;
  treadle::detail::Turns turns_;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
