// SPDX-License-Identifier: Apache-2.0
// A concept takes what the trainer can use, and nothing that lacks one call or fact of it.
#include <torch/optim/rmsprop.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/tiny.hpp"

namespace {
namespace td = treadle;

struct Make {
  auto operator()(std::vector<at::Tensor>& parameters) const { return torch::optim::RMSprop(parameters); }
};
static_assert(td::update_rule<td::optim::AdamW> && td::update_rule<td::optim::Adam> && td::update_rule<td::optim::Sgd>);
static_assert(td::update_rule<td::optim::Adapter<Make>>);
static_assert(td::update_rule<td::optim::Adapter<Make, td::optim::HostSync::Allowed>>);

/// `Sgd` with a state in which `change` stands.
#define RULE(name, ...)                                    \
  struct name : td::optim::Sgd {                           \
    struct State : td::optim::FusedState<td::optim::Sgd> { \
      using FusedState::FusedState;                        \
      __VA_ARGS__                                          \
    };                                                     \
  }
RULE(Unchanged, );
static_assert(td::update_rule<Unchanged>);
RULE(NoCollect, template <class P> at::TensorList collect(P&) = delete;);
static_assert(!td::update_rule<NoCollect>);
RULE(NoStep, void step(const at::Tensor*, const at::Tensor*, const at::Tensor*) = delete;);
static_assert(!td::update_rule<NoStep>);
RULE(NoExposure, const at::Tensor* expose(const at::Tensor*) = delete;);
static_assert(!td::update_rule<NoExposure>);
RULE(NoRelease, void release() = delete;);
static_assert(!td::update_rule<NoRelease>);
RULE(NoNames, std::vector<std::string> without_gradient() const = delete;);
static_assert(!td::update_rule<NoNames>);
RULE(NoVisit, template <class V> void for_each_state(V&&) = delete;);
static_assert(!td::update_rule<NoVisit>);
RULE(NoRates, td::optim::LearningRate& rates() = delete;);
static_assert(!td::update_rule<NoRates>);

#define RATES(name, ...)                         \
  struct name##Rates : td::optim::LearningRate { \
    __VA_ARGS__                                  \
  };                                             \
  RULE(name, name##Rates& rates();)
RATES(SameRates, );
static_assert(td::update_rule<SameRates>);
RATES(NoPlan, void plan(std::int64_t) = delete;);
static_assert(!td::update_rule<NoPlan>);
RATES(NotPlanned, bool planned() const = delete;);
static_assert(!td::update_rule<NotPlanned>);
RATES(NoRunCheck, void check_run(std::int64_t) const = delete;);
static_assert(!td::update_rule<NoRunCheck>);
RATES(FollowsNothing, bool follows_run() const = delete;);
static_assert(!td::update_rule<FollowsNothing>);
RATES(NoRate, const at::Tensor& of(std::size_t) const = delete;);
static_assert(!td::update_rule<NoRate>);
RATES(NoScale, void scale(double) = delete;);
static_assert(!td::update_rule<NoScale>);

struct NoFact : td::optim::Sgd {
  static constexpr bool host_stepped = true;  // may it wait for the device?
};
static_assert(!td::update_rule<NoFact>);
struct Waits : NoFact {
  static constexpr bool may_synchronize = true;
};
static_assert(td::update_rule<Waits>);

/// A model of one's own; `train` is what it can be told.
template <class Train>
struct Own {
  std::vector<torch::jit::Named<at::Tensor>> named_parameters() const { return {}; }
  std::vector<torch::jit::Named<at::Tensor>> named_buffers() const { return {}; }
  Train train{};
  void eval() {}
  bool is_training() const { return true; }
  void to(at::Device) {}
};
struct OnOnly {
  void operator()() const {}
};
struct OnOrOff {
  void operator()(bool = true) const {}
};
static_assert(td::model<Own<OnOrOff>> && !td::model<Own<OnOnly>>);
struct Unnamed : Own<OnOrOff> {
  std::vector<at::Tensor> named_parameters() const { return {}; }
};
static_assert(!td::model<Unnamed>);
static_assert(td::model<torch::nn::LinearImpl> && td::model<torch::jit::Module>);

struct DropsNothing : td::accumulation::NoAccumulation {
  static constexpr bool drops_tail = true;
};
static_assert(td::accumulation_policy<td::accumulation::AccumulateOver>);
static_assert(!td::accumulation_policy<DropsNothing>);

template <bool Windows>
struct OneWindow : td::nonfinite::Ignore {
  struct State : td::nonfinite::Ignore::State {
    using td::nonfinite::Ignore::State::State;
    void judge(const td::detail::Window<Windows>&, td::detail::Verdict&, bool) const {}
  };
};
static_assert(td::nonfinite_policy<td::nonfinite::Stop>);
static_assert(!td::nonfinite_policy<OneWindow<true>> && !td::nonfinite_policy<OneWindow<false>>);

// Facts and calls agree both ways: the trainer looks at the facts alone.
struct DeniesItsScale : td::precision::Fp16 {
  static constexpr bool scales_loss = false;
};
struct HasNoScale : td::precision::Fp32 {
  static constexpr bool scales_loss = true;
};
static_assert(td::precision_policy<td::precision::Fp16> && td::precision_policy<td::precision::Fp32>);
static_assert(!td::precision_policy<DeniesItsScale> && !td::precision_policy<HasNoScale>);
struct DeniesItsNorm : td::clipping::ClipNorm {
  static constexpr bool measures_norm = false;
};
struct HasNoNorm : td::clipping::NoClipping {
  static constexpr bool measures_norm = true;
};
static_assert(td::clipping_policy<td::clipping::ClipNorm> && td::clipping_policy<td::clipping::ClipValue>);
static_assert(!td::clipping_policy<DeniesItsNorm> && !td::clipping_policy<HasNoNorm>);
}  // namespace

TEST_CASE("what stands above was asserted when this was compiled") {}
