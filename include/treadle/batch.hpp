// SPDX-License-Identifier: Apache-2.0
// What Treadle asks of a batch: any aggregate of tensors will do, and three customization points change the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "treadle/detail/fields.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {

/// The default batch: `data` and `target` of equal first dimension (rows).
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

namespace detail {
template <class T>
concept data_target = requires(T& batch) {
  { batch.data } -> std::convertible_to<at::Tensor&>;
  { batch.target } -> std::convertible_to<at::Tensor&>;
}
&&(!std::is_aggregate_v<T> || (field_count<T> == 2 && !derived_aggregate<T>));

// The customization points are objects, which argument-dependent lookup passes over, so that what it finds here can
// only be a user's overload.
namespace batch_lookup {
void for_each_tensor() = delete;
void rows() = delete;
void slice_rows() = delete;

template <class B, class F>
concept adl_for_each = requires(B& batch, F& f) {
  for_each_tensor(batch, f);
};
template <class B>
concept adl_rows = requires(const B& batch) {
  { rows(batch) } -> std::convertible_to<std::int64_t>;
};
template <class B>
concept adl_slice = requires(const B& batch) {
  { slice_rows(batch, std::int64_t{}, std::int64_t{}) } -> std::convertible_to<B>;
};

template <class B, class F>
void call_for_each(B& batch, F& f) {
  for_each_tensor(batch, f);
}
template <class B>
std::int64_t call_rows(const B& batch) {
  return rows(batch);
}
template <class B>
B call_slice(const B& batch, std::int64_t begin, std::int64_t end) {
  return slice_rows(batch, begin, end);
}
}  // namespace batch_lookup

struct ForEachTensor {
  template <class B, class F>
  void operator()(B& batch, F&& f) const {
    if constexpr (requires { batch.for_each_tensor(f); })
      batch.for_each_tensor(f);
    else if constexpr (batch_lookup::adl_for_each<B, F>)
      batch_lookup::call_for_each(batch, f);
    else if constexpr (data_target<std::remove_const_t<B>>) {
      f(batch.data);
      f(batch.target);
    } else
      visit_tensors(batch, f);
  }
};

struct Rows {
  template <class B>
  [[gnu::always_inline]] std::int64_t operator()(const B& batch) const {
    if constexpr (requires {
                    { batch.rows() } -> std::convertible_to<std::int64_t>;
                  })
      return batch.rows();
    else if constexpr (batch_lookup::adl_rows<B>)
      return batch_lookup::call_rows(batch);
    else if constexpr (data_target<B>) {
      const std::int64_t data = length(batch.data);
      const std::int64_t target = length(batch.target);
      if (data != target || data == 0) [[unlikely]]
        check_lengths(batch.data, batch.target);
      return data;
    } else {
      std::int64_t count = 1;
      bool first = true;
      bool any = false;
      ForEachTensor{}(batch, [&](const at::Tensor& tensor) {
        if (first && tensor.defined()) count = length(tensor);
        if (tensor.defined()) first = false;
        any = true;
      });
      if (any && first) [[unlikely]]
        throw DataError("treadle: all tensors of a batch are undefined; let the loader fill at least one.");
      return count;
    }
  }
  /// An undefined tensor has 0 rows, as an empty one has; the empty one is a batch without rows.
  [[gnu::cold, gnu::noinline]] static void check_lengths(const at::Tensor& data, const at::Tensor& target) {
    if (!data.defined() || !target.defined())
      throw DataError(std::string("treadle: the ") + (data.defined() ? "target" : "data") +
                      " of a batch is an undefined tensor; let the loader fill both, or use a batch type without it.");
    if (length(data) != length(target))
      throw DataError("treadle: a batch has " + std::to_string(length(data)) + " rows of data but " +
                      std::to_string(length(target)) + " of target; both need the same first dimension.");
  }
  [[gnu::always_inline]] static std::int64_t length(const at::Tensor& tensor) {
    const auto sizes = tensor.unsafeGetTensorImpl()->sizes();  // spares a call that is not always inlined
    return sizes.empty() ? 1 : sizes[0];
  }
};
}  // namespace detail

/// `for_each_tensor(batch, f)` calls `f(tensor)` for each tensor of `batch`, by reference.
///
/// Default: the fields of an aggregate in order, into containers, pairs, optionals and nested aggregates; other fields
/// are passed over. A type changes it with a member or a free function `for_each_tensor(batch, f)` in its namespace.
inline constexpr detail::ForEachTensor for_each_tensor{};

/// As `for_each_tensor`, but without the `target` of a batch that has `data` and `target`.
template <class B, class F>
void for_each_input(B& batch, F&& f) {
  if constexpr (detail::data_target<std::remove_const_t<B>>)
    f(batch.data);
  else
    treadle::for_each_tensor(batch, f);
}

/// `rows(batch)`: the first dimension of its first defined tensor, 1 for a scalar. Throws `DataError` for a `{data,
/// target}` whose tensors differ in it, and for undefined tensors. A type changes it with a member or a free function
/// `rows(batch)` in its namespace.
inline constexpr detail::Rows rows{};

/// Whether rows of `B` can be sliced: `{data, target}`, or a type with a member or a free function
/// `slice_rows(batch, begin, end)` in its namespace.
template <class B>
concept sliceable_batch = detail::data_target<B> || detail::batch_lookup::adl_slice<B> || requires(const B& batch) {
  { batch.slice_rows(std::int64_t{}, std::int64_t{}) } -> std::convertible_to<B>;
};

namespace detail {
struct SliceRows {
  template <sliceable_batch B>
  B operator()(const B& batch, std::int64_t begin, std::int64_t end) const {
    if constexpr (requires {
                    { batch.slice_rows(begin, end) } -> std::convertible_to<B>;
                  })
      return batch.slice_rows(begin, end);
    else if constexpr (batch_lookup::adl_slice<B>)
      return batch_lookup::call_slice(batch, begin, end);
    else {
      B slice = batch;
      slice.data = batch.data.narrow(0, begin, end - begin);
      slice.target = batch.target.narrow(0, begin, end - begin);
      return slice;
    }
  }
};
}  // namespace detail

/// `slice_rows(batch, begin, end)`: rows `begin` to `end` (not included) of `batch`, as views.
inline constexpr detail::SliceRows slice_rows{};

}  // namespace v0_1
}  // namespace treadle
