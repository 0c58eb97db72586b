// SPDX-License-Identifier: Apache-2.0
// What the links between the ranks of a job give: all-reduce, reduce-scatter and all-gather of fp32 numbers by size.
//   collectives [--nproc N] [--device cpu|cuda] [--min BYTES] [--max BYTES] [--seconds S] [--line-rate GB/s]
// It starts N ranks on this host, or is started as a rank by torchrun, mpirun or srun. CPU tensors go over Gloo, CUDA
// tensors over NCCL. Sizes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): the size S is the whole
// buffer, in an all-reduce each rank's, else all ranks' parts together; algorithm bandwidth is S / time; bus bandwidth
// is that times 2(n-1)/n for an all-reduce and (n-1)/n for the others, which is what each rank's link has to carry in
// each direction, whatever n is. 1 GB is 1e9 bytes.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <treadle/distributed/process_group.hpp>
#include <treadle/runtime/device.hpp>
#include <treadle/runtime/launch.hpp>
#include <vector>

#include "median.hpp"

namespace td = treadle;
using Clock = std::chrono::steady_clock;

struct Options {
  int nproc = 1;
  std::string device;
  std::int64_t min_bytes = 4 << 10;
  std::int64_t max_bytes = 64 << 20;
  double seconds = 0.5;  // of measuring, for each line
  double line_rate = 0;  // GB/s in each direction
};

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
enum class Kind { AllReduce, ReduceScatter, AllGather };

struct Case {
  Kind kind;
  const char* name;
  /// Bus bandwidth over algorithm bandwidth for n ranks.
  double factor(double n) const { return (kind == Kind::AllReduce ? 2 : 1) * (n - 1) / n; }
};
constexpr Case cases[] = {
    {Kind::AllReduce, "all-reduce"}, {Kind::ReduceScatter, "reduce-scatter"}, {Kind::AllGather, "all-gather"}};

/// One collective over buffers of `bytes` in all; rounded down to whole numbers for each rank.
class Collective {
 public:
  Collective(td::ProcessGroup& group, at::Device device, Kind kind, std::int64_t bytes)
      : group_(group), device_(device), kind_(kind) {
    const std::int64_t ranks = group.world_size();
    part_ = std::max<std::int64_t>(bytes / 4 / ranks, 1);
    const auto options = at::device(device).dtype(at::kFloat);
    whole_ = at::zeros({part_ * ranks}, options);
    own_ = at::zeros({part_}, options);
  }
  std::int64_t bytes() const { return 4 * whole_.numel(); }

  /// Seconds of one, the slowest rank's, over `times` in a row.
  double run(int times) {
    group_.max(0);  // all begin together
    const auto begin = Clock::now();
    for (int i = 0; i < times; ++i) start()->wait();
    td::synchronize(device_);
    return group_.max(since(begin) / times);
  }
  /// Throws unless one gives the right numbers.
  void check() {
    const double ranks = group_.world_size();
    const double sum = ranks * (ranks + 1) / 2;
    whole_.fill_(group_.rank() + 1);
    own_.fill_(group_.rank() + 1);
    start()->wait();
    bool right = true;
    if (kind_ == Kind::AllReduce) right = whole_.eq(sum).all().item<bool>();
    if (kind_ == Kind::ReduceScatter) right = own_.eq(sum).all().item<bool>();
    if (kind_ == Kind::AllGather)
      for (int r = 0; r < group_.world_size(); ++r)
        right = right && whole_.narrow(0, r * part_, part_).eq(r + 1).all().item<bool>();
    whole_.zero_();  // or sums would grow without end
    own_.zero_();
    if (!right) throw std::runtime_error("a collective of " + std::to_string(bytes()) + " bytes gave wrong numbers");
  }

 private:
  td::ProcessGroup::Work start() {
    auto& c10d = *group_.c10d();
    if (kind_ == Kind::ReduceScatter) return c10d._reduce_scatter_base(own_, whole_);
    if (kind_ == Kind::AllGather) return c10d._allgather_base(whole_, own_);
    return group_.start_sum(whole_);
  }

  td::ProcessGroup& group_;
  at::Device device_;
  Kind kind_;
  std::int64_t part_ = 0;
  at::Tensor whole_, own_;
};

/// GB/s of one TCP connection over loopback within this process, one thread at each end.
double loopback_once() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  const int sender = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener, generic, length) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, generic, &length) != 0 || ::connect(sender, generic, length) != 0)
    throw std::runtime_error("no connection over 127.0.0.1");
  const int receiver = ::accept(listener, nullptr, nullptr);
  constexpr std::size_t piece = 1 << 20;
  constexpr std::size_t total = 512 * piece;
  const auto begin = Clock::now();
  std::thread sending([&] {
    const std::vector<char> data(piece, 1);
    for (std::size_t sent = 0; sent < total;) {
      const auto size = ::send(sender, data.data(), piece, 0);
      if (size <= 0) break;
      sent += static_cast<std::size_t>(size);
    }
    ::close(sender);
  });
  std::vector<char> data(piece);
  std::size_t received = 0;
  for (ssize_t size = 0; (size = ::recv(receiver, data.data(), piece, 0)) > 0;)
    received += static_cast<std::size_t>(size);
  const double seconds = since(begin);
  sending.join();
  ::close(receiver);
  ::close(listener);
  return 1e-9 * static_cast<double>(received) / seconds;
}

/// What loopback gives each rank while all ranks use it, which is what bounds Gloo on one host: the slowest rank's.
double loopback_rate(td::ProcessGroup& group) {
  std::vector<double> rates;
  for (int i = 0; i < 5; ++i) {
    group.max(0);
    rates.push_back(-group.max(-loopback_once()));
  }
  return median(rates);
}

/// GB/s at which one thread copies memory, while all ranks do.
double copy_rate(td::ProcessGroup& group) {
  const auto from = at::ones({64 << 18});
  auto to = at::empty_like(from);
  std::vector<double> rates;
  for (int i = 0; i < 9; ++i) {
    group.max(0);
    const auto begin = Clock::now();
    to.copy_(from);
    rates.push_back(-group.max(-1e-9 * static_cast<double>(from.nbytes()) / since(begin)));
  }
  return median(rates);
}

void measure(const Options& options) {
  at::set_num_threads(1);
  const auto world = td::World::from_environment();
  const bool cuda = options.device.empty() ? td::cuda_available() : options.device == "cuda";
  at::Device device(at::kCPU);
  if (cuda) device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(world.device_index(td::cuda_device_count())));
  const c10::OptionalDeviceGuard guard(device);
  td::ProcessGroup group(world, device, std::chrono::minutes(5));
  const bool speaks = world.rank == 0;
  double rate = options.line_rate;
  if (speaks)
    std::printf("%d ranks on %s, %s, fp32, launched by %s; times are of the slowest rank, medians of 7 blocks\n",
                world.world_size, world.on_one_host() ? "one host" : "several hosts", cuda ? "NCCL" : "Gloo",
                world.launcher.c_str());
  if (world.world_size == 1 && speaks) std::printf("one rank sends nothing: start more, with --nproc\n");
  if (rate > 0) {
    if (speaks) std::printf("bound: a line rate of %.2f GB/s, as given\n", rate);
  } else if (!cuda && world.on_one_host()) {
    rate = loopback_rate(group);
    const double copies = copy_rate(group);
    if (speaks)
      std::printf(
          "bound: %.2f GB/s, measured: a TCP connection over 127.0.0.1 in each rank, all ranks at once, the "
          "slowest (a thread copies memory at %.2f GB/s)\n",
          rate, copies);
  } else if (speaks) {
    std::printf("no bound: give the links' rate as --line-rate GB/s\n");
  }
  if (speaks)
    std::printf("%-15s %12s %12s %13s %13s %9s\n", "collective", "bytes", "us", "algbw GB/s", "busbw GB/s", "of bound");
  for (const auto& one : cases)
    for (std::int64_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= 4) {
      Collective collective(group, device, one.kind, bytes);
      collective.check();
      collective.run(3);
      const double estimate = collective.run(3);
      const int times = std::clamp(static_cast<int>(options.seconds / 7 / estimate), 1, 1000);
      std::vector<double> seconds;
      for (int block = 0; block < 7; ++block) seconds.push_back(collective.run(times));
      const double time = median(seconds);
      const double algorithm = 1e-9 * static_cast<double>(collective.bytes()) / time;
      const double bus = algorithm * one.factor(world.world_size);
      if (!speaks) continue;
      std::printf("%-15s %12lld %12.1f %13.3f %13.3f ", one.name, static_cast<long long>(collective.bytes()),
                  1e6 * time, algorithm, bus);
      if (rate > 0)
        std::printf("%8.1f%%\n", 100 * bus / rate);
      else
        std::printf("%9s\n", "-");
      std::fflush(stdout);
    }
}

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (i + 1 < argc && option == "--nproc") {
      options.nproc = std::atoi(argv[++i]);
    } else if (i + 1 < argc && option == "--device") {
      options.device = argv[++i];
    } else if (i + 1 < argc && option == "--min") {
      options.min_bytes = std::max(std::atoll(argv[++i]), 4LL);
    } else if (i + 1 < argc && option == "--max") {
      options.max_bytes = std::atoll(argv[++i]);
    } else if (i + 1 < argc && option == "--seconds") {
      options.seconds = std::atof(argv[++i]);
    } else if (i + 1 < argc && option == "--line-rate") {
      options.line_rate = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr, "collectives: no option '%s', or no value for it\n", option.c_str());
      return 2;
    }
  }
  return td::run_rank([&] {
    if (const auto code = td::launch(options.nproc, argc, argv)) return *code;
    measure(options);
    return 0;
  });
}
