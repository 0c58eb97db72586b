// SPDX-License-Identifier: Apache-2.0
// The tags by which a policy says which axis it belongs to. No torch here.
#pragma once

#include <concepts>
#include <type_traits>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

namespace axis {
struct Precision {};
struct Parallelism {};
struct Accumulation {};
struct Checkpointing {};
struct Execution {};
struct Clipping {};
struct NonFinite {};
struct Averaging {};
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
