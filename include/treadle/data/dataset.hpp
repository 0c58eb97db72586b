// SPDX-License-Identifier: Apache-2.0
// What a loader asks of a data set.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "treadle/data/random.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// The rows of the data set that make a batch, in order.
class Rows {
 public:
  /// `count` rows as they lie, from `first` on.
  Rows(std::int64_t first, std::int64_t count) : first_(first), count_(count) {}
  /// The rows that `numbers` names, int64 `[count]` on the CPU; `there` has the same on the data set's device.
  Rows(const at::Tensor& numbers, at::Tensor there)
      : numbers_(numbers.const_data_ptr<std::int64_t>()), count_(numbers.numel()), there_(std::move(there)) {}

  std::int64_t size() const { return count_; }
  std::int64_t operator[](std::int64_t i) const { return numbers_ != nullptr ? numbers_[i] : first_ + i; }
  /// Whether they are neighbors in the data set, in its order; then `tensor()` is undefined.
  bool consecutive() const { return numbers_ == nullptr; }
  /// Their numbers, int64 `[size()]` on the data set's device.
  const at::Tensor& tensor() const { return there_; }

 private:
  const std::int64_t* numbers_ = nullptr;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  at::Tensor there_;
};

}  // namespace data

namespace detail {
template <class D>
concept sized_set = requires(const D& d) {
  { d.size() } -> std::convertible_to<std::int64_t>;
};
template <class D>
concept gives_samples = requires(const D& d, std::int64_t i) {
  d.get(i);
};
template <class D>
concept gives_random_samples = requires(const D& d, std::int64_t i, data::KeyedGenerator& random) {
  d.get(i, random);
};
template <class D>
concept gives_batches = requires(const D& d, const data::Rows& rows) {
  d.get_batch(rows);
};
}  // namespace detail

namespace data {

/// A data set whose samples have numbers from 0 to `size()` - 1. It gives them one at a time, by `get(i)` or, with
/// random numbers of the sample's own, by `get(i, random)`; or whole batches, by `get_batch(rows)`, which a loader
/// prefers.
///
/// All are const, and are called from several threads at once. They throw what says why a sample cannot be had.
template <class D>
concept map_dataset = treadle::detail::sized_set<D> &&
    (treadle::detail::gives_samples<D> || treadle::detail::gives_random_samples<D> ||
     treadle::detail::gives_batches<D>);

/// A data set that is gone through from its beginning: `open(epoch)` begins a pass and returns a reader, whose `next()`
/// gives a `std::optional` of a sample, empty at the end.
///
/// A reader is asked by one thread at a time, in order. A reader with `skip(n)`, which passes over up to n samples, is
/// restored by it; any other is read up to where it stood. A stream may have `prepare(sample, random)`, const, which
/// makes the sample proper out of what was read: that is called from several threads at once, and is the place for what
/// takes time.
template <class S>
concept stream_dataset = requires(const S& stream, std::int64_t epoch) {
  {stream.open(epoch).next()};
  { stream.open(epoch).next().has_value() } -> std::convertible_to<bool>;
  *stream.open(epoch).next();
};

}  // namespace data

namespace detail {
/// Sample `i` of a map-style set, with the random numbers that are its own.
template <class D>
auto get_sample(const D& dataset, std::int64_t i, data::KeyedGenerator& random) {
  if constexpr (gives_random_samples<D>)
    return dataset.get(i, random);
  else
    return dataset.get(i);
}

template <class D>
struct SampleOf {
  using type = std::remove_cvref_t<decltype(get_sample(std::declval<const D&>(), std::int64_t{},
                                                       std::declval<data::KeyedGenerator&>()))>;
};
template <data::stream_dataset S>
using ReadBy = std::remove_cvref_t<decltype(*std::declval<const S&>().open(0).next())>;

/// What a stream makes of what was read.
template <class S>
auto prepare_sample(const S& stream, ReadBy<S>&& read, data::KeyedGenerator& random) {
  if constexpr (requires { stream.prepare(std::move(read), random); })
    return stream.prepare(std::move(read), random);
  else
    return std::move(read);
}
template <data::stream_dataset S>
struct SampleOf<S> {
  using type = std::remove_cvref_t<decltype(prepare_sample(std::declval<const S&>(), std::declval<ReadBy<S>>(),
                                                           std::declval<data::KeyedGenerator&>()))>;
};
}  // namespace detail

namespace data {

/// What a map-style data set, or a stream, gives.
template <class D>
using sample_of = typename treadle::detail::SampleOf<D>::type;

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
