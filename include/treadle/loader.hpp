// SPDX-License-Identifier: Apache-2.0
// What Treadle asks of a loader: an input range of batches. The rest is optional.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

namespace detail {
using std::begin;
using std::end;
template <class L>
concept batch_range = requires(L& loader) {
  *begin(loader);
  begin(loader) != end(loader);
};
}  // namespace detail

/// A range of batches (a `torch::data` loader, a generator, a vector), or a pointer to one.
template <class L>
concept loader = detail::batch_range<std::remove_reference_t<L>> || requires(L& pointer) {
  { *pointer } -> detail::batch_range;
};

/// A loader that knows how many batches it gives.
template <class L>
concept sized_loader = requires(const L& l) {
  { l.size() } -> std::convertible_to<std::int64_t>;
};

/// A loader whose order depends on the epoch.
template <class L>
concept reseedable_loader = requires(L& l, std::int64_t epoch) {
  l.set_epoch(epoch);
};

namespace detail {

/// Whether it is a loader, with a sentence where it is none.
template <class Given>
consteval bool is_loader() {
  static_assert(
      loader<Given>,
      "treadle::Trainer: what was given is no loader; a loader is a range of batches with begin() and end(), such as "
      "std::vector<td::Batch>, a torch::data loader or a td::data::TensorLoader, or a pointer to one.");
  return loader<Given>;
}

/// The range itself, where a pointer to one was given.
template <class L>
auto& range_of(L& given) {
  if constexpr (batch_range<L>)
    return given;
  else
    return *given;
}

/// Batches of a loader, or -1 if it does not know.
template <class L>
std::int64_t batches_of(const L& range) {
  if constexpr (sized_loader<L>)
    return static_cast<std::int64_t>(range.size());
  else
    return -1;
}

/// Where a loader was told to begin.
struct Begin {
  std::int64_t epoch = 0;
  std::int64_t batch = 0;
};
/// Where `range` was sought and nobody has begun yet, if it can tell; none where the next pass is a whole epoch.
template <class L>
std::optional<Begin> sought_in(const L& range) {
  if constexpr (requires { range.sought()->batch; }) {
    if (const auto sought = range.sought()) return Begin{sought->epoch, sought->batch};
  }
  return std::nullopt;
}

/// A range whose batches have places of their own, such as a vector: what it gives does not depend on who asked before.
template <class L>
concept indexed_range = requires(L& range) {
  { begin(range) } -> std::random_access_iterator;
  { end(range) } -> std::same_as<decltype(begin(range))>;
};
/// `range` without its first batches.
template <class L>
struct Rest {
  L& range;
  std::int64_t first;
  auto begin() const {
    using std::begin;
    return begin(range) + first;
  }
  auto end() const {
    using std::end;
    return end(range);
  }
  std::int64_t size() const { return end() - begin(); }
};
/// What a pass that begins at batch `first` goes through: the rest of a range by index, else the range, which was
/// sought.
template <class L>
decltype(auto) rest_of(L& range, std::int64_t first) {
  if constexpr (indexed_range<L>)
    return Rest<L>{range, first};
  else
    return (range);
}

/// That training needs batches, and a tail that was dropped is all there was.
[[noreturn]] inline void refuse_empty() {
  throw DataError("treadle::Trainer::fit: the training loader gave no batch; it needs at least one an epoch.");
}
[[noreturn]] inline void refuse_tail(std::int64_t batches, std::int64_t per_step) {
  throw DataError("treadle::Trainer::fit: an epoch " +
                  (batches < 0 ? std::string() : "of " + std::to_string(batches) + " batches ") +
                  "makes no step, because it is shorter than a window of " + std::to_string(per_step) +
                  " batches, which accumulation::Tail::Drop drops; use Tail::Step, or fewer batches a step.");
}

/// What is odd about the rows that `range` gives to a rank of a job, where it can tell; else empty.
template <class L>
std::string shard_text(const L& range, std::int64_t rank, std::int64_t world_size) {
  if constexpr (requires { range.options().world_size + range.options().rank; }) {
    const auto& options = range.options();
    // What all ranks have forgotten, one says.
    if (options.world_size != world_size ? rank == 0 : options.rank != rank)
      return "treadle::Trainer::fit: the loader of rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
             " gives the rows of rank " + std::to_string(options.rank) + " of " + std::to_string(options.world_size) +
             ", so that ranks train on the same rows unless each has a data set of its own: make the loader's options "
             "with "
             "treadle::data::sharded(options).";
  }
  return {};
}

/// That so much of the time went by waiting for `range`, and what to change; a loader that knows better has `advice()`.
template <class L>
std::string wait_text(double share, const L& range) {
  std::string advice =
      "make batches on other threads, with treadle::data::Loader and its workers, or keep them in memory, with "
      "treadle::data::TensorLoader";
  if constexpr (requires { range.advice(); }) advice = range.advice();
  return "treadle::Trainer::fit: " + std::to_string(static_cast<int>(100 * share)) +
         " % of the training time was spent waiting for the loader: " + advice +
         "; FitOptions::warn_data_wait sets when this is said.";
}

/// Calls `f(batch, last)` for each batch until it returns false; `waited(next)` runs what fetches the next one.
///
/// `last` is true only where `KnowsLast` asks for it: an iterator with `is_last()` is asked, a loader that knows its
/// size is counted (one that gives fewer never comes to its last), and any other is asked for the next batch first, so
/// that two are held at a time.
template <bool KnowsLast, class Range, class F, class Waited>
void for_each_batch(Range& range, F&& f, Waited&& waited) {
  using std::begin;
  using std::end;
  [[maybe_unused]] std::int64_t left = KnowsLast ? batches_of(range) : -1;
  auto it = waited([&] { return begin(range); });
  auto last = end(range);
  if constexpr (KnowsLast && requires { it.is_last(); }) {
    while (it != last) {
      if (!f(*it, waited([&] { return it.is_last(); }))) return;
      waited([&] { return ++it, 0; });
    }
  } else if constexpr (!KnowsLast || sized_loader<Range>) {
    while (it != last) {
      if (!f(*it, --left == 0)) return;
      waited([&] { return ++it, 0; });
    }
  } else {
    using Value = std::remove_cvref_t<decltype(*it)>;
    const auto take = [&]() -> Value {
      if constexpr (std::copy_constructible<Value>)
        return *it;
      else
        return std::move(*it);
    };
    while (it != last) {
      std::optional<Value> current(take());
      waited([&] { return ++it, 0; });
      if (!f(std::as_const(*current), !(it != last))) return;
    }
  }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
