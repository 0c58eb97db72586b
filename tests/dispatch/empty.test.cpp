// SPDX-License-Identifier: Apache-2.0
// Policies without options or state take no space, in a set of policies and in a trainer.
#include <type_traits>

#include "support/tiny.hpp"

namespace td = treadle;

namespace {
template <class... Policies>
using Trainer =
    td::Trainer<treadle_test::PlainNetImpl, treadle_test::CrossEntropy, td::optim::AdamW, td::Policies<Policies...>>;

template <class P>
constexpr bool takes_no_space = std::is_empty_v<P>&& std::is_empty_v<typename P::State>;
static_assert(takes_no_space<td::precision::Fp32>);
static_assert(takes_no_space<td::precision::Tf32>);
static_assert(takes_no_space<td::accumulation::NoAccumulation>);
static_assert(takes_no_space<td::checkpointing::NoCheckpointing>);
static_assert(takes_no_space<td::execution::Eager>);
static_assert(takes_no_space<td::clipping::NoClipping>);
static_assert(takes_no_space<td::nonfinite::Ignore>);
static_assert(takes_no_space<td::nonfinite::Skip>);
static_assert(takes_no_space<td::averaging::NoAveraging>);
static_assert(std::is_empty_v<treadle_test::CrossEntropy> && std::is_empty_v<td::observe::Set<>>);

// The device is the one option that the defaults have.
static_assert(sizeof(td::Policies<>) == sizeof(td::parallelism::SingleDevice));
static_assert(sizeof(td::Policies<td::nonfinite::Skip, td::precision::Tf32>) == sizeof(td::parallelism::SingleDevice));
static_assert(std::is_trivially_copyable_v<td::Policies<>>);

static_assert(sizeof(Trainer<>) == sizeof(Trainer<td::precision::Tf32>));
static_assert(sizeof(Trainer<>) == sizeof(Trainer<td::nonfinite::Skip>));

/// What a policy with state adds to a trainer is that state, so the empty one in its place took nothing.
template <class P>
bool adds_its_state() {
  const std::size_t added = sizeof(Trainer<P>) - sizeof(Trainer<>);
  return added + alignof(Trainer<>) > sizeof(typename P::State) &&
         added < sizeof(typename P::State) + alignof(Trainer<>);
}
}  // namespace

TEST_CASE("an empty policy takes no space in a trainer") {
  CHECK(adds_its_state<td::clipping::ClipNorm>());
  CHECK(adds_its_state<td::averaging::ExponentialAverage>());
  CHECK(adds_its_state<td::precision::Bf16Weights>());
}
