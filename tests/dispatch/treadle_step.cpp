// SPDX-License-Identifier: Apache-2.0
// Treadle's step, with defaults and with everything on: the object holds what accumulate() needs and nothing else.
#include "dispatch/step.hpp"
#include "treadle/treadle.hpp"

namespace td = treadle;

struct DispatchObjective {
  td::Loss operator()(DispatchNet& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
template <class... Policies>
using DispatchTrainer = td::Trainer<DispatchNet, DispatchObjective, td::optim::AdamW, td::Policies<Policies...>>;
using Everything = DispatchTrainer<td::precision::Fp16, td::accumulation::AccumulateOver, td::clipping::ClipNorm,
                                   td::nonfinite::Skip, td::averaging::ExponentialAverage>;

std::optional<td::StepResult> step_with_defaults(DispatchTrainer<>& trainer, const td::Batch& batch) {
  return trainer.accumulate(batch);
}
std::optional<td::StepResult> step_with_everything(Everything& trainer, const td::Batch& batch) {
  return trainer.accumulate(batch);
}
