// SPDX-License-Identifier: Apache-2.0
// Checkpointing policies on a GPT of the 350M class (24 blocks, width 1024, 16 heads, 1024 tokens, batch 8, bfloat16
// autocast, fused AdamW): memory above weights and moments by the allocator's peak, and the time of a step against the
// plain run's of the same round, in interleaved rounds; each beside what is aimed at and beside PyTorch's own way.
//
//   benchmark_checkpointing [--blocks N] [--steps N] [--only NAME] [--small] [--python COMMAND]
//
// --blocks rounds of --steps steps a row. --python python3 runs checkpointing.py afterwards, on the same card, and
// prints its rows beside; without, the command to run is printed. One JSON line a row, then a table. --small runs a
// tiny model on whatever device there is, to see that everything runs.
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>
#include <treadle/checkpointing/checkpoint_every_block.hpp>
#include <treadle/checkpointing/checkpoint_every_n.hpp>
#include <treadle/checkpointing/checkpoint_selective.hpp>
#include <treadle/checkpointing/offload_activations.hpp>
#include <treadle/compare/memory.hpp>
#include <treadle/treadle.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
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
  std::string python{};
};

/// What a row should reach; 0 where nothing is asked.
struct Target {
  double above_gib = 0;               // at most
  double ratio = 0;                   // at most
  double of_budget = 0;               // at least
  double link_share = 0;              // at least
  std::vector<std::string> python{};  // rows of checkpointing.py to compare with
};

/// Bytes that left the device in a step, and might have.
struct Offloaded {
  double gib = 0;
  double budget_gib = 0;
  double link_gib_per_s = 0;
};

/// A row of the table: its trainer, what it needs above what is at rest, and how long its steps take.
struct Row {
  std::string name;
  Target target;
  std::function<void()> step;
  std::function<std::optional<Offloaded>()> offloaded;
  double above = 0;
  std::vector<double> times{};

  double ms() const { return median(times); }
  /// Against the plain row, round by round: the middle one, the least and the largest.
  struct Ratio {
    double middle, least, largest;
  };
  Ratio against(const Row& plain) const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < times.size(); ++i) ratios.push_back(times[i] / plain.times[i]);
    return {median(ratios), *std::ranges::min_element(ratios), *std::ranges::max_element(ratios)};
  }
  /// How much of the link's bandwidth a step uses, both ways added up.
  double link_share(const Offloaded& o) const {
    return o.link_gib_per_s > 0 ? 2 * o.gib / (ms() / 1e3) / o.link_gib_per_s : 0;
  }
};

/// A row of checkpointing.py.
struct Theirs {
  double above = 0;
  double ms = 0;
  double ratio = 0;
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
  void add(const std::string& name, const Checkpointing& checkpointing, const Target& target,
           gpt::NextToken objective = {}) {
    if (!arguments.only.empty() && name != arguments.only && name != "plain") return;
    torch::manual_seed(1);
    gpt::Model model(options);
    auto rule = td::optim::AdamW{.learning_rate = 1e-4};
    auto policies = td::policies(td::precision::Bf16{}, checkpointing);
    using Trainer = decltype(td::Trainer{model, objective, rule, policies});
    auto trainer = std::make_shared<Trainer>(model, objective, rule, policies);
    Row row{
        name, target, [this, trainer] { trainer->accumulate(batch); },
        [trainer]() -> std::optional<Offloaded> {
          if constexpr (Checkpointing::offloads) {
            const auto& state = trainer->checkpointing();
            return Offloaded{gib(state.offloaded_bytes()), gib(state.budget_bytes()), state.bandwidth() / (1 << 30)};
          } else {
            return std::nullopt;
          }
        }};
    // Segment lengths settle in the first pass, measured budgets in about eight, each of which must have ended.
    for (int i = 0; i < (Checkpointing::offloads ? 14 : 4); ++i) {
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

  /// Gives the device back; the figures stay.
  void release() {
    for (auto& row : rows) {
      row.offloaded = [last = row.offloaded()] { return last; };
      row.step = nullptr;
    }
    batch = {};
    if (device.is_cuda()) c10::getDeviceAllocator(at::kCUDA)->emptyCache();
  }

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
    for (const auto& row : rows) {
      const auto ratio = row.against(rows.front());
      std::printf(R"({"name": "%s", "above_gib": %.3f, "ms": %.2f, "ratio": %.3f, "ratio_least": %.3f, )"
                  R"("ratio_largest": %.3f)",
                  row.name.c_str(), row.above, row.ms(), ratio.middle, ratio.least, ratio.largest);
      if (const auto o = row.offloaded())
        std::printf(R"(, "offloaded_gib": %.3f, "budget_gib": %.3f, "link_gib_per_s": %.1f, "link_share": %.3f)",
                    o->gib, o->budget_gib, o->link_gib_per_s, row.link_share(*o));
      std::printf("}\n");
    }
    std::fflush(stdout);
  }

  /// Each figure beside what it should be, and beside PyTorch's.
  void print_table(const std::map<std::string, Theirs>& python) const {
    std::printf("\n");
    const auto figure = [](const char* what, double got, double want, bool at_most) {
      std::printf("  %-34s %8.3f   %s %.3f  %s\n", what, got, at_most ? "at most " : "at least", want,
                  (at_most ? got <= want : got >= want) ? "reached" : "MISSED");
    };
    for (const auto& row : rows) {
      const auto ratio = row.against(rows.front());
      const Target target = arguments.small ? Target{.python = row.target.python} : row.target;
      std::printf("%s: %.2f GiB above, %.2f ms, %.3f of plain (%.3f to %.3f over rounds)\n", row.name.c_str(),
                  row.above, row.ms(), ratio.middle, ratio.least, ratio.largest);
      if (target.above_gib > 0) figure("GiB above weights and moments", row.above, target.above_gib, true);
      if (target.ratio > 0) figure("time against plain", ratio.middle, target.ratio, true);
      if (const auto o = row.offloaded()) {
        if (target.of_budget > 0)
          figure("share of the budget that left", o->gib / o->budget_gib, target.of_budget, false);
        if (target.link_share > 0)
          figure("share of the link's bandwidth", row.link_share(*o), target.link_share, false);
        std::printf("  left the device: %.2f GiB; the link carries %.1f GiB/s, a step uses %.1f\n", o->gib,
                    o->link_gib_per_s, row.link_share(*o) * o->link_gib_per_s);
      }
      for (const auto& name : target.python)
        if (const auto theirs = python.find(name); theirs != python.end())
          std::printf("  PyTorch, %-25s %8.3f GiB above, %.2f ms, %.3f of its plain\n", name.c_str(),
                      theirs->second.above, theirs->second.ms, theirs->second.ratio);
    }
  }
};

/// Runs checkpointing.py and takes its rows.
std::map<std::string, Theirs> run_python(const std::string& command) {
  std::map<std::string, Theirs> rows;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return rows;
  char line[512];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    char name[128];
    Theirs row;
    if (std::sscanf(line, R"({"name": "%127[^"]", "above_gib": %lf, "ms": %lf, "ratio": %lf)", name, &row.above,
                    &row.ms, &row.ratio) == 4)
      rows[name] = row;
    std::fputs(line, stdout);
  }
  if (::pclose(pipe) != 0) std::printf("the command failed: %s\n", command.c_str());
  return rows;
}

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
    if (word == "--python") arguments.python = next();
  }
  Bench bench(arguments);
  namespace policy = td::checkpointing;
  const std::int64_t least = arguments.small ? 0 : std::int64_t{1} << 20;
  const std::int64_t all = std::int64_t{1} << 50;
  bench.add("plain", policy::NoCheckpointing{}, {.python = {"plain", "compile plain"}});
  bench.add("every block", policy::CheckpointEveryBlock{},
            {.above_gib = 5.5, .ratio = 1.22, .python = {"every block", "compile every block"}});
  bench.add("sqrt n", policy::CheckpointEveryN{}, {.above_gib = 4.95, .ratio = 1.27, .python = {"sqrt n"}});
  bench.add("selective: norm, gelu, cast", policy::CheckpointSelective{},
            {.above_gib = 9.4, .ratio = 1.05, .python = {"selective"}});
  bench.add("selective: fc1 and attention_out too",
            policy::CheckpointSelective{.regions = {"norm", "gelu", "cast", "fc1", "attention_out"}},
            {.above_gib = 7.7, .ratio = 1.13, .python = {"compile budget 0.5"}});
  bench.add("offload: measured budget", policy::OffloadActivations{.min_bytes = least},
            {.ratio = 1.10, .of_budget = 0.9});
  bench.add("offload: everything in blocks", policy::OffloadActivations{.min_bytes = least, .budget_bytes = all}, {});
  bench.add("offload: everything, the head too", policy::OffloadActivations{.min_bytes = least, .budget_bytes = all},
            {.above_gib = 4.2, .link_share = 0.85, .python = {"save_on_cpu"}}, {.head_in_block = true});
  bench.add("offload: block inputs, recomputed",
            policy::OffloadActivations{.min_bytes = least, .budget_bytes = all, .recompute_blocks = true},
            {.above_gib = 4.2, .ratio = 1.30});
  bench.time();
  bench.print();
  const auto script = std::filesystem::path(__FILE__).parent_path() / "checkpointing.py";
  const auto command =
      (arguments.python.empty() ? "python3" : arguments.python) + " " +
      (std::filesystem::exists("benchmarks/checkpointing.py") ? std::string("benchmarks/checkpointing.py")
                                                              : script.string()) +
      " --blocks " + std::to_string(arguments.blocks) + " --steps " + std::to_string(arguments.steps) +
      (arguments.small ? " --small" : " --compile");
  std::map<std::string, Theirs> python;
  if (arguments.python.empty()) {
    std::printf("PyTorch's own ways, in a run of their own: %s\n", command.c_str());
  } else {
    bench.release();
    python = run_python(command);
  }
  bench.print_table(python);
}
