// SPDX-License-Identifier: Apache-2.0
// Sets of policies: one an axis, and nothing that is no policy.
#include <torch/nn/modules/linear.h>
#include <treadle/treadle.hpp>

namespace td = treadle;
template <class... Ps>
using Set = td::Policies<Ps...>;

#if CASE == 0
using All = Set<td::clipping::ClipNorm, td::precision::Bf16, td::accumulation::SplitBatch, td::nonfinite::Stop,
                td::averaging::ExponentialAverage, td::execution::Eager, td::checkpointing::NoCheckpointing,
                td::parallelism::SingleDevice>;
using None = Set<>;
inline auto made = td::policies(td::precision::Bf16{}, td::clipping::ClipValue{});
#elif CASE == 1
// expect: treadle::Policies: two policies of the precision axis; name at most one policy an axis.
using A = Set<td::precision::Bf16, td::precision::Fp16>;
// expect: treadle::Policies: two policies of the parallelism axis; name at most one policy an axis.
using B = Set<td::parallelism::SingleDevice, td::precision::Bf16, td::parallelism::SingleDevice>;
// expect: treadle::Policies: two policies of the accumulation axis; name at most one policy an axis.
using C = Set<td::accumulation::AccumulateOver, td::accumulation::SplitBatch>;
// expect: treadle::Policies: two policies of the checkpointing axis; name at most one policy an axis.
using D = Set<td::checkpointing::NoCheckpointing, td::checkpointing::NoCheckpointing>;
// expect: treadle::Policies: two policies of the execution axis; name at most one policy an axis.
using E = Set<td::execution::Eager, td::execution::Eager>;
// expect: treadle::Policies: two policies of the clipping axis; name at most one policy an axis.
using F = Set<td::clipping::ClipNorm, td::clipping::ClipValue, td::precision::Bf16>;
// expect: treadle::Policies: two policies of the non-finite axis; name at most one policy an axis.
using G = Set<td::nonfinite::Skip, td::averaging::NoAveraging, td::nonfinite::Stop>;
// expect: treadle::Policies: two policies of the averaging axis; name at most one policy an axis.
using H = Set<td::averaging::ExponentialAverage, td::averaging::NoAveraging>;
#elif CASE == 2
// expect: treadle::Policies: an argument is not a policy
using A = Set<td::precision::Bf16, int>;
#elif CASE == 3
// expect: treadle::Policies: an argument is not a policy
inline auto made = td::policies(td::optim::AdamW{}, td::precision::Bf16{});
#elif CASE == 4
// expect: treadle::Policies: an argument is not a policy
struct OwnAxis {
  struct policy_axis {};
};
using A = Set<OwnAxis>;
#elif CASE == 5
// A value given twice, through the function.
// expect: treadle::Policies: two policies of the clipping axis; name at most one policy an axis.
inline auto made = td::policies(td::clipping::ClipNorm{}, td::clipping::ClipNorm{.max_norm = 2});
#endif
