// SPDX-License-Identifier: Apache-2.0
// Checkpointing policies on a GPT of the 350M class (24 blocks, width 1024, 16 heads, 1024 tokens, batch 8, bfloat16
// autocast, fused AdamW): memory above weights and moments by the allocator's peak, and the time of a step against the
// plain run's, in interleaved blocks.
//
//   benchmark_checkpointing [--blocks N] [--steps N] [--only NAME] [--small]
//
// One JSON line a row, at the end. checkpointing.py measures PyTorch's own ways in the same form. --small runs a tiny
// model on whatever device there is, to see that everything runs.
#include <torch/torch.h>
#include <treadle/checkpointing/checkpoint_every_block.hpp>
#include <treadle/checkpointing/checkpoint_every_n.hpp>
#include <treadle/checkpointing/checkpoint_selective.hpp>
#include <treadle/checkpointing/offload_activations.hpp>
#include <treadle/compare/memory.hpp>
#include <treadle/treadle.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "median.hpp"
#include "models/gpt.hpp"

namespace td = treadle;

namespace {

struct Arguments {
  int blocks = 5;
  int steps = 5;
  bool small = false;
  std::string only{};
};

/// A row of the table: its trainer, what it needs above what is at rest, and how long its steps take.
struct Row {
  std::string name;
  std::function<void()> step;
  std::function<std::string()> extra;
  double above = 0;
  std::vector<double> times{};
};

struct Bench {
  Arguments arguments;
  at::Device device;
  gpt::Options options{};
  td::Batch batch{};
  std::vector<Row> rows{};

  explicit Bench(const Arguments& a)
      : arguments(a), device(torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
    if (a.small) options = {.vocabulary = 512, .context = 64, .blocks = 4, .width = 64, .heads = 4};
    const std::int64_t size = a.small ? 2 : 8;
    const auto tokens = torch::randint(options.vocabulary, {size, options.context + 1},
                                       at::TensorOptions().dtype(at::kLong).device(device));
    batch = {tokens.slice(1, 0, -1).contiguous(), tokens.slice(1, 1).contiguous()};
  }

  template <class Checkpointing>
  void add(const std::string& name, const Checkpointing& checkpointing, gpt::NextToken objective = {}) {
    if (!arguments.only.empty() && name != arguments.only && name != "plain") return;
    torch::manual_seed(1);
    gpt::Model model(options);
    auto rule = td::optim::AdamW{.learning_rate = 1e-4};
    auto policies = td::policies(td::precision::Bf16{}, checkpointing);
    using Trainer = decltype(td::Trainer{model, objective, rule, policies});
    auto trainer = std::make_shared<Trainer>(model, objective, rule, policies);
    Row row{name, [this, trainer] { trainer->accumulate(batch); },
            [trainer] {
              if constexpr (Checkpointing::offloads) {
                const auto& state = trainer->checkpointing();
                char text[160];
                std::snprintf(text, sizeof text,
                              R"(, "offloaded_gib": %.3f, "budget_gib": %.3f, "link_gib_per_s": %.1f)",
                              gib(state.offloaded_bytes()), gib(state.budget_bytes()), state.bandwidth() / (1 << 30));
                return std::string(text);
              } else {
                return std::string();
              }
            }};
    for (int i = 0; i < 6; ++i) {  // budgets and segment lengths settle in the first ones
      row.step();
      td::synchronize(device);
    }
    {
      const td::detail::MemoryMeter meter;
      for (int i = 0; i < 2; ++i) row.step();
      td::synchronize(device);
      if (const auto peak = meter.peak(device)) row.above = gib(peak->allocated);
    }
    rows.push_back(std::move(row));
  }
  static double gib(double bytes) { return bytes / (1 << 30); }
  static double gib(std::int64_t bytes) { return gib(static_cast<double>(bytes)); }

  void time() {
    for (int block = 0; block < arguments.blocks; ++block)
      for (auto& row : rows) {
        row.step();
        td::synchronize(device);
        const auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < arguments.steps; ++i) row.step();
        td::synchronize(device);
        const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
        row.times.push_back(took.count() / arguments.steps);
      }
  }
  void print() const {
    const double plain = median(rows.front().times);
    for (const auto& row : rows) {
      const double ms = median(row.times);
      std::printf(R"({"name": "%s", "above_gib": %.3f, "ms": %.2f, "ratio": %.3f%s})"
                  "\n",
                  row.name.c_str(), row.above, ms, ms / plain, row.extra().c_str());
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto next = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (word == "--blocks") arguments.blocks = std::atoi(next());
    if (word == "--steps") arguments.steps = std::atoi(next());
    if (word == "--only") arguments.only = next();
    if (word == "--small") arguments.small = true;
  }
  Bench bench(arguments);
  namespace policy = td::checkpointing;
  const std::int64_t least = arguments.small ? 0 : std::int64_t{1} << 20;
  const std::int64_t all = std::int64_t{1} << 50;
  bench.add("plain", policy::NoCheckpointing{});
  bench.add("every block", policy::CheckpointEveryBlock{});
  bench.add("sqrt n", policy::CheckpointEveryN{});
  bench.add("selective: norm, gelu, cast", policy::CheckpointSelective{});
  bench.add("selective: fc1 and attention_out too",
            policy::CheckpointSelective{.regions = {"norm", "gelu", "cast", "fc1", "attention_out"}});
  bench.add("offload: measured budget", policy::OffloadActivations{.min_bytes = least});
  bench.add("offload: everything in blocks", policy::OffloadActivations{.min_bytes = least, .budget_bytes = all});
  bench.add("offload: everything, the head too", policy::OffloadActivations{.min_bytes = least, .budget_bytes = all},
            {.head_in_block = true});
  bench.add("offload: block inputs, recomputed",
            policy::OffloadActivations{.min_bytes = least, .budget_bytes = all, .recompute_blocks = true});
  bench.time();
  bench.print();
}
