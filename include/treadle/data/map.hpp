// SPDX-License-Identifier: Apache-2.0
// Functions of samples and of batches, put behind data sets and loaders.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/dataset.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/data/random.hpp"
#include "treadle/error.hpp"
#include "treadle/loader.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

template <class T>
concept has_data = requires(T& t) {
  { t.data } -> std::same_as<at::Tensor&>;
};

/// `f` of `value`, or of its `data`; with `random` where it takes that.
template <class F, class T, class Random>
auto apply_transform(const F& f, T&& value, Random& random) {
  if constexpr (std::invocable<const F&, T, Random&>) {
    return f(std::forward<T>(value), random);
  } else if constexpr (std::invocable<const F&, T>) {
    return f(std::forward<T>(value));
  } else {
    static_assert(
        has_data<T> && (std::invocable<const F&, at::Tensor, Random&> || std::invocable<const F&, at::Tensor>),
        "treadle::data::map: a function takes neither the sample (or batch) nor its data; it must be callable, "
        "as a const object, with one of them, and perhaps with random numbers after it.");
    if constexpr (std::invocable<const F&, at::Tensor, Random&>)
      value.data = f(std::move(value.data), random);
    else
      value.data = f(std::move(value.data));
    return std::remove_cvref_t<T>(std::move(value));
  }
}
template <class T, class Random>
auto apply_transforms(T&& value, Random&) {
  return std::remove_cvref_t<T>(std::forward<T>(value));
}
template <class T, class Random, class F, class... Fs>
auto apply_transforms(T&& value, Random& random, const F& f, const Fs&... fs) {
  return apply_transforms(apply_transform(f, std::forward<T>(value), random), random, fs...);
}

}  // namespace detail

namespace data {

/// A data set, or a stream, whose samples go through functions, one after the other: see `map`.
template <class D, class... Fs>
class Mapped {
 public:
  explicit Mapped(D dataset, Fs... fs) : dataset_(std::move(dataset)), fs_(std::move(fs)...) {}

  std::int64_t size() const requires treadle::detail::sized_set<D> { return dataset_.size(); }
  auto get(std::int64_t i, KeyedGenerator& random) const
      requires(treadle::detail::gives_samples<D> || treadle::detail::gives_random_samples<D>) {
    return through(treadle::detail::get_sample(dataset_, i, random), random);
  }
  auto open(std::int64_t epoch) const requires stream_dataset<D> { return dataset_.open(epoch); }
  template <class Read>
  auto prepare(Read&& read, KeyedGenerator& random) const requires stream_dataset<D> {
    return through(treadle::detail::prepare_sample(dataset_, std::forward<Read>(read), random), random);
  }

  const D& dataset() const { return dataset_; }

 private:
  template <class S>
  auto through(S&& sample, KeyedGenerator& random) const {
    return std::apply(
        [&](const Fs&... fs) { return treadle::detail::apply_transforms(std::forward<S>(sample), random, fs...); },
        fs_);
  }

  D dataset_;
  std::tuple<Fs...> fs_;
};

/// `dataset` with its samples put through `fs`, in order, by whoever makes them: a loader's workers.
///
/// A function takes the sample or its `data`, perhaps with the sample's `KeyedGenerator` after it, and returns what
/// takes its place. It is called from several threads at once.
template <class D, class... Fs>
Mapped<D, Fs...> map(D dataset, Fs... fs) {
  return Mapped<D, Fs...>(std::move(dataset), std::move(fs)...);
}

/// A loader whose batches go through functions, one after the other: see `map_batches`. `L` may be a reference.
template <class L, class... Fs>
class MappedLoader {
  using Range = std::remove_reference_t<L>;
  using Inner = decltype(std::declval<Range&>().begin());
  using Functions = std::tuple<Fs...>;

 public:
  explicit MappedLoader(L&& loader, Fs... fs)
      : loader_(std::forward<L>(loader)), fs_(std::make_shared<const Functions>(std::move(fs)...)) {}

  /// Goes through one pass; it may outlive the `MappedLoader` as far as the loader's own iterator does.
  class Iterator {
    struct Pass {
      Inner it;
      decltype(std::declval<Range&>().end()) end;
    };
    static auto through(const Functions& all, auto batch, std::span<KeyedGenerator> random) {
      return std::apply(
          [&](const Fs&... fs) { return treadle::detail::apply_transforms(std::move(batch), random, fs...); }, all);
    }
    using Given = std::remove_cvref_t<decltype(*std::declval<Inner&>())>;

   public:
    using iterator_concept = std::input_iterator_tag;
    using iterator_category = std::input_iterator_tag;
    using value_type =
        decltype(through(std::declval<const Functions&>(), std::declval<Given>(), std::span<KeyedGenerator>()));
    using difference_type = std::ptrdiff_t;
    using reference = const value_type&;
    using pointer = const value_type*;

    Iterator() = default;
    reference operator*() const {
      if (!batch_) make();
      return *batch_;
    }
    pointer operator->() const { return &**this; }
    Iterator& operator++() {
      batch_.reset();
      ++pass_->it;
      ++number_;
      arrived();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) { return !it.more_; }

    Position at() const requires requires(const Inner& it) { it.at(); }
    { return pass_->it.at(); }
    bool is_last() const requires requires(const Inner& it) { it.is_last(); }
    { return pass_->it.is_last(); }
    void cancel() const requires requires(const Inner& it) { it.cancel(); }
    { pass_->it.cancel(); }

   private:
    friend class MappedLoader;
    Iterator(Range& loader, std::shared_ptr<const Functions> fs)
        : fs_(std::move(fs)), pass_(Pass{loader.begin(), loader.end()}) {
      arrived();
    }
    /// What runs on a device is begun when the batch is used, or it would count as waiting for data.
    void arrived() {
      more_ = pass_->it != pass_->end;
      if (!more_) return;
      bool on_cpu = true;
      treadle::for_each_tensor(std::as_const(*pass_->it),
                               [&](const at::Tensor& tensor) { on_cpu &= !tensor.defined() || tensor.is_cpu(); });
      if (on_cpu) make();
    }
    void make() const {
      std::vector<KeyedGenerator> random;
      if constexpr (requires { pass_->it.generators(); }) random = pass_->it.generators();
      Given batch = *pass_->it;
      try {
        batch_.emplace(through(*fs_, std::move(batch), random));
      } catch (const std::exception& error) {
        more_ = false;
        std::throw_with_nested(DataError("data::map_batches: a function of " + name() +
                                         " failed: " + treadle::detail::first_line(error.what())));
      } catch (...) {
        more_ = false;
        throw;
      }
    }
    std::string name() const {
      if constexpr (requires { pass_->it.at(); }) {
        const Position at = pass_->it.at();
        return "batch " + std::to_string(at.batch) + " of epoch " + std::to_string(at.epoch);
      } else {
        return "batch " + std::to_string(number_) + " of this pass";
      }
    }

    std::shared_ptr<const Functions> fs_;
    mutable std::optional<Pass> pass_;  // some iterators have no const operator*
    mutable std::optional<value_type> batch_;
    mutable bool more_ = false;
    std::int64_t number_ = 0;
  };

  Iterator begin() { return Iterator(loader_, fs_); }
  std::default_sentinel_t end() const { return {}; }

  std::int64_t size() const requires sized_loader<Range> { return loader_.size(); }
  void set_epoch(std::int64_t epoch) requires reseedable_loader<Range> { loader_.set_epoch(epoch); }
  Position position() const requires resumable<Range> { return loader_.position(); }
  void seek(Position position) requires resumable<Range> { loader_.seek(position); }
  auto sought() const requires requires(const Range& r) { r.sought(); }
  { return loader_.sought(); }

  Range& loader() { return loader_; }
  const auto& options() const requires requires(const Range& r) { r.options(); }
  { return loader_.options(); }
  std::string advice() const requires requires(const Range& r) { r.advice(); }
  { return loader_.advice(); }
  /// The same with other options of the loader.
  auto with(const LoaderOptions& options) const requires requires(const Range& r) { r.with(options); }
  {
    using Other = decltype(loader_.with(options));
    return std::apply([&](const Fs&... fs) { return MappedLoader<Other, Fs...>(loader_.with(options), fs...); }, *fs_);
  }

 private:
  L loader_;
  std::shared_ptr<const Functions> fs_;
};

/// `loader` with its batches put through `fs`, in order, by the thread that asks for them and on the device where they
/// are. The loader is kept by reference if it is one that has a name, and then must stay where it is.
///
/// A function takes the batch or its `data`, perhaps with a `std::span<KeyedGenerator>` after it: one for each row, a
/// function of (seed, epoch, sample), from a `Loader` or a `StreamLoader`. It returns what takes the batch's place.
/// What it throws arrives as `DataError` with the batch's number (the original is nested in it), and ends the pass; the
/// position is then behind that batch.
template <class L, class... Fs>
MappedLoader<L, Fs...> map_batches(L&& loader, Fs... fs) {
  return MappedLoader<L, Fs...>(std::forward<L>(loader), std::move(fs)...);
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
