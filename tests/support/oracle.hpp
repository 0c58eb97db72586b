// SPDX-License-Identifier: Apache-2.0
// A training loop written by hand in LibTorch, configured at run time, that shares no code with Treadle: it is what the
// crossing tests compare with. It reads whatever it likes on the host and decides there.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <numbers>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/tiny.hpp"

namespace treadle_test::oracle {

enum class Precision { Fp32, Tf32, Bf16, Fp16, Bf16Weights };
enum class Gathering { None, Over, Split };
enum class Rule { AdamW, Adam, Sgd };
enum class Clip { None, Norm, Value };
enum class NonFinite { Ignore, Skip, Stop };
enum class Rate { Constant, CosineWarmup, OneCycle, Table };

struct Recipe {
  Precision precision = Precision::Fp32;
  Rule rule = Rule::AdamW;
  Clip clip = Clip::None;
  NonFinite nonfinite = NonFinite::Ignore;
  Rate rate = Rate::Constant;
  bool averages = false;
  bool textbook = false;  ///< plain fp64 arithmetic instead of ATen's fused operations

  double learning_rate = 1e-2;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool amsgrad = false;
  double clip_at = 1.0;
  double decay = 0.9;  ///< of the moving average
  double scale = 1024;
  double growth = 2;
  double backoff = 0.5;
  int growth_interval = 3;
  std::set<std::string> keep_fp32{};  ///< parameters that Bf16Weights leaves alone
};

/// The factor on the base rate for applied step `t`, with the numbers that the tests use.
inline constexpr int rate_steps = 9;
inline constexpr int rate_warmup = 3;
inline constexpr double rate_floor = 0.125;
inline const std::vector<double> rate_table{0.5, 1.0, 0.75, 0.3, 0.1};

inline double rate_factor(Rate rate, int t) {
  constexpr double pi = std::numbers::pi;
  switch (rate) {
    case Rate::Constant:
      return 1;
    case Rate::CosineWarmup: {
      if (t < rate_warmup) return (t + 1.0) / (rate_warmup + 1.0);
      const double share = std::min(1.0, static_cast<double>(t - rate_warmup) / (rate_steps - rate_warmup));
      return rate_floor + (1 - rate_floor) * 0.5 * (1 + std::cos(pi * share));
    }
    case Rate::OneCycle: {  // torch.optim.lr_scheduler.OneCycleLR: two cosines between three rates
      const double low = 1.0 / 25;
      const double lowest = low / 1e4;
      const double top_at = 0.3 * rate_steps - 1;
      const double end_at = rate_steps - 1;
      const auto anneal = [](double a, double b, double share) { return b + (a - b) / 2 * (1 + std::cos(pi * share)); };
      if (t <= top_at) return anneal(low, 1, t / top_at);
      return t >= end_at ? lowest : anneal(1, lowest, (t - top_at) / (end_at - top_at));
    }
    case Rate::Table:
      return rate_table[std::min<std::size_t>(static_cast<std::size_t>(t), rate_table.size() - 1)];
  }
  return 0;
}

/// What one step left behind, on either side of a comparison.
struct Record {
  double loss = 0;
  double grad_norm = 0;
  bool skipped = false;
  double scale = 0;
  State weights;  ///< masters where there are some
  State model;    ///< what the model computes with
  State buffers;
  State averages;
};

/// `Net` is a module holder. `loss(net, batch)` is the mean over what `count(batch)` counts, 0 where that is 0.
template <class Net, class Batch = td::Batch>
class Loop {
 public:
  using LossFunction = std::function<at::Tensor(Net&, const Batch&)>;
  using CountFunction = std::function<double(const Batch&)>;

  Loop(Net net, Recipe recipe, LossFunction loss, CountFunction count)
      : net_(std::move(net)), recipe_(std::move(recipe)), loss_(std::move(loss)), count_(std::move(count)) {
    const at::NoGradGuard no_grad;
    std::set<void*> seen;
    for (const auto& item : net_->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      Slot slot;
      slot.name = item.key();
      slot.model = item.value();
      slot.master = item.value();
      if (recipe_.precision == Precision::Bf16Weights && !recipe_.keep_fp32.contains(item.key()) &&
          item.value().scalar_type() == at::kFloat) {
        const auto master = item.value().detach().clone();
        slot.model.set_data(master.to(at::kBFloat16));
        if (slot.model.requires_grad()) slot.master = master;
      }
      slot.average = slot.master.detach().clone();
      slots_.push_back(std::move(slot));
    }
  }

  int applied() const { return applied_; }
  bool stopped() const { return stopped_at_ >= 0; }
  int stopped_at() const { return stopped_at_; }
  int stopped_micro_batch() const { return stopped_micro_batch_; }
  Net& net() { return net_; }

  /// One step over the micro-batches of a window.
  Record step(const std::vector<Batch>& window) {
    const FlagsOfTf32 flags(recipe_.precision == Precision::Tf32);
    const State buffers_before = buffers(*net_);
    double total = 0;
    for (const auto& batch : window) total += count_(batch);
    Record record;
    bool bad_loss = false;
    int bad_micro_batch = -1;
    for (std::size_t i = 0; i < window.size(); ++i) {
      if (td::rows(window[i]) == 0) continue;
      at::Tensor loss = forward(window[i]);
      if (loss.scalar_type() != at::kDouble) loss = loss.to(at::kFloat);
      const double value = loss.template item<double>();
      if (!std::isfinite(value) && !bad_loss) {
        bad_loss = true;
        bad_micro_batch = static_cast<int>(i);
      }
      const double count = count_(window[i]);
      const double share = total > 0 ? count / total : 0;
      if (count > 0) record.loss += value * share;
      if (share != 1) loss = loss * share;
      if (recipe_.precision == Precision::Fp16) loss = loss * recipe_.scale;
      loss.backward();
      widen_gradients();
    }
    const bool overflow = unscale();
    record.grad_norm = clip();

    if (recipe_.nonfinite == NonFinite::Stop && !stopped() &&
        (bad_loss || (overflow && recipe_.precision != Precision::Fp16))) {
      stopped_at_ = steps_;
      stopped_micro_batch_ = bad_micro_batch;
    }
    const bool selects = recipe_.nonfinite != NonFinite::Ignore;
    record.skipped = total == 0 || (selects && (overflow || bad_loss)) || stopped();
    if (!record.skipped) {
      update();
      ++applied_;
    } else if (selects) {
      const at::NoGradGuard no_grad;
      for (const auto& item : net_->named_buffers()) item.value().copy_(buffers_before.at(item.key()));
    }
    if (recipe_.precision == Precision::Fp16 && total > 0 && !stopped()) move_scale(overflow);
    for (auto& slot : slots_) {
      slot.model.mutable_grad().reset();
      slot.gradient.reset();
    }
    ++steps_;
    fill(record);
    return record;
  }

  /// Moments by the names that torch.optim gives them, for parameters that have had a gradient.
  State moments() const {
    State state;
    for (const auto& slot : slots_) {
      if (slot.step < 0) continue;
      if (recipe_.rule == Rule::Sgd) {
        if (recipe_.momentum != 0) state["momentum_buffer/" + slot.name] = slot.first.clone();
      } else {
        state["exp_avg/" + slot.name] = slot.first.clone();
        state["exp_avg_sq/" + slot.name] = slot.second.clone();
      }
    }
    return state;
  }
  std::map<std::string, int> steps_by_name() const {
    std::map<std::string, int> steps;
    for (const auto& slot : slots_)
      if (slot.step >= 0) steps[slot.name] = slot.step;
    return steps;
  }

 private:
  struct Slot {
    std::string name;
    at::Tensor model;
    at::Tensor master;
    at::Tensor gradient;  ///< in the master's dtype, true once the window has ended
    at::Tensor first;
    at::Tensor second;
    at::Tensor largest;
    at::Tensor average;
    int step = -1;  ///< updates so far; -1 before the first gradient
  };
  struct FlagsOfTf32 {
    explicit FlagsOfTf32(bool tf32)
        : matmul(at::globalContext().allowTF32CuBLAS()), cudnn(at::globalContext().allowTF32CuDNN()) {
      at::globalContext().setAllowTF32CuBLAS(tf32);
      at::globalContext().setAllowTF32CuDNN(tf32);
    }
    FlagsOfTf32(const FlagsOfTf32&) = delete;
    FlagsOfTf32& operator=(const FlagsOfTf32&) = delete;
    ~FlagsOfTf32() {
      at::globalContext().setAllowTF32CuBLAS(matmul);
      at::globalContext().setAllowTF32CuDNN(cudnn);
    }
    bool matmul;
    bool cudnn;
  };

  at::Tensor forward(const Batch& batch) {
    const bool casts = recipe_.precision == Precision::Bf16 || recipe_.precision == Precision::Fp16;
    if (!casts) {
      if constexpr (requires(Batch & b) { b.data; }) {
        if (recipe_.precision == Precision::Bf16Weights) {
          Batch low = batch;
          low.data = low.data.to(at::kBFloat16);
          return loss_(net_, low);
        }
      }
      return loss_(net_, batch);
    }
    const auto type = device().type();
    const auto dtype = at::autocast::get_autocast_dtype(type);
    at::autocast::set_autocast_enabled(type, true);
    at::autocast::set_autocast_dtype(type, recipe_.precision == Precision::Bf16 ? at::kBFloat16 : at::kHalf);
    at::autocast::increment_nesting();
    auto loss = loss_(net_, batch);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type, false);
    at::autocast::set_autocast_dtype(type, dtype);
    return loss;
  }

  // Sums the micro-batches in the masters' dtype.
  void widen_gradients() {
    const at::NoGradGuard no_grad;
    for (auto& slot : slots_) {
      if (!slot.model.grad().defined()) continue;
      const auto gradient = slot.model.grad().to(slot.master.scalar_type());
      slot.gradient = slot.gradient.defined() ? slot.gradient + gradient : gradient.clone();
      slot.model.mutable_grad().reset();
    }
  }

  bool unscale() {
    const at::NoGradGuard no_grad;
    const auto options = at::TensorOptions().device(device()).dtype(at::kFloat);
    auto found_inf = at::zeros({}, options);
    const auto inverse = at::full({}, recipe_.precision == Precision::Fp16 ? 1.0 / recipe_.scale : 1.0, options);
    for (auto& slot : slots_) {
      if (!slot.gradient.defined()) continue;
      if (slot.gradient.scalar_type() == at::kDouble) {
        if (!at::isfinite(slot.gradient).all().template item<bool>()) found_inf.fill_(1);
      } else {
        std::vector<at::Tensor> one{slot.gradient};
        at::_amp_foreach_non_finite_check_and_unscale_(one, found_inf, inverse);
      }
    }
    return found_inf.template item<float>() != 0;
  }

  double clip() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> norms;
    for (const auto& slot : slots_)
      if (slot.gradient.defined()) norms.push_back(at::linalg_vector_norm(slot.gradient));
    if (norms.empty()) return 0;
    const auto norm = at::linalg_vector_norm(at::stack(norms));
    if (recipe_.clip == Clip::Norm) {
      const auto coefficient = at::clamp_max(recipe_.clip_at / (norm + 1e-6), 1.0);
      for (auto& slot : slots_)
        if (slot.gradient.defined()) slot.gradient.mul_(coefficient);
    }
    if (recipe_.clip == Clip::Value)
      for (auto& slot : slots_)
        if (slot.gradient.defined()) slot.gradient.clamp_(-recipe_.clip_at, recipe_.clip_at);
    return norm.template item<double>();
  }

  void update() {
    const at::NoGradGuard no_grad;
    const double rate = recipe_.learning_rate * rate_factor(recipe_.rate, applied_);
    for (auto& slot : slots_) {
      if (slot.gradient.defined()) {
        if (slot.step < 0) {
          const auto dtype = recipe_.textbook ? at::kDouble : slot.master.scalar_type();
          slot.step = 0;
          slot.first = at::zeros_like(slot.master, at::TensorOptions().dtype(dtype));
          slot.second = slot.first.clone();
          slot.largest = slot.first.clone();
        }
        ++slot.step;
        if (recipe_.textbook)
          textbook(slot, static_cast<float>(rate));
        else
          fused(slot, rate);
        if (!slot.master.is_same(slot.model)) slot.model.copy_(slot.master);
      }
      if (slot.model.requires_grad()) slot.average.lerp_(slot.master, 1 - recipe_.decay);
    }
  }

  void fused(Slot& slot, double rate_value) {
    const auto options = at::TensorOptions().device(device()).dtype(at::kFloat);
    const auto rate = at::full({}, rate_value, options);  // a tensor: the other overload rounds differently
    std::vector<at::Tensor> parameter{slot.master.detach()};
    std::vector<at::Tensor> gradient{slot.gradient};
    std::vector<at::Tensor> first{slot.first};
    std::vector<at::Tensor> second{slot.second};
    std::vector<at::Tensor> largest;
    if (recipe_.amsgrad) largest.push_back(slot.largest);
    std::vector<at::Tensor> step{at::full({}, slot.step, options)};
    const auto& r = recipe_;
    switch (r.rule) {
      case Rule::AdamW:
        at::_fused_adamw_(parameter, gradient, first, second, largest, step, rate, r.beta1, r.beta2, r.weight_decay,
                          r.eps, r.amsgrad, false);
        break;
      case Rule::Adam:
        at::_fused_adam_(parameter, gradient, first, second, largest, step, rate, r.beta1, r.beta2, r.weight_decay,
                         r.eps, r.amsgrad, false);
        break;
      case Rule::Sgd:
        if (r.momentum == 0) first.clear();
        at::_fused_sgd_(parameter, gradient, first, r.weight_decay, r.momentum, rate, r.dampening, r.nesterov, false,
                        slot.step == 1);
        break;
    }
  }

  // The formulas of the papers, in fp64.
  void textbook(Slot& slot, double rate) {
    auto weight = slot.master.detach().to(at::kDouble);
    auto gradient = slot.gradient.to(at::kDouble);
    const auto& r = recipe_;
    if (r.rule == Rule::AdamW)
      weight = weight * (1 - rate * r.weight_decay);
    else
      gradient = gradient + r.weight_decay * weight;
    if (r.rule == Rule::Sgd) {
      if (r.momentum != 0) {
        slot.first = slot.step == 1 ? gradient.clone() : r.momentum * slot.first + (1 - r.dampening) * gradient;
        gradient = r.nesterov ? gradient + r.momentum * slot.first : slot.first;
      }
      weight = weight - rate * gradient;
    } else {
      slot.first = r.beta1 * slot.first + (1 - r.beta1) * gradient;
      slot.second = r.beta2 * slot.second + (1 - r.beta2) * gradient * gradient;
      const auto mean = slot.first / (1 - std::pow(r.beta1, slot.step));
      auto square = slot.second / (1 - std::pow(r.beta2, slot.step));
      if (r.amsgrad) {
        slot.largest = at::maximum(slot.largest, slot.second);
        square = slot.largest / (1 - std::pow(r.beta2, slot.step));
      }
      weight = weight - rate * mean / (square.sqrt() + r.eps);
    }
    slot.master.detach().copy_(weight);
  }

  // GradScaler.update() in plain numbers.
  void move_scale(bool overflow) {
    if (overflow) {
      recipe_.scale *= recipe_.backoff;
      good_steps_ = 0;
    } else if (++good_steps_ == recipe_.growth_interval) {
      recipe_.scale *= recipe_.growth;
      good_steps_ = 0;
    }
  }

  void fill(Record& record) {
    record.scale = recipe_.scale;
    for (const auto& slot : slots_) {
      record.weights[slot.name] = slot.master.detach().clone();
      record.model[slot.name] = slot.model.detach().clone();
      if (recipe_.averages && slot.model.requires_grad()) record.averages[slot.name] = slot.average.clone();
    }
    record.buffers = buffers(*net_);
  }

  Net net_;
  Recipe recipe_;
  LossFunction loss_;
  CountFunction count_;
  std::vector<Slot> slots_;
  int applied_ = 0;
  int steps_ = 0;
  int good_steps_ = 0;
  int stopped_at_ = -1;
  int stopped_micro_batch_ = -1;
};

/// The loop for `CrossEntropy`: mean over rows.
template <class Net>
Loop<Net> classifier(Net net, Recipe recipe) {
  return Loop<Net>(
      std::move(net), std::move(recipe),
      [](Net& n, const td::Batch& b) { return torch::nn::functional::cross_entropy(n->forward(b.data), b.target); },
      [](const td::Batch& b) { return static_cast<double>(b.target.size(0)); });
}
/// The loop for `TokenLoss`: mean over targets that are not -100.
template <class Net>
Loop<Net> token_model(Net net, Recipe recipe) {
  const auto counted = [](const td::Batch& b) {
    return static_cast<double>((b.target != -100).sum().template item<std::int64_t>());
  };
  return Loop<Net>(
      std::move(net), std::move(recipe),
      [counted](Net& n, const td::Batch& b) {
        const auto logits = n->forward(b.data).flatten(0, -2);
        const auto picked = torch::log_softmax(logits, 1).gather(1, b.target.flatten().clamp_min(0).unsqueeze(1));
        const auto keep = (b.target.flatten() != -100).to(picked.scalar_type());
        return -(picked.squeeze(1) * keep).sum() / std::max(1.0, counted(b));
      },
      counted);
}

/// What Treadle left behind after a step, in the same form.
template <class Trainer>
Record record_of(Trainer& trainer, const td::StepResult& done) {
  Record record;
  record.loss = done.loss.defined() ? done.loss.template item<double>() : 0;
  record.grad_norm = done.grad_norm.defined() ? done.grad_norm.template item<double>() : 0;
  record.skipped = done.skipped.defined() && done.skipped.template item<float>() != 0;
  if constexpr (Trainer::Precision::scales_loss) record.scale = trainer.precision().loss_scale().template item<float>();
  record.weights = masters(trainer);
  record.model = weights(trainer.model());
  record.buffers = buffers(trainer.model());
  record.averages = state_of(trainer.averaging());
  return record;
}

/// Runs loader batches through `accumulate`, one record a step.
template <class Trainer, class Batch>
std::vector<Record> run(Trainer& trainer, const std::vector<Batch>& batches) {
  std::vector<Record> records;
  for (std::size_t i = 0; i < batches.size(); ++i)
    if (auto done = trainer.accumulate(batches[i], i + 1 == batches.size()))
      records.push_back(record_of(trainer, *done));
  return records;
}
/// Runs loader batches through the hand-written loop, `per_window` of them a step.
template <class Loop, class Batch>
std::vector<Record> run_windows(Loop& loop, const std::vector<Batch>& batches, std::size_t per_window) {
  std::vector<Record> records;
  for (std::size_t i = 0; i < batches.size(); i += per_window) {
    const auto end = std::min(batches.size(), i + per_window);
    records.push_back(loop.step(
        {batches.begin() + static_cast<std::ptrdiff_t>(i), batches.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
  return records;
}
/// Runs loader batches through the hand-written loop, each cut into `parts` slices that differ by at most a row.
template <class Loop>
std::vector<Record> run_slices(Loop& loop, const std::vector<td::Batch>& batches, std::int64_t parts) {
  std::vector<Record> records;
  for (const auto& batch : batches) {
    const auto rows = batch.data.size(0);
    const auto n = std::max<std::int64_t>(1, std::min(parts, rows));
    std::vector<td::Batch> slices;
    std::int64_t begin = 0;
    for (std::int64_t i = 1; i <= n; ++i) {
      const auto end = rows * i / n;
      slices.push_back({batch.data.slice(0, begin, end), batch.target.slice(0, begin, end)});
      begin = end;
    }
    records.push_back(loop.step(slices));
  }
  return records;
}

inline bool near(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance);
}

/// Demands bitwise equality of the first `exact` steps and a `distance` of at most `tolerance` afterwards.
inline void check_same(const std::vector<Record>& got, const std::vector<Record>& want, const State& start,
                       std::size_t exact, double tolerance) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(got[i].skipped == want[i].skipped);
    if (i < exact) {
      REQUIRE(difference(got[i].weights, want[i].weights) == "");
      REQUIRE(difference(got[i].model, want[i].model) == "");
      REQUIRE(difference(got[i].buffers, want[i].buffers) == "");
      REQUIRE(difference(got[i].averages, want[i].averages) == "");
    } else {
      REQUIRE(finite(got[i].weights));
      if (difference(want[i].weights, start) != "")
        REQUIRE(distance(got[i].weights, want[i].weights, start) <= tolerance);
      for (const auto& item : want[i].buffers)
        REQUIRE_MESSAGE(near(got[i].buffers.at(item.first), item.second, tolerance), item.first);
      REQUIRE(got[i].averages.size() == want[i].averages.size());
      for (const auto& item : want[i].averages)
        REQUIRE_MESSAGE(near(got[i].averages.at(item.first), item.second, tolerance), item.first);
    }
    if (!want[i].skipped || std::isfinite(want[i].loss))
      CHECK(got[i].loss == doctest::Approx(want[i].loss).epsilon(std::max(tolerance, 1e-5)));
  }
}

}  // namespace treadle_test::oracle
