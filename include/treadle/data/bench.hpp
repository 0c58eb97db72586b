// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/loader_options.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/sink.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct BenchOptions {
  std::vector<int> workers{};  ///< numbers to try; none: 0, 1, 2, 4, ... up to 4 for each CPU core
  double seconds = 1;          ///< for each number, and at least one batch
};

struct BenchResult {
  struct Row {
    int workers = 0;
    double samples_per_second = 0;
  };
  std::vector<Row> rows;
  int workers = 0;  ///< the fewest that come within 5 % of the fastest
};

/// Loads with several numbers of workers, and nothing else, and says how many samples a second each gives and how many
/// workers to use. The loader itself stands where it stood. Throws `DataError` for a loader without a batch.
///
/// That is what the loader can give, not what training can take: more than training takes is never waited for.
template <class L>
requires requires(const L& loader, const LoaderOptions& options) {
  { loader.options() } -> std::convertible_to<LoaderOptions>;
  loader.with(options);
}
BenchResult bench(const L& loader, BenchOptions options = {}) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (options.workers.empty())
    for (int n = 0; n <= 4 * cores; n = n == 0 ? 1 : 2 * n) options.workers.push_back(n);
  BenchResult result;
  double best = 0;
  std::string text = "workers  samples/s";
  for (const int workers : options.workers) {
    LoaderOptions told = loader.options();
    told.workers = workers;
    auto tried = loader.with(told);
    double seconds = 0;
    std::int64_t samples = 0;
    do {
      const auto begin = Clock::now();
      const std::int64_t before = samples;
      for (const auto& batch : tried) {
        samples += treadle::rows(batch);
        if (seconds + since(begin) >= options.seconds) break;
      }
      seconds += since(begin);
      if (samples == before) throw DataError("data::bench: the loader gave no batch, so there is nothing to measure.");
    } while (seconds < options.seconds);
    const double rate = static_cast<double>(samples) / seconds;
    result.rows.push_back({workers, rate});
    best = std::max(best, rate);
    const std::string number = std::to_string(workers);
    const std::string shown = std::to_string(static_cast<std::int64_t>(rate));
    text += "\n" + std::string(7 - std::min<std::size_t>(7, number.size()), ' ') + number + "  " +
            std::string(9 - std::min<std::size_t>(9, shown.size()), ' ') + shown;
  }
  result.workers = std::ranges::find_if(result.rows, [&](const auto& row) {
                     return row.samples_per_second >= 0.95 * best;
                   })->workers;
  say(text + "\nUse workers = " + std::to_string(result.workers) + ": on these " + std::to_string(cores) +
      " CPU cores no other number tried gives 5 % more.");
  return result;
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
