// SPDX-License-Identifier: Apache-2.0
// The tags by which a policy says which axis it belongs to. No torch here.
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

namespace axis {
struct Precision {
  static constexpr std::string_view name = "precision";
};
struct Parallelism {
  static constexpr std::string_view name = "parallelism";
};
struct Accumulation {
  static constexpr std::string_view name = "accumulation";
};
struct Checkpointing {
  static constexpr std::string_view name = "checkpointing";
};
struct Execution {
  static constexpr std::string_view name = "execution";
};
struct Clipping {
  static constexpr std::string_view name = "clipping";
};
struct NonFinite {
  static constexpr std::string_view name = "non-finite";
};
struct Averaging {
  static constexpr std::string_view name = "averaging";
};
}  // namespace axis

/// `P` opted into `Axis` by name; what else it must offer stands in `<axis>/concept.hpp`.
template <class P, class Axis>
concept policy_of = requires {
  typename P::policy_axis;
}
&&std::same_as<typename P::policy_axis, Axis>;

/// `P` belongs to one of the eight axes.
template <class P>
concept any_policy = policy_of<P, axis::Precision> || policy_of<P, axis::Parallelism> ||
    policy_of<P, axis::Accumulation> || policy_of<P, axis::Checkpointing> || policy_of<P, axis::Execution> ||
    policy_of<P, axis::Clipping> || policy_of<P, axis::NonFinite> || policy_of<P, axis::Averaging>;

/// A guard object for calls that have nothing to guard.
struct NoGuard {
  ~NoGuard() {}  // not trivial: the compiler must not call an empty guard an unused variable
};

}  // namespace v0_1
}  // namespace treadle
