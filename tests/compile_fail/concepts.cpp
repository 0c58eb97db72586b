// SPDX-License-Identifier: Apache-2.0
// Policies that miss their axis's concept by one thing; each axis has its own sentence.
#include <torch/nn/modules/linear.h>
#include <treadle/treadle.hpp>

namespace td = treadle;
using Net = torch::nn::LinearImpl;

struct Objective {
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
template <class P>
constexpr auto made = sizeof(td::Trainer<Net, Objective, td::optim::AdamW, td::Policies<P>>);

/// As the policy it is made from.
template <class P>
struct Same : P {};
template <class P>
struct Unchecked : P {
  void check() const = delete;
};
template <class P>
struct Unmade : P {
  struct State {};
};
/// In statements of their own, since clang gives up on an expression at its first error.
template <template <class> class Broken>
void each_axis() {
  static_cast<void>(made<Broken<td::precision::Fp32>>);
  static_cast<void>(made<Broken<td::parallelism::SingleDevice>>);
  static_cast<void>(made<Broken<td::accumulation::NoAccumulation>>);
  static_cast<void>(made<Broken<td::checkpointing::NoCheckpointing>>);
  static_cast<void>(made<Broken<td::execution::Eager>>);
  static_cast<void>(made<Broken<td::clipping::NoClipping>>);
  static_cast<void>(made<Broken<td::nonfinite::Ignore>>);
  static_cast<void>(made<Broken<td::averaging::NoAveraging>>);
}

#if CASE == 0
template void each_axis<Same>();
#elif CASE == 1
// expect: treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false
// expect: treadle::Trainer: the parallelism policy lacks a call; parallelism/concept.hpp lists them.
// expect: treadle::Trainer: the accumulation policy lacks a call; accumulation/concept.hpp lists them.
// expect: treadle::Trainer: the checkpointing policy lacks a call; checkpointing/concept.hpp lists them.
// expect: treadle::Trainer: the execution policy lacks a call; execution/concept.hpp lists them.
// expect: treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false
// expect: treadle::Trainer: the non-finite policy lacks a call; nonfinite/concept.hpp lists them.
// expect: treadle::Trainer: the averaging policy lacks a call; averaging/concept.hpp lists them.
template void each_axis<Unchecked>();
#elif CASE == 2
// expect: treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false
// expect: treadle::Trainer: the parallelism policy lacks a call; parallelism/concept.hpp lists them.
// expect: treadle::Trainer: the accumulation policy lacks a call; accumulation/concept.hpp lists them.
// expect: treadle::Trainer: the checkpointing policy lacks a call; checkpointing/concept.hpp lists them.
// expect: treadle::Trainer: the execution policy lacks a call; execution/concept.hpp lists them.
// expect: treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false
// expect: treadle::Trainer: the non-finite policy lacks a call; nonfinite/concept.hpp lists them.
// expect: treadle::Trainer: the averaging policy lacks a call; averaging/concept.hpp lists them.
template void each_axis<Unmade>();
#elif CASE == 3
// One call of the state each.
// expect: treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false
struct NoPublish : td::precision::Fp32 {
  struct State : td::precision::Fp32::State {
    using td::precision::Fp32::State::State;
    void publish() const = delete;
  };
};
inline auto a = made<NoPublish>;
// expect: treadle::Trainer: the parallelism policy lacks a call; parallelism/concept.hpp lists them.
struct NoAgreement : td::parallelism::SingleDevice {
  struct State : td::parallelism::SingleDevice::State {
    using td::parallelism::SingleDevice::State::State;
    double agree(double) const = delete;
  };
};
inline auto b = made<NoAgreement>;
// expect: treadle::Trainer: the accumulation policy lacks a call; accumulation/concept.hpp lists them.
struct NoReset : td::accumulation::NoAccumulation {
  struct State : td::accumulation::NoAccumulation::State {
    using td::accumulation::NoAccumulation::State::State;
    void reset() const = delete;
  };
};
inline auto c = made<NoReset>;
// expect: treadle::Trainer: the checkpointing policy lacks a call; checkpointing/concept.hpp lists them.
struct NoCheap : td::checkpointing::NoCheckpointing {
  struct State : td::checkpointing::NoCheckpointing::State {
    using td::checkpointing::NoCheckpointing::State::State;
    void cheap() const = delete;
  };
};
inline auto d = made<NoCheap>;
// expect: treadle::Trainer: the execution policy lacks a call; execution/concept.hpp lists them.
struct NoRun : td::execution::Eager {
  struct State {
    explicit State(const NoRun&) {}
    void reset() {}
    void run(const td::Batch&, bool) {}  // without what it is to run
  };
};
inline auto e = made<NoRun>;
// expect: treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false
struct ByValue : td::clipping::NoClipping {
  struct State : td::clipping::NoClipping::State {
    using td::clipping::NoClipping::State::State;
    at::Tensor clip(at::TensorList, const at::Tensor*) const;  // where a pointer is asked for
  };
};
inline auto f = made<ByValue>;
// expect: treadle::Trainer: the non-finite policy lacks a call; nonfinite/concept.hpp lists them.
struct NoReport : td::nonfinite::Ignore {
  struct State : td::nonfinite::Ignore::State {
    using td::nonfinite::Ignore::State::State;
    void report() const = delete;
  };
};
inline auto g = made<NoReport>;
// expect: treadle::Trainer: the averaging policy lacks a call; averaging/concept.hpp lists them.
struct OneWay : td::averaging::NoAveraging {
  struct State : td::averaging::NoAveraging::State {
    using td::averaging::NoAveraging::State::State;
    void use_weights() const = delete;
  };
};
inline auto h = made<OneWay>;
#elif CASE == 4
// A fact that promises calls which are not there, and facts that are no facts.
// expect: treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false
struct Unscaled : td::precision::Fp32 {
  static constexpr bool scales_loss = true;
};
inline auto a = made<Unscaled>;
// expect: treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false
struct Unmeasured : td::clipping::NoClipping {
  static constexpr bool measures_norm = true;
};
inline auto b = made<Unmeasured>;
struct Opaque {};
// expect: treadle::Trainer: the averaging policy lacks a call; averaging/concept.hpp lists them.
struct NoFact : td::averaging::NoAveraging {
  static constexpr Opaque averages{};
};
inline auto c = made<NoFact>;
#elif CASE == 5
// Calls that a fact denies, a fact without its call, and a call that takes one kind of window only.
// expect: treadle::Trainer: the precision policy lacks a call, or has loss_scale() although scales_loss is false
struct DeniesItsScale : td::precision::Fp16 {
  static constexpr bool scales_loss = false;
};
inline auto a = made<DeniesItsScale>;
// expect: treadle::Trainer: the clipping policy lacks a call, or has measured() although measures_norm is false
struct DeniesItsNorm : td::clipping::ClipNorm {
  static constexpr bool measures_norm = false;
};
inline auto b = made<DeniesItsNorm>;
// expect: treadle::Trainer: the accumulation policy lacks a call; accumulation/concept.hpp lists them.
struct DropsNothing : td::accumulation::NoAccumulation {
  static constexpr bool drops_tail = true;
};
inline auto c = made<DropsNothing>;
// expect: treadle::Trainer: the non-finite policy lacks a call; nonfinite/concept.hpp lists them.
struct OneWindow : td::nonfinite::Ignore {
  struct State : td::nonfinite::Ignore::State {
    using td::nonfinite::Ignore::State::State;
    void judge(const td::detail::Window<true>&, td::detail::Verdict&, bool) const {}
  };
};
inline auto d = made<OneWindow>;
#endif
