// SPDX-License-Identifier: Apache-2.0
// How samples become a batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ranges>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/detail/fields.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// A sample of most data sets: one row of data and its class. Samples of this type become a `td::Batch`.
struct Example {
  at::Tensor data;
  std::int64_t target = 0;
};

/// Where a batch is made.
struct Placement {
  bool pinned = false;  ///< in page-locked memory
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type,
                   at::MemoryFormat format = at::MemoryFormat::Contiguous) const {
    return at::empty(sizes, at::TensorOptions(type).pinned_memory(pinned).memory_format(format));
  }
};

/// Samples that do not fit together; `row` is the place in the batch of one that does not.
class CollateError : public DataError {
 public:
  CollateError(const std::string& what, std::int64_t row) : DataError(what), row_(row) {}
  std::int64_t row() const noexcept { return row_; }

 private:
  std::int64_t row_;
};

/// A new tensor of `count` tensors one upon the other, `[count, ...]`; `get(i)` is number i. All must be defined, on
/// the CPU, of one shape and type; throws `CollateError` where one is not. If the first is `[C, H, W]` with its
/// channels last in memory, so is the batch.
template <class Get>
at::Tensor stack(std::int64_t count, const Get& get, Placement place = {}) {
  const at::Tensor& first = get(0);
  const auto describe = [](const at::Tensor& t) {
    std::string text = std::string(c10::toString(t.scalar_type())) + " [";
    for (std::int64_t d = 0; d < t.dim(); ++d) text += (d > 0 ? ", " : "") + std::to_string(t.size(d));
    return text + "]";
  };
  if (!first.defined() || !first.is_cpu()) throw CollateError("its tensor is undefined or not on the CPU", 0);
  std::vector<std::int64_t> sizes{count};
  sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  const bool last =
      first.dim() == 3 && !first.is_contiguous() && first.unsqueeze(0).is_contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor batch =
      place.empty(sizes, first.scalar_type(), last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  const auto bytes = static_cast<std::size_t>(first.numel()) * first.element_size();
  auto* to = static_cast<char*>(batch.mutable_data_ptr());
  for (std::int64_t i = 0; i < count; ++i, to += bytes) {
    const at::Tensor& one = get(i);
    if (!one.defined() || !one.is_cpu()) throw CollateError("its tensor is undefined or not on the CPU", i);
    if (one.scalar_type() != first.scalar_type() || one.sizes() != first.sizes())
      throw CollateError(
          "it has a tensor " + describe(one) + " where the first one's is " + describe(first) +
              ": bring all to one shape and type, with data::map for example, or give the loader a collate "
              "function of your own",
          i);
    if ((last ? one.strides() == first.strides() : one.is_contiguous()) && !one.is_conj() && !one.is_neg()) {
      if (bytes > 0) std::memcpy(to, one.const_data_ptr(), bytes);
    } else {
      batch.select(0, i).copy_(one);
    }
  }
  return batch;
}

}  // namespace data

namespace detail {
namespace collate_lookup {
void collate() = delete;
template <class S>
concept free_function = requires(std::span<const S> samples, const data::Placement& place) {
  collate(samples, place);
};
template <class S>
auto call(std::span<const S> samples, const data::Placement& place) {
  return collate(samples, place);
}
}  // namespace collate_lookup
/// Never called: the compiler looks for what `for_each_tensor` passes over.
template <class T>
void require_only_tensors(T& value) {
  if constexpr (std::ranges::range<T> && !tensor_like<T>) {
    for (auto&& element : value) require_only_tensors(element);
  } else if constexpr (optional_like<T> && !tensor_like<T>) {
    require_only_tensors(*value);
  } else if constexpr (tuple_like<T>) {
    std::apply([](auto&... elements) { (require_only_tensors(elements), ...); }, value);
  } else if constexpr (plain_aggregate<T>) {
    for_each_field(value, [](auto& field) { require_only_tensors(field); });
  } else {
    static_assert(tensor_like<T>,
                  "treadle::data::Collate: a sample has a field that is no tensor, and a batch would have that of its "
                  "first sample alone; make it a tensor, or give the sample's type a static member collate(samples, "
                  "placement), or the loader a collate function as its last argument.");
  }
}
template <class S>
concept says_its_tensors = requires(S& sample, void (&f)(at::Tensor&)) {
  sample.for_each_tensor(f);
}
|| batch_lookup::adl_for_each<S, void (&)(at::Tensor&)>;

template <class S>
concept collates_itself = requires(std::span<const S> samples, const data::Placement& place) {
  S::collate(samples, place);
};
}  // namespace detail

namespace data {

/// Makes a batch of samples: with the sample type's static member or free function `collate(span, placement)`; else an
/// `Example` becomes a `td::Batch`, and any other type a batch of the same type, with each of its tensors stacked. An
/// aggregate with fields that are no tensors does not compile.
struct Collate {
  template <class S>
  auto operator()(std::span<const S> samples, const Placement& place) const {
    const auto count = static_cast<std::int64_t>(samples.size());
    const auto at = [&](std::int64_t i) -> const S& { return samples[static_cast<std::size_t>(i)]; };
    if constexpr (treadle::detail::collates_itself<S>) {
      return S::collate(samples, place);
    } else if constexpr (treadle::detail::collate_lookup::free_function<S>) {
      return treadle::detail::collate_lookup::call(samples, place);
    } else if constexpr (std::is_same_v<S, Example>) {
      treadle::Batch batch;
      batch.data = stack(
          count, [&](std::int64_t i) -> const at::Tensor& { return at(i).data; }, place);
      batch.target = place.empty({count}, at::kLong);
      auto* targets = batch.target.template mutable_data_ptr<std::int64_t>();
      for (const auto& sample : samples) *targets++ = sample.target;
      return batch;
    } else {
      if constexpr (treadle::detail::plain_aggregate<S> && !treadle::detail::says_its_tensors<S>)
        static_cast<void>(&treadle::detail::require_only_tensors<S>);
      std::vector<std::vector<at::Tensor>> all(samples.size());
      for (std::size_t i = 0; i < samples.size(); ++i) {
        treadle::for_each_tensor(samples[i], [&](const at::Tensor& tensor) { all[i].push_back(tensor); });
        if (all[i].size() != all[0].size())
          throw CollateError("it has " + std::to_string(all[i].size()) + " tensors where the first one has " +
                                 std::to_string(all[0].size()),
                             static_cast<std::int64_t>(i));
      }
      S batch = samples[0];
      std::size_t which = 0;
      treadle::for_each_tensor(batch, [&](at::Tensor& tensor) {
        tensor = stack(
            count, [&](std::int64_t i) -> const at::Tensor& { return all[static_cast<std::size_t>(i)][which]; }, place);
        ++which;
      });
      if (which == 0) throw CollateError("it holds no tensor", 0);
      return batch;
    }
  }
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
