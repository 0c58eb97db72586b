// SPDX-License-Identifier: Apache-2.0
// Sets of policies: one canonical type for every order, defaults, and the option values that were given.
#include <type_traits>
#include <utility>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;
namespace precision = td::precision;
using td::Policies;
using td::accumulation::AccumulateOver;
using td::averaging::ExponentialAverage;
using td::clipping::ClipNorm;
using td::nonfinite::Stop;

// Every order of four policies.
template <class... Done>
struct Orders {
  template <class Canonical>
  static constexpr bool all() {
    return std::same_as<Policies<Done...>, Canonical>;
  }
  template <class Canonical, class First, class... Rest>
  static constexpr bool all() {
    return pick<Canonical, std::tuple<>, First, Rest...>();
  }
  template <class Canonical, class Before, class First, class... After>
  static constexpr bool pick() {
    return go<Canonical, First>(Before{}, std::type_identity<std::tuple<After...>>{});
  }
  template <class Canonical, class Chosen, class... Before, class... After>
  static constexpr bool go(std::tuple<Before...>, std::type_identity<std::tuple<After...>>) {
    bool same = Orders<Done..., Chosen>::template all<Canonical, Before..., After...>();
    if constexpr (sizeof...(After) > 0) same = same && pick<Canonical, std::tuple<Before..., Chosen>, After...>();
    return same;
  }
};
static_assert(Orders<>::all<Policies<precision::Bf16, AccumulateOver, ClipNorm, Stop>, precision::Bf16, AccumulateOver,
                            ClipNorm, Stop>());
static_assert(!Orders<>::all<Policies<precision::Bf16>, precision::Fp16, AccumulateOver>());

// Naming a default changes nothing.
static_assert(std::same_as<Policies<>,
                           Policies<td::averaging::NoAveraging, td::execution::Eager,
                                    td::checkpointing::NoCheckpointing, td::clipping::NoClipping, td::nonfinite::Ignore,
                                    td::parallelism::SingleDevice, td::accumulation::NoAccumulation, precision::Fp32>>);
static_assert(std::same_as<decltype(td::policies()), Policies<>>);

// A scaled loss skips by default, the other precisions do not.
static_assert(std::same_as<Policies<precision::Fp16>::NonFinite, td::nonfinite::Skip>);
static_assert(std::same_as<Policies<precision::Fp16, Stop>::NonFinite, Stop>);
static_assert(std::same_as<Policies<precision::Bf16>::NonFinite, td::nonfinite::Ignore>);
static_assert(std::same_as<Policies<precision::Bf16Weights>::NonFinite, td::nonfinite::Ignore>);
static_assert(std::same_as<Policies<precision::Tf32>::NonFinite, td::nonfinite::Ignore>);

// A set is a set, a policy is none.
static_assert(td::policy_set<Policies<>>);
static_assert(td::policy_set<const Policies<precision::Bf16>&>);
static_assert(!td::policy_set<precision::Bf16>);
static_assert(!td::any_policy<td::optim::AdamW>);
static_assert(td::policy_of<ClipNorm, td::axis::Clipping> && !td::policy_of<ClipNorm, td::axis::Averaging>);

// Every policy that comes with Treadle meets its axis's concept.
static_assert(td::precision_policy<precision::Fp32> && td::precision_policy<precision::Tf32> &&
              td::precision_policy<precision::Bf16> && td::precision_policy<precision::Fp16> &&
              td::precision_policy<precision::Bf16Weights>);
static_assert(td::parallelism_policy<td::parallelism::SingleDevice>);
static_assert(td::accumulation_policy<AccumulateOver> && td::accumulation_policy<td::accumulation::SplitBatch> &&
              td::accumulation_policy<td::accumulation::NoAccumulation>);
static_assert(td::checkpointing_policy<td::checkpointing::NoCheckpointing>);
static_assert(td::execution_policy<td::execution::Eager>);
static_assert(td::clipping_policy<ClipNorm> && td::clipping_policy<td::clipping::ClipValue> &&
              td::clipping_policy<td::clipping::NoClipping>);
static_assert(td::nonfinite_policy<Stop> && td::nonfinite_policy<td::nonfinite::Skip> &&
              td::nonfinite_policy<td::nonfinite::Ignore>);
static_assert(td::averaging_policy<ExponentialAverage> && td::averaging_policy<td::averaging::NoAveraging>);
static_assert(td::update_rule<td::optim::AdamW> && td::update_rule<td::optim::Adam> && td::update_rule<td::optim::Sgd>);
}  // namespace

TEST_CASE("values stay with their policy, whatever the order and the value category") {
  const ClipNorm clip{.max_norm = 2.5};
  AccumulateOver window{.batches = 4, .tail = td::accumulation::Tail::Drop};
  const auto one = td::policies(clip, window, ExponentialAverage{.decay = 0.5}, precision::Fp16{.initial_scale = 8});
  const auto other =
      td::policies(precision::Fp16{.initial_scale = 8}, ExponentialAverage{.decay = 0.5}, std::move(window), clip);
  static_assert(std::same_as<decltype(one), decltype(other)>);
  for (const auto& set : {one, other}) {
    CHECK(set.clipping.max_norm == 2.5);
    CHECK(set.accumulation.batches == 4);
    CHECK((set.accumulation.tail == td::accumulation::Tail::Drop));
    CHECK(set.averaging.decay == 0.5);
    CHECK(set.precision.initial_scale == 8);
    CHECK(set.precision.growth_interval == 2000);
  }
}

TEST_CASE("policies are values that compare") {
  CHECK(ClipNorm{.max_norm = 1} == ClipNorm{});
  CHECK_FALSE(ClipNorm{.max_norm = 2} == ClipNorm{});
  CHECK(td::optim::AdamW{} == td::optim::AdamW{.learning_rate = 1e-3});
  CHECK_FALSE(td::optim::AdamW{} == td::optim::AdamW{.groups = {{.pattern = "*"}}});
  CHECK(td::schedule::cosine({.warmup = 3}) == td::schedule::cosine({.warmup = 3}));
  CHECK_FALSE(td::schedule::cosine() == td::schedule::linear());
}

TEST_CASE("a set checks each of its policies") {
  CHECK_NOTHROW(td::policies(ClipNorm{}, AccumulateOver{}, ExponentialAverage{}, precision::Fp16{}, Stop{}).check());
  CHECK_SAYS(td::ConfigError, "precision::Fp16", td::policies(precision::Fp16{.growth_interval = 0}).check());
  CHECK_SAYS(td::ConfigError, "accumulation::AccumulateOver", td::policies(AccumulateOver{.batches = 0}).check());
  CHECK_SAYS(td::ConfigError, "clipping::ClipNorm", td::policies(ClipNorm{.max_norm = 0}).check());
  CHECK_SAYS(td::ConfigError, "averaging::ExponentialAverage", td::policies(ExponentialAverage{.decay = 1}).check());
}
