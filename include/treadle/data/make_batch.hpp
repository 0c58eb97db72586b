// SPDX-License-Identifier: Apache-2.0
// What loaders of every kind do with samples, and how they name what goes wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include "treadle/batch.hpp"
#include "treadle/data/collate.hpp"
#include "treadle/data/pipeline.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// What tells the random numbers of functions of batches apart from those of samples, which have 0.
inline constexpr std::uint64_t for_batches = 0xB5297A4D3F84D5B5;

/// A batch, in words.
struct BatchName {
  std::int64_t batch = 0;
  std::int64_t epoch = 0;
  std::string text() const { return "batch " + std::to_string(batch) + " of epoch " + std::to_string(epoch); }
  std::string sample(std::int64_t number) const { return "sample " + std::to_string(number) + " (in " + text() + ")"; }
};

/// Calls `f`, and puts `where()` before what it throws.
template <class F, class Where>
decltype(auto) guarded(F&& f, Where&& where) {
  try {
    return f();
  } catch (const Abandoned&) {
    throw;
  } catch (const data::CollateError&) {
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(
        DataError("data::Loader: " + where() + " could not be loaded: " + detail::first_line(error.what())));
  } catch (...) {
    std::throw_with_nested(
        DataError("data::Loader: " + where() + " could not be loaded: what was thrown is no std::exception."));
  }
}

/// Makes a batch of `samples`, whose numbers in the data set are `number(i)`.
template <class CollateFunction, class Sample, class Number>
auto collate_batch(const CollateFunction& collate, std::span<const Sample> samples, bool pinned, const BatchName& name,
                   const Number& number) {
  try {
    return guarded([&] { return collate(samples, data::Placement{.pinned = pinned}); }, [&] { return name.text(); });
  } catch (const data::CollateError& error) {
    const auto last = static_cast<std::int64_t>(samples.size()) - 1;
    throw DataError("data::Loader: " + name.sample(number(std::clamp<std::int64_t>(error.row(), 0, last))) +
                    " does not fit into its batch: " + error.what() + ".");
  }
}

/// Brings what is not yet there into page-locked memory.
template <class B>
void pin(B& batch) {
  treadle::for_each_tensor(batch, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cpu() && !tensor.is_pinned()) tensor = tensor.pin_memory();
  });
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
