// SPDX-License-Identifier: Apache-2.0
// Every policy and rule keeps its contract, and each promise that a policy can break is caught when it does.
#include "treadle/testing/contract.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "support/tiny.hpp"

namespace td = treadle;
namespace testing = td::testing;

namespace {

std::string joined(const testing::Violations& violations) {
  std::string text;
  for (const auto& sentence : violations) text += sentence + "\n";
  return text;
}
bool names(const testing::Violations& violations, const std::string& part) {
  return joined(violations).find(part) != std::string::npos;
}

}  // namespace

#define CHECK_KEPT(call) CHECK(joined(call) == "")
#define CHECK_CAUGHT(call, sentence) CHECK_MESSAGE(names(call, sentence), joined(call))

TEST_CASE("our own policies and rules keep their contracts") {
  const auto device = treadle_test::device();
  CHECK_KEPT(testing::check_precision_contract(td::precision::Fp32{}, device));
  CHECK_KEPT(testing::check_precision_contract(td::precision::Tf32{}, device));
  CHECK_KEPT(testing::check_precision_contract(td::precision::Bf16{}, device));
  CHECK_KEPT(testing::check_precision_contract(td::precision::Fp16{.growth_interval = 2}, device));
  CHECK_KEPT(testing::check_precision_contract(td::precision::Bf16Weights{}, device));
  CHECK_KEPT(testing::check_precision_contract(td::precision::Bf16Weights{.keep_fp32 = {"*.bias"}}, device));

  CHECK_KEPT(testing::check_accumulation_contract(td::accumulation::NoAccumulation{}));
  CHECK_KEPT(testing::check_accumulation_contract(td::accumulation::AccumulateOver{}));
  CHECK_KEPT(testing::check_accumulation_contract(td::accumulation::AccumulateOver{.batches = 4}));
  CHECK_KEPT(testing::check_accumulation_contract(td::accumulation::SplitBatch{.micro_batches = 3}));

  CHECK_KEPT(testing::check_clipping_contract(td::clipping::NoClipping{}, device));
  CHECK_KEPT(testing::check_clipping_contract(td::clipping::ClipNorm{}, device));
  CHECK_KEPT(testing::check_clipping_contract(td::clipping::ClipValue{.max_value = 0.5}, device));

  CHECK_KEPT(testing::check_nonfinite_contract(td::nonfinite::Ignore{}, device));
  CHECK_KEPT(testing::check_nonfinite_contract(td::nonfinite::Skip{}, device));
  CHECK_KEPT(testing::check_nonfinite_contract(td::nonfinite::Stop{}, device));
  CHECK_KEPT(testing::check_nonfinite_contract(td::nonfinite::Stop{.check_every_step = true}, device));

  CHECK_KEPT(testing::check_averaging_contract(td::averaging::NoAveraging{}, device));
  CHECK_KEPT(testing::check_averaging_contract(td::averaging::ExponentialAverage{.decay = 0.5}, device));

  CHECK_KEPT(testing::check_parallelism_contract(td::parallelism::SingleDevice{.device = device}));
  CHECK_KEPT(testing::check_checkpointing_contract(td::checkpointing::NoCheckpointing{}, device));
  CHECK_KEPT(testing::check_execution_contract(td::execution::Eager{}, device));

  CHECK_KEPT(testing::check_rule_contract(td::optim::AdamW{}, device));
  CHECK_KEPT(testing::check_rule_contract(td::optim::AdamW{.amsgrad = true}, device));
  CHECK_KEPT(testing::check_rule_contract(td::optim::Adam{.weight_decay = 0.1}, device));
  CHECK_KEPT(testing::check_rule_contract(td::optim::Sgd{}, device));
  CHECK_KEPT(testing::check_rule_contract(
      td::optim::Sgd{.momentum = 0.9, .dampening = 0.5, .schedule = td::schedule::linear({.steps = 5})}, device));
  CHECK_KEPT(testing::check_rule_contract(td::optim::Sgd{.momentum = 0.9, .nesterov = true}, device));
}

namespace {

/// What most broken precisions share with Fp32.
struct PlainPrecision {
  using policy_axis = td::axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;
  void check() const {}
};
struct LeavesAutocastOn : PlainPrecision {
  struct State : td::precision::Fp32::State {
    State(const LeavesAutocastOn&, td::ParameterList& p, const td::BufferList& b, bool w)
        : td::precision::Fp32::State({}, p, b, w), device(p.device().type()) {}
    td::NoGuard autocast() const {
      at::autocast::set_autocast_enabled(device, true);
      return {};
    }
    at::DeviceType device;
  };
};
struct StaysInTheCallersRegion : PlainPrecision {
  struct State : td::precision::Fp32::State {
    State(const StaysInTheCallersRegion&, td::ParameterList& p, const td::BufferList& b, bool w)
        : td::precision::Fp32::State({}, p, b, w) {}
    td::MathFlags math() const { return td::MathFlags(false); }
  };
};
struct LosesGradients : PlainPrecision {
  struct State : td::precision::Fp32::State {
    State(const LosesGradients&, td::ParameterList& p, const td::BufferList& b, bool w)
        : td::precision::Fp32::State({}, p, b, w) {}
    void gradients(std::span<at::Tensor> gradients) const {
      for (auto& gradient : gradients) gradient = at::nan_to_num(gradient);
    }
  };
};
struct RoundsItsMasters {
  using policy_axis = td::axis::Precision;
  static constexpr bool scales_loss = false;
  static constexpr bool master_weights = true;
  static constexpr bool casts_inputs = true;
  void check() const {}
  struct State : td::precision::Bf16Weights::State {
    State(const RoundsItsMasters&, td::ParameterList& p, const td::BufferList& b, bool w)
        : td::precision::Bf16Weights::State({}, p, b, w), parameters(&p) {}
    void publish() const {  // forgets to
    }
    template <class Batch>
    void cast_inputs(Batch& batch) const {
      batch.data = batch.data.to(at::kBFloat16);
      batch.target = batch.target.to(at::kBFloat16);
    }
    td::ParameterList* parameters;
  };
};
struct CollapsingScale {
  using policy_axis = td::axis::Precision;
  static constexpr bool scales_loss = true;
  static constexpr bool master_weights = false;
  static constexpr bool casts_inputs = false;
  void check() const {}
  struct State : td::precision::Fp16::State {
    State(const CollapsingScale&, td::ParameterList& p, const td::BufferList& b, bool w)
        : td::precision::Fp16::State({}, p, b, w), scale(at::full({}, 4.0, at::device(p.device()))) {}
    const at::Tensor& loss_scale() const { return scale; }
    void update_scale(const at::Tensor& found_inf) { scale = (scale - found_inf).clamp_min(0); }
    at::Tensor scale;
  };
};

template <class Ours>
struct AsOver {
  using policy_axis = td::axis::Accumulation;
  static constexpr bool windows = true;
  static constexpr bool slices = false;
  static constexpr bool drops_tail = false;
  void check() const {}
};
struct LosesTheTail : AsOver<LosesTheTail> {
  struct State {
    explicit State(const LosesTheTail&) {}
    template <class Batch, class MicroBatch>
    void feed(const Batch& batch, bool, MicroBatch&& micro_batch) {
      filled = (filled + 1) % 2;
      micro_batch(batch, filled == 0);
    }
    bool open() const { return filled != 0; }
    void reset() { filled = 0; }
    long batches_per_step() const { return 2; }
    int filled = 0;
  };
};
struct LosesARow : AsOver<LosesARow> {
  struct State {
    explicit State(const LosesARow&) {}
    template <class Batch, class MicroBatch>
    void feed(const Batch& batch, bool, MicroBatch&& micro_batch) {
      const auto half = td::rows(batch) / 2;
      micro_batch(td::slice_rows(batch, 0, half), false);
      micro_batch(td::slice_rows(batch, half, half + half), true);
    }
    bool open() const { return false; }
    void reset() {}
    long batches_per_step() const { return 1; }
  };
};
struct KeepsItsWindow : AsOver<KeepsItsWindow> {
  struct State {
    explicit State(const KeepsItsWindow&) {}
    template <class Batch, class MicroBatch>
    void feed(const Batch& batch, bool ends, MicroBatch&& micro_batch) {
      const bool closes = ends || filled == 2;
      filled = closes ? 0 : filled + 1;
      micro_batch(batch, closes);
    }
    bool open() const { return filled != 0; }
    void reset() {}
    long batches_per_step() const { return 3; }
    int filled = 0;
  };
};

struct PlainClipping {
  using policy_axis = td::axis::Clipping;
  static constexpr bool measures_norm = false;
  static constexpr bool rewrites = true;
  void check() const {}
};
struct ClipsScaledGradients : PlainClipping {  // forgets that they are still to be divided
  struct State {
    State(const ClipsScaledGradients&, at::Device) {}
    const at::Tensor* clip(at::TensorList gradients, const at::Tensor* divisor) {
      for (const auto& g : gradients) g.clamp_(-0.5, 0.5);
      return divisor;
    }
  };
};
struct WritesItsDivisor : PlainClipping {
  struct State {
    State(const WritesItsDivisor&, at::Device) {}
    const at::Tensor* clip(at::TensorList, const at::Tensor* divisor) {
      if (divisor) divisor->mul_(2);
      return divisor;
    }
  };
};
struct HidesNan : PlainClipping {
  struct State {
    State(const HidesNan&, at::Device) {}
    const at::Tensor* clip(at::TensorList gradients, const at::Tensor* divisor) {
      for (const auto& g : gradients) g.nan_to_num_();
      return divisor;
    }
  };
};
struct SaysItDoesNotWrite : PlainClipping {
  static constexpr bool rewrites = false;
  struct State {
    State(const SaysItDoesNotWrite&, at::Device) {}
    const at::Tensor* clip(at::TensorList gradients, const at::Tensor* divisor) {
      for (const auto& g : gradients) g.mul_(0.5);
      return divisor;
    }
  };
};

struct PlainNonFinite {
  using policy_axis = td::axis::NonFinite;
  static constexpr bool selects = true;
  static constexpr bool inspects_losses = false;
  void check() const {}
};
struct ForgivesEverything : PlainNonFinite {
  struct State : td::nonfinite::Skip::State {
    State(const ForgivesEverything&, at::Device d) : td::nonfinite::Skip::State({}, d) {}
    template <class Window, class Verdict>
    void judge(const Window&, Verdict& verdict, bool) const {
      verdict.found_inf().zero_();
    }
  };
};
struct OverlooksLosses : PlainNonFinite {
  static constexpr bool inspects_losses = true;
  struct State : td::nonfinite::Skip::State {
    State(const OverlooksLosses&, at::Device d) : td::nonfinite::Skip::State({}, d) {}
  };
};
struct MovesFoundInf : PlainNonFinite {
  struct State : td::nonfinite::Skip::State {
    State(const MovesFoundInf&, at::Device d) : td::nonfinite::Skip::State({}, d) {}
    template <class Window, class Verdict>
    void judge(const Window&, Verdict& verdict, bool) const {
      verdict.found_inf() = verdict.found_inf() + 0.5;
    }
  };
};

/// The equal mean over all steps, which needs a counter, with one mistake or none.
enum class Flaw { None, Frozen, Flat, Nesting, Twice };
template <Flaw flaw>
struct MeanOfAll {
  using policy_axis = td::axis::Averaging;
  static constexpr bool averages = true;
  void check() const {}
  struct State {
    State(const MeanOfAll&, const td::ParameterList& parameters) : count(at::ones({}, parameters.device())) {
      for (const auto& p : parameters) {
        if (!p.model.requires_grad() && flaw != Flaw::Frozen) continue;
        names.push_back(p.name);
        weights.push_back(p.master.detach());
        means.push_back(p.master.detach().clone());
        if (!p.model.requires_grad()) means.back().mul_(1 + 1e-6);
      }
    }
    void update(const at::Tensor* found_inf) {
      const auto good = found_inf ? found_inf->eq(0) : count.ge(0);
      count.copy_(at::where(good, count + 1, count));
      for (std::size_t i = 0; i < means.size(); ++i)
        means[i].copy_(at::where(good, means[i] + (weights[i] - means[i]) / count, means[i]));
    }
    void use_average() {
      if (depth++ > 0) return;
      for (std::size_t i = 0; i < means.size(); ++i) {
        saved.push_back(weights[i].clone());
        weights[i].copy_(means[i]);
      }
    }
    void use_weights() {
      depth = std::max(depth - 1, 0);
      if (depth > 0 && flaw != Flaw::Nesting) return;
      for (std::size_t i = 0; i < saved.size(); ++i) weights[i].copy_(saved[i]);
      saved.clear();
    }
    template <class Visitor>
    void for_each_state(Visitor&& visit) {
      for (std::size_t i = 0; i < means.size(); ++i) {
        if constexpr (flaw == Flaw::Flat) {
          auto flat = means[i].flatten();
          visit(names[i], flat);
        } else {
          visit(names[i], means[i]);
        }
      }
      visit(flaw == Flaw::Twice ? names[0] : std::string("steps"), count);
    }
    at::Tensor count;
    std::vector<std::string> names;
    std::vector<at::Tensor> weights, means, saved;
    int depth = 0;
  };
};

/// The mistake that looks right: a lerp with weight 0 keeps no average if a weight is NaN.
struct LerpsWithZero {
  using policy_axis = td::axis::Averaging;
  static constexpr bool averages = true;
  void check() const {}
  struct State {
    State(const LerpsWithZero&, const td::ParameterList& parameters) {
      for (const auto& p : parameters) {
        names.push_back(p.name);
        weights.push_back(p.master.detach());
        means.push_back(p.master.detach().clone());
      }
    }
    void update(const at::Tensor* found_inf) {
      for (std::size_t i = 0; i < means.size(); ++i) {
        const auto weight = found_inf ? (1 - *found_inf) * 0.5 : at::full({}, 0.5, means[i].options());
        means[i].lerp_(weights[i], weight);
      }
    }
    void use_average() {
      for (std::size_t i = 0; i < means.size(); ++i) {
        saved.push_back(weights[i].clone());
        weights[i].copy_(means[i]);
      }
    }
    void use_weights() {
      for (std::size_t i = 0; i < std::min(saved.size(), weights.size()); ++i) weights[i].copy_(saved[i]).add_(1e-7);
      saved.clear();
    }
    template <class Visitor>
    void for_each_state(Visitor&& visit) {
      for (std::size_t i = 0; i < means.size(); ++i) visit(names[i], means[i]);
    }
    std::vector<std::string> names;
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> means;
    std::vector<at::Tensor> saved;
  };
};

/// Takes the wrong kind of window for the only one.
struct OverlooksSingleLosses : PlainNonFinite {
  static constexpr bool inspects_losses = true;
  struct State : td::nonfinite::Stop::State {
    State(const OverlooksSingleLosses&, at::Device d) : td::nonfinite::Stop::State({}, d) {}
    template <class Window>
    void judge(const Window& window, td::detail::Verdict& verdict, bool loss_scale) {
      if constexpr (std::same_as<Window, td::detail::Window<true>>)
        td::nonfinite::Stop::State::judge(window, verdict, loss_scale);
    }
  };
};

struct RunsHalf {
  using policy_axis = td::axis::Parallelism;
  static constexpr bool replicates = false;
  static constexpr bool slices = true;
  static constexpr bool processes = false;
  static constexpr bool threads = false;
  static constexpr bool finds_unused = false;
  void check() const {}
  struct State : td::parallelism::SingleDevice::State {
    explicit State(const RunsHalf&) : td::parallelism::SingleDevice::State({.device = at::kCPU}) {}
    template <class Model, class Batch, class Context, class Stages>
    void run(Model& model, const Batch& batch, bool reduces, Context& context, const Stages& stages) {
      td::parallelism::SingleDevice::State::run(model, td::slice_rows(batch, 0, td::rows(batch) / 2), reduces, context,
                                                stages);
    }
  };
};

/// Recomputes in the forward pass, without putting the generator back.
struct DrawsTwice {
  using policy_axis = td::axis::Checkpointing;
  static constexpr bool recomputes = true;
  static constexpr bool offloads = false;
  void check() const {}
  struct State : td::checkpointing::NoCheckpointing::State {
    explicit State(const DrawsTwice&) : td::checkpointing::NoCheckpointing::State({}) {}
    template <class Block, class... Inputs>
    at::Tensor operator()(Block&& block, Inputs&&... inputs) const {
      block(inputs...);
      return block(inputs...);
    }
  };
};

struct UpdatesTooEarly {
  using policy_axis = td::axis::Execution;
  static constexpr bool captures = false;
  void check() const {}
  struct State {
    explicit State(const UpdatesTooEarly&) {}
    template <class Batch, class MicroBatch, class Update>
    void run(const Batch& batch, bool closes, MicroBatch&& micro_batch, Update&& update) {
      if (closes) update();
      micro_batch(batch, closes);
    }
    void reset() const {}
  };
};

/// Plain SGD that forgets to ask whether its step counts, or what its gradients are to be divided by.
template <bool Asks, bool Divides>
struct CarelessRule {
  static constexpr bool host_stepped = false;
  void check() const {}
  struct State : td::optim::Sgd::State {
    State(const CarelessRule&, const td::ParameterList& p) : td::optim::Sgd::State({.learning_rate = 0.1}, p) {}
    void step(const at::Tensor* divisor, const at::Tensor* found_inf, const at::Tensor* applied) {
      td::optim::Sgd::State::step(Divides ? divisor : nullptr, Asks ? found_inf : nullptr, Asks ? applied : nullptr);
    }
  };
};

/// Does not listen to its caller about rates, and knows no parameter that is left out.
struct DeafRule {
  static constexpr bool host_stepped = false;
  void check() const {}
  struct Rates : td::optim::LearningRate {
    using LearningRate::LearningRate;
    void scale(double) const {}
  };
  struct State : td::optim::Sgd::State {
    State(const DeafRule&, const td::ParameterList& p)
        : td::optim::Sgd::State({.learning_rate = 0.1}, p), own({}, {0.1}, p.device()) {}
    std::vector<std::string> without_gradient() const { return {}; }
    Rates& rates() { return own; }
    Rates own;
  };
};

/// Drops the tail every other time that it is asked.
struct ChangesItsMind {
  using policy_axis = td::axis::Accumulation;
  static constexpr bool windows = true;
  static constexpr bool slices = false;
  static constexpr bool drops_tail = true;
  void check() const {}
  struct State : td::accumulation::AccumulateOver::State {
    explicit State(const ChangesItsMind&) : td::accumulation::AccumulateOver::State({.batches = 2}) {}
    bool drop_tail() { return drops = !drops; }
    bool drops = false;
  };
};

}  // namespace

TEST_CASE("broken precisions are caught") {
  CHECK_CAUGHT(testing::check_precision_contract(LeavesAutocastOn{}), "must return guards that restore every switch");
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK_CAUGHT(testing::check_precision_contract(StaysInTheCallersRegion{}),
               "math() must turn off the autocast region that a caller stands in");
  CHECK_CAUGHT(testing::check_precision_contract(LosesGradients{}), "gradients() must leave every gradient as it is");
  const auto violations = testing::check_precision_contract(RoundsItsMasters{});
  CHECK_CAUGHT(violations, "publish() must write every master into its weight");
  CHECK_CAUGHT(violations, "cast_inputs() must leave integer tensors alone");
  const auto scale = testing::check_precision_contract(CollapsingScale{});
  CHECK_CAUGHT(scale, "must stay positive and finite");
  CHECK_CAUGHT(scale, "loss_scale() must keep its address");
}

TEST_CASE("broken accumulations are caught") {
  CHECK_CAUGHT(testing::check_accumulation_contract(LosesTheTail{}), "a window must close when `ends` is true");
  CHECK_CAUGHT(testing::check_accumulation_contract(LosesARow{}), "each row exactly once");
  CHECK_CAUGHT(testing::check_accumulation_contract(KeepsItsWindow{}), "reset() must forget an open window");
  CHECK_CAUGHT(testing::check_accumulation_contract(ChangesItsMind{}), "drop_tail() must say the same");
}

TEST_CASE("broken clippings are caught") {
  CHECK_CAUGHT(testing::check_clipping_contract(ClipsScaledGradients{}),
               "must give what clip(gradients / divisor, null)");
  CHECK_CAUGHT(testing::check_clipping_contract(WritesItsDivisor{}), "must not write into its divisor");
  CHECK_CAUGHT(testing::check_clipping_contract(HidesNan{}), "a NaN in a gradient must stay NaN");
  CHECK_CAUGHT(testing::check_clipping_contract(SaysItDoesNotWrite{}), "rewrites is false");
}

TEST_CASE("broken non-finite policies are caught") {
  CHECK_CAUGHT(testing::check_nonfinite_contract(ForgivesEverything{}), "must not clear it");
  CHECK_CAUGHT(testing::check_nonfinite_contract(OverlooksLosses{}), "a NaN loss must set found_inf");
  CHECK_CAUGHT(testing::check_nonfinite_contract(OverlooksSingleLosses{}), "a NaN loss must set found_inf");
  const auto violations = testing::check_nonfinite_contract(MovesFoundInf{});
  CHECK_CAUGHT(violations, "keep its address");
  CHECK_CAUGHT(violations, "found_inf must be 0 or 1");
}

TEST_CASE("a broken average is caught") {
  const auto violations = testing::check_averaging_contract(LerpsWithZero{});
  CHECK_CAUGHT(violations, "even if a weight is NaN");
  CHECK_CAUGHT(violations, "must restore every weight bitwise");
}

TEST_CASE("an average may show a counter, and must nest, leave frozen weights alone and keep shapes") {
  CHECK_KEPT(testing::check_averaging_contract(MeanOfAll<Flaw::None>{}));
  CHECK_CAUGHT(testing::check_averaging_contract(MeanOfAll<Flaw::Frozen>{}), "leave frozen parameters bitwise alone");
  CHECK_CAUGHT(testing::check_averaging_contract(MeanOfAll<Flaw::Flat>{}), "what has its shape");
  CHECK_CAUGHT(testing::check_averaging_contract(MeanOfAll<Flaw::Nesting>{}), "the outermost use_average()");
  CHECK_CAUGHT(testing::check_averaging_contract(MeanOfAll<Flaw::Twice>{}), "visit each name once");
}

TEST_CASE("broken parallelism, checkpointing and execution are caught") {
  const auto halves = testing::check_parallelism_contract(RunsHalf{});
  CHECK_CAUGHT(halves, "each row of its batch exactly once");
  CHECK_CAUGHT(halves, "the mean over everything");
  const auto violations = testing::check_checkpointing_contract(DrawsTwice{});
  CHECK_CAUGHT(violations, "must be those of the plain run");
  CHECK_CAUGHT(violations, "generators must end");
  CHECK_CAUGHT(testing::check_execution_contract(UpdatesTooEarly{}), "before the update");
}

TEST_CASE("broken rules are caught") {
  CHECK_CAUGHT((testing::check_rule_contract(CarelessRule<false, true>{})), "must leave weights and state bitwise");
  CHECK_CAUGHT((testing::check_rule_contract(CarelessRule<true, false>{})), "gradients over the divisor");
  CHECK_KEPT((testing::check_rule_contract(CarelessRule<true, true>{})));
  const auto violations = testing::check_rule_contract(DeafRule{});
  CHECK_CAUGHT(violations, "without_gradient() must name the trained parameters");
  CHECK_CAUGHT(violations, "rates().scale() must multiply the rates at once");
  CHECK_CAUGHT(violations, "rates().scale() must hold for the steps that follow");
}
