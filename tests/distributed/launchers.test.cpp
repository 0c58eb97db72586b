// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed PYTHON TIMEOUT 600
// The launch lines of docs/parallelism.md, run: this program under torchrun, mpirun, Slurm's variables, and none.
#include "treadle/parallelism/distributed_data_parallel.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/skip.hpp"
#include "support/tiny.hpp"

namespace {

using namespace treadle_test;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// The losses of four steps and the weights after them must be those of a loop that sees both ranks' batches.
const Role trains("trains", [](const td::World& world) {
  chosen_device() = at::Device(at::kCPU);
  CHECK(world.launcher == variable("TEST_LAUNCHER"));
  CHECK(world.agent_store == (world.launcher == "torchrun"));
  auto net = make<PlainNet>(static_cast<std::uint64_t>(world.rank) + 1);  // rank 0's is taken
  auto reference = make<PlainNet>(1);
  const State start = weights(*reference);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.01},
                      td::policies(td::parallelism::DistributedDataParallel<>{.device = at::Device(at::kCPU)})};
  auto loop = oracle::classifier(reference, {.learning_rate = 0.01});
  State want;
  for (std::uint64_t step = 0; step < 4; ++step) {
    std::vector<td::Batch> all;
    for (int r = 0; r < world.world_size; ++r)
      all.push_back(make_batch(3 + 2 * r, 10 * step + static_cast<std::uint64_t>(r)));
    trainer.accumulate(all[static_cast<std::size_t>(world.rank)]);
    want = loop.step(all).weights;
  }
  CHECK(distance(masters(trainer), want, start) < 1e-4);
  std::printf("rank %d of %d has trained\n", world.rank, world.world_size);
  std::fflush(stdout);
});

/// A program whose second rank fails, as its main function would end it.
const Role fails("fails", [](const td::World& world) {
  std::_Exit(td::run_rank([&] {
    td::ProcessGroup group(world, at::kCPU, std::chrono::seconds(60));
    at::Tensor one = at::ones({1});
    group.sum(one);
    if (world.rank == 1) throw td::DataError("the data is gone.");
    group.sum(one);
  }));
});

struct Ended {
  int code = -1;
  std::string output;
  std::size_t count(const std::string& part) const {
    std::size_t result = 0;
    for (auto at = output.find(part); at != output.npos; at = output.find(part, at + 1)) ++result;
    return result;
  }
};

/// Shell commands, all at once; each is given three minutes.
std::vector<Ended> run(const std::vector<std::string>& commands) {
  std::vector<std::FILE*> pipes;
  for (const auto& command : commands) pipes.push_back(::popen(("{ " + command + "; } 2>&1").c_str(), "r"));
  std::vector<Ended> all;
  for (auto* pipe : pipes) {
    REQUIRE(pipe != nullptr);
    auto& ended = all.emplace_back();
    std::array<char, 4096> buffer;
    for (std::size_t size = 0; (size = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
      ended.output.append(buffer.data(), size);
    const int status = ::pclose(pipe);
    ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return all;
}

/// This program as a rank in `role`, behind `launcher`, with more variables in its environment.
std::string line(const std::string& launcher, const std::string& role, const std::string& variables = {}) {
  std::array<char, 4096> path{};
  REQUIRE(::readlink("/proc/self/exe", path.data(), path.size() - 1) > 0);
  return "timeout -k 10 180 env OMP_NUM_THREADS=1 TREADLE_TEST_ROLE=" + role + " " + variables + " " + launcher + " '" +
         path.data() + "' '--test-case=as a rank' --no-skip --no-intro --no-version";
}

std::string free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  REQUIRE(::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  ::close(fd);
  return std::to_string(ntohs(address.sin_port));
}

void check_trained(const std::vector<Ended>& jobs, int ranks) {
  std::string output;
  for (const auto& job : jobs) {
    output += job.output;
    CAPTURE(job.output);
    CHECK(job.code == 0);
  }
  CAPTURE(output);
  for (int r = 0; r < ranks; ++r)
    CHECK(output.find("rank " + std::to_string(r) + " of " + std::to_string(ranks) + " has trained") != output.npos);
}

std::string torchrun(const std::string& options) {
  return variable("TREADLE_PYTHON") + " -m torch.distributed.run --no-python " + options;
}
bool has_torchrun() {
  return !variable("TREADLE_PYTHON").empty() &&
         run({variable("TREADLE_PYTHON") + " -c 'import torch.distributed.run'"})[0].code == 0;
}
const char* const no_torchrun = "TREADLE_PYTHON cannot import torch.distributed.run";

std::string mpirun(const std::string& options) {
  return "mpirun --allow-run-as-root --oversubscribe " + options;
}
bool has_mpirun() {
  return run({"command -v mpirun && mpirun --version"})[0].count("Open MPI") > 0;
}

}  // namespace

TEST_CASE("torchrun on one host, with the store that its agent serves") {
  if (!has_torchrun()) TREADLE_SKIP(no_torchrun);
  check_trained(run({line(torchrun("--standalone --nproc-per-node 2"), "trains", "TEST_LAUNCHER=torchrun")}), 2);
}

TEST_CASE("torchrun on two hosts, here an agent each with a process") {
  if (!has_torchrun()) TREADLE_SKIP(no_torchrun);
  const auto port = free_port();
  const auto agent = [&](const char* rank) {
    return line(torchrun("--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port " + port +
                         " --node-rank " + rank),
                "trains", "TEST_LAUNCHER=torchrun");
  };
  check_trained(run({agent("0"), agent("1")}), 2);
}

TEST_CASE("mpirun") {
  if (!has_mpirun()) TREADLE_SKIP("there is no mpirun of Open MPI");
  check_trained(run({line(mpirun("-n 2"), "trains", "'TEST_LAUNCHER=Open MPI'")}), 2);
}

TEST_CASE("the variables of a Slurm step of three tasks on two nodes") {
  const auto job = std::to_string(::getpid());
  const auto task = [&](int rank) {
    return line("", "trains",
                "TEST_LAUNCHER=Slurm SLURM_PROCID=" + std::to_string(rank) + " SLURM_NTASKS=3 SLURM_STEP_NUM_TASKS=3" +
                    " SLURM_LOCALID=" + std::to_string(rank % 2) + " SLURM_NODEID=" + std::to_string(rank / 2) +
                    " SLURM_STEP_TASKS_PER_NODE='2,1' SLURM_STEP_ID=0 SLURM_JOB_ID=" + job +
                    " SLURM_STEP_NODELIST='127.0.0.[1-2]'");
  };
  check_trained(run({task(2), task(0), task(1)}), 3);
}

TEST_CASE("variables set by hand") {
  const auto port = free_port();
  const auto process = [&](const std::string& rank) {
    return line("", "trains",
                "TEST_LAUNCHER=environment WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port +
                    " RANK=" + rank + " LOCAL_RANK=" + rank);
  };
  check_trained(run({process("1"), process("0")}), 2);
}

TEST_CASE("a rank that fails ends the job of torchrun and mpirun, which end with another code than 0") {
  std::vector<std::string> launchers;
  if (has_torchrun()) launchers.push_back(torchrun("--standalone --nproc-per-node 2"));
  if (has_mpirun()) launchers.push_back(mpirun("-n 2"));
  if (launchers.empty()) TREADLE_SKIP("there is neither torchrun nor mpirun");
  for (const auto& launcher : launchers) {
    const auto job = run({line(launcher, "fails")})[0];
    CAPTURE(job.output);
    CHECK(job.code != 0);
    CHECK(job.code != 124);  // of timeout
    CHECK(job.count("the data is gone.") >= 1);
  }
}
