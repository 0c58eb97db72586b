// SPDX-License-Identifier: Apache-2.0
// The rules between axes, on policies that have nothing but the facts which the rules look at.
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <treadle/treadle.hpp>

namespace td = treadle;
using Net = torch::nn::LinearImpl;

struct Capturing : td::execution::Eager {
  static constexpr bool captures = true;
};
struct Threads : td::parallelism::SingleDevice {
  static constexpr bool threads = true;
  static constexpr bool slices = true;
};
struct Searching : td::parallelism::SingleDevice {
  static constexpr bool finds_unused = true;
};
struct Offloading : td::checkpointing::NoCheckpointing {
  static constexpr bool offloads = true;
};
struct Recomputing : td::checkpointing::NoCheckpointing {
  static constexpr bool recomputes = true;
};
struct Make {
  auto operator()(std::vector<at::Tensor>& parameters) const { return torch::optim::RMSprop(parameters); }
};
using Waits = td::optim::Adapter<Make, td::optim::HostSync::Allowed>;
using Adapted = td::optim::Adapter<Make>;

struct Objective {
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
struct Triple {
  at::Tensor a, b, c;
};
struct OfTriple {
  at::Tensor operator()(Net& net, const auto& batch) const { return net.forward(batch.a).sum(); }
};
struct Sliced {
  at::Tensor a, b, c;
  Sliced slice_rows(std::int64_t begin, std::int64_t end) const {
    return {a.slice(0, begin, end), b.slice(0, begin, end), c.slice(0, begin, end)};
  }
};
template <class Rule, class... Ps>
constexpr auto made = sizeof(td::Trainer<Net, Objective, Rule, td::Policies<Ps...>>);

#if CASE == 0
// What no rule refuses.
inline auto a = made<td::optim::AdamW, Capturing, Recomputing, td::precision::Fp16, td::nonfinite::Stop>;
inline auto b = made<td::optim::Sgd, Threads, Offloading, td::accumulation::SplitBatch>;
inline auto c = made<Adapted, td::precision::Bf16, Searching>;
inline auto d = made<Waits, td::precision::Fp16, td::nonfinite::Stop>;
inline void e(td::Trainer<Net, OfTriple, td::optim::AdamW, td::Policies<td::accumulation::SplitBatch>>& trainer) {
  trainer.accumulate(Sliced{});
}
#elif CASE == 1
// expect: treadle::Trainer: execution::CudaGraph cannot capture parallelism::DataParallel
inline auto a = made<td::optim::AdamW, Capturing, Threads>;
// expect: treadle::Trainer: execution::CudaGraph cannot capture a search for unused parameters
inline auto b = made<td::optim::AdamW, Searching, Capturing>;
// expect: treadle::Trainer: execution::CudaGraph cannot capture checkpointing::OffloadActivations
inline auto c = made<td::optim::AdamW, Capturing, Offloading>;
// expect: treadle::Trainer: execution::CudaGraph cannot capture an adapted torch::optim optimizer
inline auto d = made<Waits, Capturing>;
// expect: treadle::Trainer: an adapted torch::optim optimizer steps on the host
inline auto e = made<Adapted, td::precision::Fp16>;
#elif CASE == 2
// Fp16 without the skips that are its default still waits for the loss scale.
// expect: treadle::Trainer: an adapted torch::optim optimizer steps on the host
inline auto a = made<Adapted, td::precision::Fp16, td::nonfinite::Ignore>;
// expect: treadle::Trainer: accumulation::SplitBatch and parallelism::DataParallel take batches apart
inline void b(td::Trainer<Net, OfTriple, td::optim::AdamW, td::Policies<Threads>>& trainer) {
  trainer.accumulate(Triple{});
}
#elif CASE == 3
// expect: treadle::Trainer: an adapted torch::optim optimizer steps on the host
inline auto a = made<Adapted, td::nonfinite::Skip>;
// expect: treadle::Trainer: accumulation::SplitBatch and parallelism::DataParallel take batches apart
inline void b(td::Trainer<Net, OfTriple, td::optim::AdamW, td::Policies<td::accumulation::SplitBatch>>& trainer) {
  trainer.accumulate(Triple{});
}
#elif CASE == 4
// expect: treadle::Trainer: an adapted torch::optim optimizer steps on the host
inline auto a = made<Adapted, td::nonfinite::Stop, td::precision::Bf16>;
// expect: treadle::Trainer: a checkpointing policy needs to be given the blocks to recompute
inline void b(td::Trainer<Net, Objective, td::optim::AdamW, td::Policies<Recomputing>>& trainer) {
  trainer.accumulate(td::Batch{});
}
#elif CASE == 5
// expect: treadle::optim::adapt: the optimizer's step() needs a closure
inline auto a(Net& net) {
  const auto make = [](std::vector<at::Tensor>& parameters) { return torch::optim::LBFGS(parameters); };
  return sizeof(td::Trainer{net, Objective{}, td::optim::adapt(make)});
}
#endif
