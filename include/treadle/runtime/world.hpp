// SPDX-License-Identifier: Apache-2.0
// The processes of a job, as their launcher describes them in the environment. No torch here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

#include "treadle/error.hpp"
#include "treadle/runtime/environment.hpp"
#include "treadle/runtime/slurm.hpp"

namespace treadle {
inline namespace v0_1 {

/// One process among those of a job. The default is a job of one process.
struct World {
  int rank = 0;              ///< this process, from 0
  int world_size = 1;        ///< processes of the job
  int local_rank = 0;        ///< this process among those of its host, from 0
  int local_world_size = 1;  ///< processes of the job on this host
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;         ///< of the store; 0 where a job of one process needs none
  std::string launcher = "none";  ///< "treadle", "torchrun", "environment", "Open MPI", "Slurm" or "none"
  bool agent_store = false;       ///< whether the launcher serves the store, instead of rank 0
  int restart = 0;                ///< how often the launcher has restarted the job

  /// Reads what torchrun, `treadle::launch`, Open MPI's mpirun or Slurm's srun have set, in this order; without any of
  /// them, a job of one process. Throws `ConfigError` if what is set is incomplete or impossible.
  static World from_environment() {
    return from([](const char* name) { return std::getenv(name); });
  }
  /// The same for variables that `lookup` gives.
  static World from(const EnvironmentLookup& lookup);

  /// Whether all processes are on this host.
  bool on_one_host() const { return local_world_size == world_size; }

  /// The index of this process's GPU among the `visible` ones, which is its local rank; `ConfigError` beyond them.
  int device_index(int visible) const;

  bool operator==(const World&) const = default;
};

namespace detail {

enum class StartedBy { Nobody, Variables, OpenMpi, SlurmStep, SlurmBatch, UnknownMpi };

/// Who started this process. RANK decides before everything else; a batch script's variables are not a step's.
inline StartedBy started_by(const Environment& environment) {
  if (environment.has("RANK")) return StartedBy::Variables;
  if (environment.has("OMPI_COMM_WORLD_RANK") || environment.has("OMPI_COMM_WORLD_SIZE")) return StartedBy::OpenMpi;
  if (environment.has("SLURM_PROCID"))
    return environment.has(environment.either("SLURM_STEP_ID", "SLURM_STEPID")) ? StartedBy::SlurmStep
                                                                                : StartedBy::SlurmBatch;
  if (environment.has("PMI_SIZE") && environment.text("PMI_SIZE") != "1") return StartedBy::UnknownMpi;
  for (const char* name : {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    if (environment.has(name)) return StartedBy::Variables;
  return StartedBy::Nobody;
}

/// A port between 20000 and 29999, below those that Linux gives to outgoing connections, and the same for all processes
/// that have the same text (FNV-1a).
inline std::uint16_t derived_port(const std::string& text) {
  std::uint64_t hash = 14695981039346656037U;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211U;
  return static_cast<std::uint16_t>(20000 + hash % 10000);
}

class WorldReader {
 public:
  explicit WorldReader(const EnvironmentLookup& lookup) : environment_(lookup) {}

  World read() {
    switch (started_by(environment_)) {
      case StartedBy::Variables:
        read_variables();
        break;
      case StartedBy::OpenMpi:
        read_open_mpi();
        break;
      case StartedBy::SlurmStep:
        read_slurm();
        break;
      case StartedBy::SlurmBatch:
        refuse_slurm_batch();
        break;
      case StartedBy::UnknownMpi:
        throw ConfigError(
            "World: PMI_SIZE says that an MPI launcher started several processes, but only Open MPI's variables are "
            "known here: use Open MPI's mpirun, srun, torchrun or treadle::launch, or export RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT to each process.");
      case StartedBy::Nobody:
        break;
    }
    return world_;
  }

 private:
  static constexpr int unlimited = std::numeric_limits<int>::max();

  void read_variables() {
    const auto& names = plain_names;
    if (!environment_.has(names.rank) || !environment_.has(names.world_size)) refuse_half(names);
    if (environment_.has("TREADLE_LAUNCHED"))
      world_.launcher = "treadle";
    else
      world_.launcher = environment_.has("TORCHELASTIC_RUN_ID") ? "torchrun" : "environment";
    read_ranks(names);
    world_.agent_store = environment_.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    if (environment_.has("TORCHELASTIC_RESTART_COUNT"))
      world_.restart = environment_.number("TORCHELASTIC_RESTART_COUNT", 0, unlimited);
    if (world_.world_size > 1 && (!environment_.has("MASTER_ADDR") || !environment_.has("MASTER_PORT")))
      refuse_half(names);
    read_master();
  }

  void read_open_mpi() {
    world_.launcher = open_mpi_names.launcher;
    read_ranks(open_mpi_names);
    // All processes of one mpirun have the same name space, and no two runs have.
    world_.port = world_.world_size > 1 ? derived_port(environment_.text("PMIX_NAMESPACE")) : 0;
    if (!world_.on_one_host() && !environment_.has("MASTER_ADDR")) {
      throw ConfigError("World: mpirun started " + std::to_string(world_.world_size) +
                        " processes on several hosts, and nothing says where rank 0 is: export the name of its host "
                        "with mpirun -x MASTER_ADDR=<host> (and -x MASTER_PORT=<port> to choose the port).");
    }
    read_master();
  }

  void read_slurm() {
    world_.launcher = "Slurm";
    const char* const size = environment_.either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
    for (const char* name : {size, "SLURM_LOCALID"})
      if (!environment_.has(name)) refuse_missing("SLURM_PROCID", name, "start the program with srun");
    world_.world_size = environment_.number(size, 1, unlimited);
    world_.rank = environment_.number("SLURM_PROCID", 0, unlimited);
    world_.local_rank = environment_.number("SLURM_LOCALID", 0, unlimited);
    world_.local_world_size = slurm_local_world_size();
    check_ranks({"Slurm", "SLURM_PROCID", size, "SLURM_LOCALID", "the number of tasks of this node"});
    if (world_.world_size == 1) return;
    const auto job = environment_.text(environment_.either("SLURM_JOB_ID", "SLURM_JOBID"));
    const auto step = environment_.text(environment_.either("SLURM_STEP_ID", "SLURM_STEPID"));
    world_.port = derived_port(job + "." + step);  // two steps of a job may run beside each other
    if (!environment_.has("MASTER_ADDR")) world_.host = slurm_first_host();
    read_master();
  }

  int slurm_local_world_size() const {
    const char* const lists[] = {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"};
    const int node = environment_.has("SLURM_NODEID") ? environment_.number("SLURM_NODEID", 0, unlimited) : 0;
    if (const auto tasks = slurm_tasks_of_node(environment_.text(lists[0]), node)) return *tasks;
    if (environment_.has("SLURM_NTASKS_PER_NODE")) return environment_.number("SLURM_NTASKS_PER_NODE", 1, unlimited);
    if (const auto tasks = slurm_tasks_of_node(environment_.text(lists[1]), node)) return *tasks;
    throw ConfigError("World: SLURM_STEP_TASKS_PER_NODE is " + environment_.quoted(lists[0]) +
                      ", which does not say how many tasks node " + std::to_string(node) +
                      " has: start the program with srun --ntasks-per-node=<n>.");
  }

  std::string slurm_first_host() const {
    const char* const name = environment_.either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    if (auto host = first_slurm_host(environment_.text(name))) return *host;
    throw ConfigError("World: " + std::string(name) + " is " + environment_.quoted(name) +
                      ", which names no host: export MASTER_ADDR=<host of rank 0> before srun.");
  }

  void refuse_slurm_batch() const {
    const char* const size = "SLURM_NTASKS";
    if (!environment_.has(size) || environment_.number(size, 1, unlimited) == 1) return;
    throw ConfigError("World: SLURM_NTASKS is " + environment_.text(size) +
                      ", but this process was not started by srun, so it is the only one: put srun before the program, "
                      "use treadle::launch, or unset SLURM_PROCID to run one process.");
  }

  void read_ranks(const WorldNames& names) {
    for (const char* name : {names.rank, names.world_size})
      if (!environment_.has(name)) refuse_half(names);
    world_.rank = environment_.number(names.rank, 0, unlimited);
    world_.world_size = environment_.number(names.world_size, 1, unlimited);
    for (const char* name : {names.local_rank, names.local_world_size})
      if (!environment_.has(name) && world_.world_size > 1) refuse_half(names);
    if (environment_.has(names.local_rank)) world_.local_rank = environment_.number(names.local_rank, 0, unlimited);
    if (environment_.has(names.local_world_size))
      world_.local_world_size = environment_.number(names.local_world_size, 1, unlimited);
    check_ranks(names);
  }

  void check_ranks(const WorldNames& names) const {
    require_below(names.rank, world_.rank, names.world_size, world_.world_size);
    require_below(names.local_rank, world_.local_rank, names.local_world_size, world_.local_world_size);
    if (world_.local_world_size > world_.world_size) {
      throw ConfigError("World: " + std::string(names.local_world_size) + " is " +
                        std::to_string(world_.local_world_size) + ", but the whole job has only " +
                        std::to_string(world_.world_size) + " processes (" + names.world_size + "): correct one.");
    }
  }

  static void require_below(const char* name, int value, const char* limit_name, int limit) {
    if (value < limit) return;
    throw ConfigError("World: " + std::string(name) + " is " + std::to_string(value) + ", but " + limit_name + " is " +
                      std::to_string(limit) + ", so the last one is " + std::to_string(limit - 1) +
                      ": count from 0, or correct the size.");
  }

  void read_master() {
    if (environment_.has("MASTER_ADDR")) world_.host = environment_.text("MASTER_ADDR");
    if (environment_.has("MASTER_PORT"))
      world_.port = static_cast<std::uint16_t>(environment_.number("MASTER_PORT", 1, 65535));
  }

  [[noreturn]] static void refuse_missing(const char* present, const char* missing, const char* remedy) {
    throw ConfigError("World: " + std::string(present) + " is set, but " + missing + " is not: " + remedy + ".");
  }

  [[noreturn]] void refuse_half(const WorldNames& names) const {
    std::string present, missing;
    const bool plain = names.launcher[0] == '\0';
    for (const char* name :
         {names.rank, names.world_size, names.local_rank, names.local_world_size, "MASTER_ADDR", "MASTER_PORT"}) {
      if (!plain && std::string(name).starts_with("MASTER_")) continue;
      auto& list = environment_.has(name) ? present : missing;
      list += (list.empty() ? "" : ", ") + std::string(name);
    }
    throw ConfigError("World: the environment is half set (set: " + present + "; missing: " + missing +
                      "): " + (plain ? "set all of them, use a launcher" : "let mpirun set all of them") +
                      ", or unset them all to run one process.");
  }

  Environment environment_;
  World world_;
};

}  // namespace detail

inline World World::from(const EnvironmentLookup& lookup) {
  return detail::WorldReader(lookup).read();
}

inline int World::device_index(int visible) const {
  if (local_rank < visible) return local_rank;
  throw ConfigError("World: local rank " + std::to_string(local_rank) + " has no GPU, because this process sees " +
                    std::to_string(visible) +
                    ": start at most one process a GPU on each host, or, where the launcher " +
                    "gives each process a GPU of its own, name the device (cuda:0) in the policy.");
}

}  // namespace v0_1
}  // namespace treadle
