// SPDX-License-Identifier: Apache-2.0
// What Treadle's own code costs a step: against hand-written loops of the same ATen calls, with defaults and with
// everything on. Prints operators, heap allocations and time; `--loop NAME --steps N` runs one loop alone, for
// callgrind (overhead.py counts the instructions).
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <treadle/treadle.hpp>

#include "median.hpp"

namespace {
std::atomic<long> allocations{0};
}
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // both ends are replaced, which inlining hides from the check
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace td = treadle;
using at::Tensor;

struct Mlp : torch::nn::Module {
  Mlp()
      : hidden(register_module("hidden", torch::nn::Linear(32, 64))),
        output(register_module("output", torch::nn::Linear(64, 10))) {}
  // The same code for every loop, whatever the inliner makes of what surrounds it.
  [[gnu::noinline]] Tensor forward(const Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden, output;
};

struct CrossEntropy {
  td::Loss operator()(Mlp& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

std::vector<td::Batch> make_batches(at::Device device) {
  torch::manual_seed(1);
  std::vector<td::Batch> batches;
  for (int i = 0; i < 8; ++i) {
    auto x = torch::randn({32, 32});
    batches.push_back({x.to(device), x.slice(1, 0, 10).argmax(1).to(device)});
  }
  return batches;
}

/// AdamW state of a hand-written loop.
struct HandAdamW {
  explicit HandAdamW(Mlp& net, double rate) {
    for (const auto& p : net.parameters()) {
      parameters.push_back(p);
      weights.push_back(p.detach());
      exp_avg.push_back(torch::zeros_like(p));
      exp_avg_sq.push_back(torch::zeros_like(p));
    }
    step = torch::zeros({}, parameters[0].options().requires_grad(false));
    steps.assign(parameters.size(), step);
    learning_rate = torch::full({}, rate, step.options());
  }
  void collect() {
    gradients.clear();
    for (const auto& p : parameters) gradients.push_back(p.grad());
  }
  void release() {
    gradients.clear();
    for (const auto& p : parameters) p.mutable_grad().reset();
  }
  std::vector<Tensor> parameters, weights, exp_avg, exp_avg_sq, steps, gradients;
  Tensor step, learning_rate;
};

/// fp32 products and convolutions in fp32: what `precision::Fp32` promises, by hand. LibTorch starts with TF32
/// convolutions.
struct HandFlags {
  HandFlags() : matmul(at::globalContext().allowTF32CuBLAS()), cudnn(at::globalContext().allowTF32CuDNN()) {
    if (matmul) at::globalContext().setAllowTF32CuBLAS(false);
    if (cudnn) at::globalContext().setAllowTF32CuDNN(false);
  }
  ~HandFlags() {
    if (matmul) at::globalContext().setAllowTF32CuBLAS(true);
    if (cudnn) at::globalContext().setAllowTF32CuDNN(true);
  }
  bool matmul, cudnn;
};

struct HandDefaults {
  explicit HandDefaults(Mlp& net) : net(net), rule(net, 1e-3) {}
  Tensor step(const td::Batch& batch) {
    const HandFlags flags;
    auto loss = at::cross_entropy_loss(net.forward(batch.data), batch.target);
    loss.backward();
    rule.collect();
    {
      const at::NoGradGuard no_grad;
      rule.step.add_(1);
      at::_fused_adamw_(rule.weights, rule.gradients, rule.exp_avg, rule.exp_avg_sq, {}, rule.steps, rule.learning_rate,
                        0.9, 0.999, 1e-2, 1e-8, false, false);
    }
    rule.release();
    return Tensor(loss.tensor_data());
  }
  Mlp& net;
  HandAdamW rule;
};

/// Fp16, windows of 4, norm clipping, skipping, schedule and moving average, with no host read, as a careful author
/// would write it: everything that the step decides stays on the device.
struct HandEverything {
  HandEverything(Mlp& net, std::int64_t total) : net(net), rule(net, 1e-3) {
    const auto options = rule.step.options();
    for (const auto& w : rule.weights) average.push_back(w.clone());
    scale = torch::full({}, 65536.0, options);
    tracker = torch::zeros({}, options.dtype(torch::kInt));
    found_inf = torch::zeros({}, options);
    one = torch::ones({}, options);
    std::vector<float> rates;
    for (double f : td::schedule::cosine({.steps = total, .warmup = 10}).tabulate(0)) rates.push_back(float(1e-3 * f));
    table = torch::tensor(rates, options);
    position = torch::zeros({1}, options.dtype(torch::kLong));
    skipped = torch::zeros({}, options.dtype(torch::kLong));
    rule.learning_rate = torch::zeros({1}, options);
    quarter = torch::full({}, 4.0, options);
  }
  Tensor micro(const td::Batch& batch) {
    const HandFlags flags;
    Tensor loss;
    {
      const td::precision::Autocast cast(batch.data.device().type(), at::kHalf);
      loss = at::cross_entropy_loss(net.forward(batch.data), batch.target);
    }
    loss.backward(scale);
    return Tensor(loss.tensor_data());
  }
  Tensor window(const td::Batch* batches) {
    Tensor sum = micro(batches[0]);
    for (int i = 1; i < 4; ++i) sum = sum + micro(batches[i]);
    const at::NoGradGuard no_grad;
    rule.collect();
    auto divisor = scale * quarter;
    auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(rule.gradients, 2, at::kFloat)));
    found_inf.zero_();
    std::vector<Tensor> checked{norm};
    at::_amp_foreach_non_finite_check_and_unscale_(checked, found_inf, one);
    auto true_norm = norm / divisor;
    divisor = (true_norm + 1e-6).div_(1.0).clamp_min_(1.0).mul_(divisor);
    auto applied = found_inf.eq(0);
    skipped.add_(found_inf.to(at::kLong));
    at::index_select_out(rule.learning_rate, table, 0, position.clamp_max(table.size(0) - 1));
    rule.step.add_(applied);
    at::_fused_adamw_(rule.weights, rule.gradients, rule.exp_avg, rule.exp_avg_sq, {}, rule.steps,
                      rule.learning_rate[0], 0.9, 0.999, 1e-2, 1e-8, false, false, divisor, found_inf);
    position.add_(applied);
    at::_amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000);
    at::_fused_sgd_(average, rule.weights, {}, 1.0, 0.0, 1 - 0.999, 0.0, false, true, false, {}, found_inf);
    skip_flag = found_inf.clone();
    rule.release();
    return sum / 4;
  }
  Mlp& net;
  HandAdamW rule;
  std::vector<Tensor> average;
  Tensor skip_flag, scale, tracker, found_inf, one, table, position, skipped, quarter;
};

constexpr std::int64_t schedule_steps = 1'000'000;

auto everything() {
  return td::policies(td::precision::Fp16{}, td::accumulation::AccumulateOver{.batches = 4},
                      td::clipping::ClipNorm{1.0}, td::nonfinite::Skip{}, td::averaging::ExponentialAverage{});
}
td::optim::AdamW scheduled() {
  return {.schedule = td::schedule::cosine({.steps = schedule_steps, .warmup = 10})};
}

bool callgrind_counts = false;

// Not inlined, so that callgrind can be told to count inside `counted_loop` only.
template <class Loop>
[[gnu::noinline]] void counted_loop(Loop& loop, int steps) {
  for (int i = 0; i < steps; ++i) loop(i);
}
template <class Loop>
void measured_loop(Loop& loop, int steps) {
  if (callgrind_counts) return counted_loop(loop, steps);
  for (int i = 0; i < steps; ++i) loop(i);
}

struct Loops {
  explicit Loops(at::Device device)
      : batches(make_batches(device)),
        hand_defaults((hand_net.to(device), hand_net)),
        hand_everything((hand_net2.to(device), hand_net2), schedule_steps),
        trainer_defaults(net, CrossEntropy{}, td::optim::AdamW{}, td::policies(td::parallelism::SingleDevice{device})),
        trainer_everything(net2, CrossEntropy{}, scheduled(), [&] {
          auto set = everything();
          set.parallelism.device = device;
          return set;
        }()) {}

  void run(const std::string& name, int steps) {
    if (name == "hand-defaults") {
      auto loop = [&](int i) { last = hand_defaults.step(batches[static_cast<std::size_t>(i % 8)]); };
      measured_loop(loop, steps);
    } else if (name == "treadle-defaults") {
      auto loop = [&](int i) {
        last = std::move(trainer_defaults.accumulate(batches[static_cast<std::size_t>(i % 8)])->loss);
      };
      measured_loop(loop, steps);
    } else if (name == "hand-everything") {
      auto loop = [&](int i) { last = hand_everything.window(&batches[static_cast<std::size_t>(i % 2 * 4)]); };
      measured_loop(loop, steps);
    } else if (name == "treadle-everything") {
      auto loop = [&](int i) {
        const auto* window = &batches[static_cast<std::size_t>(i % 2 * 4)];
        for (int k = 0; k < 3; ++k) trainer_everything.accumulate(window[k]);
        last = std::move(trainer_everything.accumulate(window[3])->loss);
      };
      measured_loop(loop, steps);
    } else {
      std::fprintf(stderr, "overhead: no loop '%s'\n", name.c_str());
      std::exit(2);
    }
  }

  std::vector<td::Batch> batches;
  Mlp hand_net, hand_net2, net, net2;
  HandDefaults hand_defaults;
  HandEverything hand_everything;
  td::Trainer<Mlp, CrossEntropy, td::optim::AdamW> trainer_defaults;
  td::Trainer<Mlp, CrossEntropy, td::optim::AdamW, decltype(everything())> trainer_everything;
  Tensor last;
};

std::map<std::string, int> operators;  // top-level ATen operators, by name

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction& fn) {
  ++operators[fn.name()];
  return nullptr;
}

std::map<std::string, int> operators_of(Loops& loops, const std::string& name) {
  operators.clear();
  auto callback = at::RecordFunctionCallback(count_operator).scopes({at::RecordScope::FUNCTION});
  const auto handle = at::addGlobalCallback(callback);
  loops.run(name, 10);
  at::removeCallback(handle);
  for (auto it = operators.begin(); it != operators.end();)
    it = (it->second /= 10) == 0 ? operators.erase(it) : std::next(it);
  return operators;
}

long allocations_of(Loops& loops, const std::string& name) {
  const long before = allocations.load();
  loops.run(name, 100);
  return (allocations.load() - before) / 100;
}

double seconds_of(Loops& loops, const std::string& name, int steps) {
  const auto begin = std::chrono::steady_clock::now();
  loops.run(name, steps);
  td::synchronize(loops.batches[0].data.device());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / steps;
}

void compare(Loops& loops, const std::string& kind) {
  const std::string hand = "hand-" + kind, treadle = "treadle-" + kind;
  loops.run(hand, 50);
  loops.run(treadle, 50);
  std::printf("%s\n", kind.c_str());
  auto ours = operators_of(loops, treadle);
  const auto theirs = operators_of(loops, hand);
  int total = 0, extra = 0;
  for (const auto& [name, count] : ours) total += count;
  for (const auto& [name, count] : theirs) extra -= count, ours[name] -= count;
  extra += total;
  std::printf("  operators a step        %d (%+d against the hand-written loop):", total, extra);
  for (const auto& [name, count] : ours)
    if (count != 0) std::printf(" %s %+d", name.c_str(), count);
  std::printf("\n  heap allocations a step %+ld\n", allocations_of(loops, treadle) - allocations_of(loops, hand));
  std::vector<double> ratios, ours_us, hand_us;
  for (int block = 0; block < 31; ++block) {
    const int steps = kind == "defaults" ? 400 : 60;
    double a, b;
    if (block % 2 == 0)
      a = seconds_of(loops, treadle, steps), b = seconds_of(loops, hand, steps);
    else
      b = seconds_of(loops, hand, steps), a = seconds_of(loops, treadle, steps);
    ratios.push_back(a / b);
    ours_us.push_back(a * 1e6);
    hand_us.push_back(b * 1e6);
  }
  std::printf("  time a step             %.1f us against %.1f us, median ratio %.4f over %zu interleaved blocks\n",
              median(ours_us), median(hand_us), median(ratios), ratios.size());
}

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  std::string loop;
  int steps = 100;
  at::Device device(at::kCPU);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--loop"))
      loop = argv[i + 1];
    else if (!std::strcmp(argv[i], "--steps"))
      steps = std::atoi(argv[i + 1]);
    else if (!std::strcmp(argv[i], "--device"))
      device = at::Device(argv[i + 1]);
  }
  Loops loops(device);
  if (!loop.empty()) {
    loops.run(loop, 3);  // set-up: lazy state, first groupings
    callgrind_counts = true;
    loops.run(loop, steps);
    return 0;
  }
  compare(loops, "defaults");
  compare(loops, "everything");
  std::printf("sizeof: defaults %zu bytes, empty policy set %zu byte\n", sizeof(loops.trainer_defaults),
              sizeof(td::Policies<>));
}
