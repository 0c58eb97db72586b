// SPDX-License-Identifier: Apache-2.0
// What saving and loading tensors costs: benchmark_snapshot_files [folder (.)] [MiB (256)] [rounds (9)].
// Each round does everything once, in turn; a row is the median over the rounds. Writing ends on the disk (fsync).
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "median.hpp"
#include "treadle/snapshot/pt_file.hpp"
#include "treadle/snapshot/safetensors.hpp"

namespace td = treadle;

namespace {

template <class Work>
double seconds_of(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The same bytes by nothing but the system's calls: 8 MiB each, then fsync.
void write_plainly(const std::filesystem::path& path, const td::NamedTensors& tensors) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool good = file >= 0;
  for (const auto& [name, tensor] : tensors) {
    const char* at = static_cast<const char*>(tensor.const_data_ptr());
    for (std::size_t left = tensor.nbytes(); good && left > 0;) {
      const ssize_t wrote = ::write(file, at, std::min<std::size_t>(left, 8 << 20));
      good = wrote > 0;
      at += wrote;
      left -= static_cast<std::size_t>(std::max<ssize_t>(wrote, 0));
    }
  }
  good = good && ::fsync(file) == 0 && ::close(file) == 0;
  if (!good) {
    std::perror(path.c_str());
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
  const std::int64_t mebibytes = argc > 2 ? std::atoll(argv[2]) : 256;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 9;
  // As a transformer has them: a few large ones, many small ones.
  td::NamedTensors tensors;
  std::vector<at::Tensor> list;
  for (std::int64_t left = mebibytes << 18, i = 0; left > 0; ++i) {
    const std::int64_t size = std::min<std::int64_t>(left, i % 3 == 2 ? 768 : std::int64_t{768} * 3072);
    tensors.emplace_back("layer." + std::to_string(i) + ".weight", at::rand({size}));
    list.push_back(tensors.back().second);
    left -= size;
  }
  const auto safe = folder / "benchmark.safetensors";
  const auto pt = folder / "benchmark.pt";
  const auto plain = folder / "benchmark.bin";
  std::vector<double> by_plain, by_safe, by_torch, by_pt, opened, viewed, read, by_load, ratio;
  double sum = 0;
  for (int round = -1; round < rounds; ++round) {  // the first one is not counted
    const double p = seconds_of([&] { write_plainly(plain, tensors); });
    const double s = seconds_of([&] { td::save_safetensors(safe, tensors); });
    const double t = seconds_of([&] { torch::save(list, pt.string()); });
    const double l = seconds_of([&] {
      std::vector<at::Tensor> back;
      torch::load(back, pt.string());
      for (const auto& tensor : back) sum += tensor.sum().item<double>();
    });
    const double d = seconds_of([&] { td::detail::save_pt(pt, tensors); });

    td::NamedTensors views;
    const double v = seconds_of([&] {
      const td::SafetensorsFile file(safe);
      views = file.tensors();
    });
    const double o = seconds_of([&] { td::SafetensorsFile{safe}; });
    const double r = seconds_of([&] {
      for (const auto& [name, tensor] : views) sum += tensor.sum().item<double>();
    });
    if (round < 0) continue;
    for (const auto& [row, value] : {std::pair{&by_plain, p},
                                     {&by_safe, s},
                                     {&by_torch, t},
                                     {&by_load, l},
                                     {&by_pt, d},
                                     {&opened, o},
                                     {&viewed, v},
                                     {&read, r},
                                     {&ratio, p / s}})
      row->push_back(value);
  }
  const double gigabytes = static_cast<double>(mebibytes << 20) / 1e9;
  std::printf("%lld MiB in %zu tensors, %d rounds, %s\n", static_cast<long long>(mebibytes), tensors.size(), rounds,
              folder.c_str());
  const auto row = [&](const char* name, const std::vector<double>& seconds) {
    std::printf("%-52s %10.2f ms %8.2f GB/s\n", name, 1e3 * median(seconds), gigabytes / median(seconds));
  };
  row("write() + fsync", by_plain);
  row("save_safetensors (atomic, synced, summed)", by_safe);
  row("save_weights' .pt (atomic, synced)", by_pt);
  row("torch::save (not synced)", by_torch);
  row("SafetensorsFile: opened", opened);
  row("SafetensorsFile: opened, and a view of every tensor", viewed);
  row("  those views summed (page faults)", read);
  row("torch::load, and summed", by_load);
  std::printf("save_safetensors against write() + fsync: %.3f of its speed\n", median(ratio));
  std::printf("save_safetensors against torch::save: %.2f times its speed\n", median(by_torch) / median(by_safe));
  for (const auto& path : {safe, pt, plain}) std::filesystem::remove(path);
  return sum == sum ? 0 : 1;
}
