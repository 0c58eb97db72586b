// SPDX-License-Identifier: Apache-2.0
// Every rule between axes, one named concept each; `Trainer` asserts them with a sentence. No torch here.
// What no rule refuses is legal, and the crossing tests cover it. The last two say what follows from a combination.
#pragma once

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// A captured step is replayed by one thread on one device, so it cannot drive a thread a device.
template <class Policies>
concept capture_without_threads = !(Policies::Execution::captures && Policies::Parallelism::threads);

/// A captured step cannot search for unused parameters: what it found once would be frozen.
template <class Policies>
concept capture_without_search = !(Policies::Execution::captures && Policies::Parallelism::finds_unused);

/// A captured step cannot move activations to the host and back.
template <class Policies>
concept capture_without_offload = !(Policies::Execution::captures && Policies::Checkpointing::offloads);

/// A captured step cannot hold a rule that steps on the host.
template <class Policies, class Rule>
concept capture_without_host_rule = !(Policies::Execution::captures && Rule::host_stepped);

/// A rule that steps on the host must be told there whether a step counts.
template <class Policies, class Rule>
concept host_rule_may_synchronize =
    !Rule::host_stepped || !(Policies::NonFinite::selects || Policies::Precision::scales_loss) || Rule::may_synchronize;

/// A policy that takes batches apart needs batches whose rows can be sliced.
template <class Policies, bool Sliceable>
concept batch_can_be_sliced = !(Policies::Accumulation::slices || Policies::Parallelism::slices) || Sliceable;

/// A policy that recomputes activations has to be given the blocks, so the objective must take the step context.
template <class Policies, bool TakesContext>
concept recompute_has_context = !Policies::Checkpointing::recomputes || TakesContext;

/// Whether a window's last micro-batch must be known as such when it comes; else `flush()` may end the window as well.
template <class Policies>
concept last_is_needed = Policies::Accumulation::windows && !Policies::Accumulation::slices &&
                         (Policies::Parallelism::replicates || Policies::Execution::captures);

/// Whether masters, averages, replicas or a foreign optimizer's state are made once, for the parameters that train
/// then.
template <class Policies, class Rule>
concept parameters_are_fixed = Policies::Precision::master_weights || Policies::Averaging::averages ||
    Policies::Parallelism::replicates || Rule::host_stepped;

}  // namespace v0_1
}  // namespace treadle
