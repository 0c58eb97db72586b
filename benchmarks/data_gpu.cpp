// SPDX-License-Identifier: Apache-2.0
// What feeding a GPU costs: steps on batches from a loader against steps on one batch that lies on the device all the
// time, in interleaved blocks.
//
//   resnet  ResNet-50, Fp16 (on a CPU Fp32), batch 256: pictures of 256x256 bytes in the host's memory, shuffled,
//   copied ahead, cut to
//           224x224 at random, flipped and normalized on the device
//   gpt     a GPT of 6 blocks of width 384 over 256 tokens, Bf16, batch 64: pieces of a file of tokens, shuffled
//
//   benchmark_data_gpu [--blocks N] [--steps N] [--workers N] [--only resnet|gpt] [--device cpu|cuda] [--small]
//
// A block begins with as many steps that are not timed as batches may lie ready, so that what was made in the other
// kind's blocks counts for nothing. --small takes little batches and few steps, to see that everything runs.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/prefetch.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/data/tokens.hpp>
#include <treadle/data/transforms.hpp>
#include <treadle/runtime/wait_meter.hpp>
#include <treadle/treadle.hpp>
#include <utility>
#include <vector>

#include "median.hpp"
#include "models/gpt.hpp"
#include "models/resnet.hpp"

namespace td = treadle;

namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  int blocks = 7;
  int steps = 20;
  int workers = 4;
  bool small = false;
  std::string only{};
  at::Device device = torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
};

struct Pictures {
  td::Loss operator()(resnet::ModelImpl& model, const td::Batch& batch) const {
    return td::mean_loss(model.forward(batch.data), batch.target);
  }
};
struct Text {
  td::Loss operator()(gpt::ModelImpl& model, const td::data::TokenBatch& batch, auto& step) const {
    return gpt::NextToken{}(model, td::Batch{batch.data, batch.target}, step);
  }
};

/// Milliseconds of a step in each block, the losses, and the share of the time in which the device waited.
struct Side {
  std::vector<double> ms{};
  std::vector<at::Tensor> losses{};
  double waited = 0;
  double seconds = 0;
};

/// A block of steps on what `next()` gives, of which the first `untimed` do not count.
template <class Trainer, class Next>
void block(const Arguments& arguments, Trainer& trainer, int untimed, Side& side, Next&& next) {
  td::detail::WaitMeter meter(arguments.device);
  Clock::time_point begin;
  for (int i = -untimed; i < arguments.steps; ++i) {
    if (i == 0) {
      td::synchronize(arguments.device);
      static_cast<void>(meter.take());
      begin = Clock::now();
    }
    const auto* batch = meter([&] { return next(); });
    if (const auto done = trainer.accumulate(*batch)) side.losses.push_back(done->loss);
  }
  td::synchronize(arguments.device);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  side.ms.push_back(1e3 * seconds / arguments.steps);
  side.seconds += seconds;
  side.waited += meter.take();
}

/// Whether the ratio is what it should be.
template <class MakeTrainer, class Batch, class Loader>
bool compare(const Arguments& arguments, const std::string& name, double target, const MakeTrainer& make,
             const Batch& batch, Loader& loader, int ready) {
  auto on_fixed = make();
  auto on_fed = make();
  Side fixed;
  Side fed;
  auto it = loader.begin();
  bool begun = false;
  const auto next_fed = [&] {
    if (std::exchange(begun, true)) ++it;
    if (it == loader.end()) {
      it = {};  // first, so that the next pass has the same ring of page-locked memory
      it = loader.begin();
    }
    return &*it;
  };
  for (int round = -1; round < arguments.blocks; ++round) {
    if (round == 0) fixed.ms.clear(), fed.ms.clear(), fixed.waited = fed.waited = fixed.seconds = fed.seconds = 0;
    block(arguments, on_fixed, 2, fixed, [&] { return &batch; });
    block(arguments, on_fed, ready, fed, next_fed);
  }
  std::vector<double> ratios;
  for (std::size_t i = 0; i < fed.ms.size(); ++i) ratios.push_back(fed.ms[i] / fixed.ms[i]);
  for (const Side* side : {&fixed, &fed}) {
    const auto losses = torch::stack(side->losses).to(torch::kCPU, torch::kDouble);
    if (!losses.isfinite().all().item<bool>()) {
      std::fprintf(stderr, "%s: a loss is not finite\n", name.c_str());
      std::exit(1);
    }
  }
  const double ratio = median(ratios);
  std::printf(
      "{\"row\": \"%s\", \"fixed_ms\": %.3f, \"fed_ms\": %.3f, \"ratio\": %.4f, \"least\": %.4f, \"largest\": %.4f, "
      "\"target\": %.2f, \"met\": %s, \"waited\": %.4f, \"blocks\": %d, \"steps\": %d, \"workers\": %d, "
      "\"losses_fixed\": [%.4f, %.4f], \"losses_fed\": [%.4f, %.4f]}\n",
      name.c_str(), median(fixed.ms), median(fed.ms), ratio, *std::min_element(ratios.begin(), ratios.end()),
      *std::max_element(ratios.begin(), ratios.end()), target, ratio <= target ? "true" : "false",
      fed.waited / fed.seconds, arguments.blocks, arguments.steps, arguments.workers,
      fixed.losses.front().item<double>(), fixed.losses.back().item<double>(), fed.losses.front().item<double>(),
      fed.losses.back().item<double>());
  std::fflush(stdout);
  return ratio <= target;
}

template <class Precision>
bool run_resnet(const Arguments& arguments) {
  const std::int64_t rows = arguments.small ? 4 : 256;
  const std::int64_t size = arguments.small ? 32 : 224;
  const std::int64_t stored = arguments.small ? 40 : 256;
  const std::int64_t count = arguments.small ? 30 : 4096;
  const std::int64_t classes = arguments.small ? 10 : 1000;
  // Rows of pixels with their colors beside each other, as decoders give them: channels last.
  const td::Batch pictures{torch::randint(256, {count, stored, stored, 3}, torch::kByte).permute({0, 3, 1, 2}),
                           torch::randint(classes, {count}, torch::kLong)};
  const td::data::Normalize normalize{{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}};
  const td::Batch fixed{
      normalize(pictures.data.narrow(0, 0, rows).narrow(2, 0, size).narrow(3, 0, size).to(arguments.device))
          .contiguous(at::MemoryFormat::ChannelsLast),
      pictures.target.narrow(0, 0, rows).to(arguments.device)};
  const td::data::LoaderOptions options{
      .batch_size = rows, .shuffle = true, .drop_last = true, .workers = arguments.workers, .pin_memory = true};
  auto sent = td::data::prefetch(td::data::TensorLoader{pictures, options}, {.device = arguments.device});
  auto loader = td::data::map_batches(sent, td::data::RandomCrop{.height = size}, td::data::RandomFlip{}, normalize);
  const auto make = [&] {
    torch::manual_seed(1);
    resnet::Model model(classes);
    model->channels_last();
    return td::Trainer{model, Pictures{}, td::optim::Sgd{.learning_rate = 0.01, .momentum = 0.9},
                       td::policies(Precision{}, td::parallelism::SingleDevice{.device = arguments.device})};
  };
  return compare(arguments, "resnet", 1.02, make, fixed, loader, options.depth() + 5);
}

/// A file of random tokens, for as long as it lives.
struct TokenFile {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("tokens_" + std::to_string(::getpid()));
  TokenFile(std::int64_t count, std::int64_t vocabulary) {
    const auto tokens = torch::randint(vocabulary, {count}, torch::kShort);
    std::ofstream(path, std::ios::binary)
        .write(static_cast<const char*>(tokens.const_data_ptr()), static_cast<std::streamsize>(2 * count));
  }
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  ~TokenFile() { ::unlink(path.c_str()); }
};

bool run_gpt(const Arguments& arguments) {
  gpt::Options shape{.vocabulary = 4096, .context = 256, .blocks = 6, .width = 384, .heads = 6};
  if (arguments.small) shape = {.vocabulary = 128, .context = 16, .blocks = 2, .width = 32, .heads = 2};
  const std::int64_t rows = arguments.small ? 4 : 64;
  const TokenFile file(arguments.small ? 5'000 : 20'000'000, shape.vocabulary);
  const td::data::Tokens tokens(file.path, {.length = shape.context, .vocabulary = shape.vocabulary});
  auto fixed = tokens.get_batch({0, rows});
  fixed.data = fixed.data.to(arguments.device);
  fixed.target = fixed.target.to(arguments.device);
  const td::data::LoaderOptions options{
      .batch_size = rows, .shuffle = true, .drop_last = true, .workers = arguments.workers};
  auto loader = td::data::prefetch(td::data::Loader{tokens, options}, {.device = arguments.device});
  const auto make = [&] {
    torch::manual_seed(1);
    return td::Trainer{gpt::Model(shape), Text{}, td::optim::AdamW{.learning_rate = 3e-4},
                       td::policies(td::precision::Bf16{}, td::parallelism::SingleDevice{.device = arguments.device})};
  };
  return compare(arguments, "gpt", 1.05, make, fixed, loader, options.depth() + 5);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (word == "--small") {
      arguments.small = true;
      arguments.blocks = 1;
      arguments.steps = 2;
      arguments.workers = 1;
      continue;
    }
    ++i;
    if (word == "--blocks" && std::atoi(value) > 0)
      arguments.blocks = std::atoi(value);
    else if (word == "--steps" && std::atoi(value) > 0)
      arguments.steps = std::atoi(value);
    else if (word == "--workers")
      arguments.workers = std::atoi(value);
    else if (word == "--only")
      arguments.only = value;
    else if (word == "--device")
      arguments.device = td::resolve_device(at::Device(value));
    else {
      std::fprintf(stderr, "benchmark_data_gpu: '%s' is not known; the file's first lines say what is\n", argv[i - 1]);
      return 2;
    }
  }
  std::printf("{\"device\": \"%s\", \"torch\": \"%s\"}\n", arguments.device.str().c_str(), TORCH_VERSION);
  bool met = true;
  if (arguments.only != "gpt")  // a CPU's convolutions in fp16 are no use even to see that everything runs
    met &= arguments.device.is_cuda() ? run_resnet<td::precision::Fp16>(arguments)
                                      : run_resnet<td::precision::Fp32>(arguments);
  if (arguments.only != "resnet") met &= run_gpt(arguments);
  std::printf("%s\n", met ? "every target is met" : "a target is missed");
  return 0;
}
