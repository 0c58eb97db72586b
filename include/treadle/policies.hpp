// SPDX-License-Identifier: Apache-2.0
// The one canonical type that every set of policies maps to.
#pragma once

#include <type_traits>
#include <utility>

#include "treadle/accumulation/no_accumulation.hpp"
#include "treadle/averaging/no_averaging.hpp"
#include "treadle/axis.hpp"
#include "treadle/checkpointing/no_checkpointing.hpp"
#include "treadle/clipping/no_clipping.hpp"
#include "treadle/execution/eager.hpp"
#include "treadle/nonfinite/ignore.hpp"
#include "treadle/nonfinite/skip.hpp"
#include "treadle/parallelism/single_device.hpp"
#include "treadle/precision/fp32.hpp"

namespace treadle {
inline namespace v0_1 {

/// All axes in fixed order. Users never spell it: `Policies<...>` names it and `policies(...)` makes it.
template <policy_of<axis::Precision> PrecisionPolicy, policy_of<axis::Parallelism> ParallelismPolicy,
          policy_of<axis::Accumulation> AccumulationPolicy, policy_of<axis::Checkpointing> CheckpointingPolicy,
          policy_of<axis::Execution> ExecutionPolicy, policy_of<axis::Clipping> ClippingPolicy,
          policy_of<axis::NonFinite> NonFinitePolicy, policy_of<axis::Averaging> AveragingPolicy>
struct PolicySet {
  using Precision = PrecisionPolicy;
  using Parallelism = ParallelismPolicy;
  using Accumulation = AccumulationPolicy;
  using Checkpointing = CheckpointingPolicy;
  using Execution = ExecutionPolicy;
  using Clipping = ClippingPolicy;
  using NonFinite = NonFinitePolicy;
  using Averaging = AveragingPolicy;

  [[no_unique_address]] Precision precision{};
  [[no_unique_address]] Parallelism parallelism{};
  [[no_unique_address]] Accumulation accumulation{};
  [[no_unique_address]] Checkpointing checkpointing{};
  [[no_unique_address]] Execution execution{};
  [[no_unique_address]] Clipping clipping{};
  [[no_unique_address]] NonFinite nonfinite{};
  [[no_unique_address]] Averaging averaging{};

  /// Throws `ConfigError` if any option value is out of its range.
  void check() const {
    precision.check();
    parallelism.check();
    accumulation.check();
    checkpointing.check();
    execution.check();
    clipping.check();
    nonfinite.check();
    averaging.check();
  }
};

namespace detail {

template <class T>
struct is_policy_set : std::false_type {};
template <class... Ps>
struct is_policy_set<PolicySet<Ps...>> : std::true_type {};

template <class Axis, class... Ps>
inline constexpr int policies_on_axis = (0 + ... + int{policy_of<Ps, Axis>});

/// The policy of `Axis` among `Ps`, else `Default`.
template <class Axis, class Default, class... Ps>
struct select_policy {
  using type = Default;
};
template <class Axis, class Default, class First, class... Rest>
struct select_policy<Axis, Default, First, Rest...>
    : std::conditional_t<policy_of<First, Axis>, std::type_identity<First>, select_policy<Axis, Default, Rest...>> {};
template <class Axis, class Default, class... Ps>
using select_policy_t = typename select_policy<Axis, Default, Ps...>::type;

/// A precision that scales its loss meets overflow as a matter of course, so skipping is its default.
template <class Precision>
struct default_nonfinite : std::type_identity<nonfinite::Ignore> {};
template <class Precision>
requires(Precision::scales_loss) struct default_nonfinite<Precision> : std::type_identity<nonfinite::Skip> {
};

template <class... Ps>
struct canonical {
  static_assert((any_policy<Ps> && ...),
                "treadle::Policies: an argument is not a policy; every argument must be a policy of one of the axes "
                "(a type with a member `policy_axis`, such as treadle::precision::Bf16).");
  static_assert(policies_on_axis<axis::Precision, Ps...> <= 1,
                "treadle::Policies: two policies of the precision axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Parallelism, Ps...> <= 1,
                "treadle::Policies: two policies of the parallelism axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Accumulation, Ps...> <= 1,
                "treadle::Policies: two policies of the accumulation axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Checkpointing, Ps...> <= 1,
                "treadle::Policies: two policies of the checkpointing axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Execution, Ps...> <= 1,
                "treadle::Policies: two policies of the execution axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Clipping, Ps...> <= 1,
                "treadle::Policies: two policies of the clipping axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::NonFinite, Ps...> <= 1,
                "treadle::Policies: two policies of the non-finite axis; name at most one policy an axis.");
  static_assert(policies_on_axis<axis::Averaging, Ps...> <= 1,
                "treadle::Policies: two policies of the averaging axis; name at most one policy an axis.");

  using Precision = select_policy_t<axis::Precision, precision::Fp32, Ps...>;
  using type = PolicySet<Precision, select_policy_t<axis::Parallelism, parallelism::SingleDevice, Ps...>,
                         select_policy_t<axis::Accumulation, accumulation::NoAccumulation, Ps...>,
                         select_policy_t<axis::Checkpointing, checkpointing::NoCheckpointing, Ps...>,
                         select_policy_t<axis::Execution, execution::Eager, Ps...>,
                         select_policy_t<axis::Clipping, clipping::NoClipping, Ps...>,
                         select_policy_t<axis::NonFinite, typename default_nonfinite<Precision>::type, Ps...>,
                         select_policy_t<axis::Averaging, averaging::NoAveraging, Ps...>>;
};

template <class Axis, class Set>
constexpr auto& member(Set& set) {
  if constexpr (std::is_same_v<Axis, axis::Precision>)
    return set.precision;
  else if constexpr (std::is_same_v<Axis, axis::Parallelism>)
    return set.parallelism;
  else if constexpr (std::is_same_v<Axis, axis::Accumulation>)
    return set.accumulation;
  else if constexpr (std::is_same_v<Axis, axis::Checkpointing>)
    return set.checkpointing;
  else if constexpr (std::is_same_v<Axis, axis::Execution>)
    return set.execution;
  else if constexpr (std::is_same_v<Axis, axis::Clipping>)
    return set.clipping;
  else if constexpr (std::is_same_v<Axis, axis::NonFinite>)
    return set.nonfinite;
  else
    return set.averaging;
}

}  // namespace detail

/// The canonical type of any subset of policies in any order; equal sets are one type and share their code.
template <class... Ps>
using Policies = typename detail::canonical<Ps...>::type;

/// Makes the canonical set from policy values, in any order; axes that are not named take their defaults.
template <class... Ps>
constexpr Policies<std::remove_cvref_t<Ps>...> policies(Ps&&... given) {
  Policies<std::remove_cvref_t<Ps>...> set{};
  ((detail::member<typename std::remove_cvref_t<Ps>::policy_axis>(set) = std::forward<Ps>(given)), ...);
  return set;
}

/// Whether `T` is a canonical set of policies.
template <class T>
concept policy_set = detail::is_policy_set<std::remove_cvref_t<T>>::value;

}  // namespace v0_1
}  // namespace treadle
