// SPDX-License-Identifier: Apache-2.0
// What launchers set, and what is said about environments that cannot be.
#include <treadle/runtime/world.hpp>

#include <iterator>
#include <map>
#include <random>
#include <string>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using Variables = std::map<std::string, std::string>;

namespace {

td::World read(const Variables& variables) {
  return td::World::from([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  const auto text = treadle_test::thrown<td::ConfigError>([&] { read(variables); });
  INFO("it says: " << text);
  CHECK(treadle_test::is_sentence(text));
  return text;
}

Variables operator+(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables operator-(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != text.npos;
  if (!found) MESSAGE(text);
  return found;
}

const Variables torchrun{{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "n01"},
                         {"MASTER_PORT", "29400"},
                         {"TORCHELASTIC_RUN_ID", "none"},
                         {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                         {"TORCHELASTIC_RESTART_COUNT", "2"}};

const Variables mpirun{{"OMPI_COMM_WORLD_RANK", "2"},
                       {"OMPI_COMM_WORLD_SIZE", "3"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                       {"PMIX_NAMESPACE", "1297809409"}};

// As srun 22.05 set them, but for three nodes.
const Variables srun{{"SLURM_PROCID", "6"},
                     {"SLURM_NTASKS", "7"},
                     {"SLURM_STEP_NUM_TASKS", "7"},
                     {"SLURM_LOCALID", "0"},
                     {"SLURM_NODEID", "2"},
                     {"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"},
                     {"SLURM_JOB_ID", "4711"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_STEP_NODELIST", "node[003-005]"},
                     {"SLURM_JOB_NODELIST", "node[001-009]"}};

}  // namespace

TEST_CASE("nothing set is a job of one process") {
  const auto world = read({});
  CHECK(world == td::World{});
  CHECK(world.rank == 0);
  CHECK(world.world_size == 1);
  CHECK(world.on_one_host());
  CHECK(world.launcher == "none");
  CHECK(read({{"RANK", ""}, {"WORLD_SIZE", ""}}) == td::World{});  // set to nothing is not set
}

TEST_CASE("torchrun") {
  const auto world = read(torchrun);
  CHECK(world.rank == 5);
  CHECK(world.world_size == 8);
  CHECK(world.local_rank == 1);
  CHECK(world.local_world_size == 4);
  CHECK(world.host == "n01");
  CHECK(world.port == 29400);
  CHECK(world.launcher == "torchrun");
  CHECK(world.agent_store);
  CHECK(world.restart == 2);
  CHECK(!world.on_one_host());
  CHECK(!read(torchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}}).agent_store);
  CHECK(read(torchrun - "TORCHELASTIC_RUN_ID").launcher == "environment");
  CHECK(read(torchrun + Variables{{"TREADLE_LAUNCHED", "1"}}).launcher == "treadle");
  CHECK(read(torchrun + mpirun + srun).launcher == "torchrun");  // RANK decides before all others
}

TEST_CASE("one process whose RANK and WORLD_SIZE are set needs no address") {
  const auto world = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  CHECK(world.launcher == "environment");
  CHECK(world.local_world_size == 1);
  CHECK(world.host == "127.0.0.1");
}

TEST_CASE("a half-set environment is listed") {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    CAPTURE(name);
    const auto text = refusal(torchrun - name);
    CHECK(has(text, "World: the environment is half set (set: "));
    CHECK(has(text, std::string("; missing: ") + name + "): set all of them, use a launcher, or unset them all"));
    if (name == std::string("RANK"))
      CHECK(has(text, "(set: WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT;"));
    CHECK(has(refusal({{name, "1"}}), std::string("(set: ") + name + ";"));  // alone it is half set as well
  }
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    CAPTURE(name);
    CHECK(has(refusal(mpirun - name), std::string("; missing: ") + name + "): let mpirun set all of them"));
  }
}

TEST_CASE("numbers must be numbers in range") {
  for (const char* value : {"x", "1x", "-1", " 1", "1.0", "99999999999999"}) {
    CAPTURE(value);
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}) {
      const auto text = refusal(torchrun + Variables{{name, value}});
      CHECK(has(text,
                std::string("the environment variable ") + name + " is '" + value + "', but must be a whole number"));
    }
  }
  CHECK(has(refusal(torchrun + Variables{{"WORLD_SIZE", "0"}}), "from 1 to "));
  CHECK(has(refusal(torchrun + Variables{{"MASTER_PORT", "65536"}}), "from 1 to 65535"));
  CHECK(has(refusal(mpirun + Variables{{"OMPI_COMM_WORLD_RANK", "x"}}), "OMPI_COMM_WORLD_RANK is 'x'"));
  CHECK(has(refusal(srun + Variables{{"SLURM_LOCALID", "x"}}), "SLURM_LOCALID is 'x'"));
}

TEST_CASE("ranks must be below their sizes") {
  CHECK(has(refusal(torchrun + Variables{{"RANK", "8"}}), "RANK is 8, but WORLD_SIZE is 8, so the last one is 7"));
  CHECK(has(refusal(torchrun + Variables{{"LOCAL_RANK", "4"}}), "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4"));
  CHECK(has(refusal(torchrun + Variables{{"LOCAL_WORLD_SIZE", "9"}}),
            "LOCAL_WORLD_SIZE is 9, but the whole job has only 8 processes (WORLD_SIZE)"));
  CHECK(has(refusal(mpirun + Variables{{"OMPI_COMM_WORLD_RANK", "3"}}), "OMPI_COMM_WORLD_SIZE is 3"));
  CHECK(has(refusal(srun + Variables{{"SLURM_PROCID", "7"}}), "SLURM_PROCID is 7, but SLURM_STEP_NUM_TASKS is 7"));
  CHECK(has(refusal(srun + Variables{{"SLURM_LOCALID", "1"}}),
            "SLURM_LOCALID is 1, but the number of tasks of this node is 1"));
}

TEST_CASE("Open MPI on one host, and on several") {
  const auto world = read(mpirun);
  CHECK(world.rank == 2);
  CHECK(world.world_size == 3);
  CHECK(world.local_rank == 2);
  CHECK(world.local_world_size == 3);
  CHECK(world.host == "127.0.0.1");
  CHECK(world.port >= 20000);
  CHECK(world.port < 30000);
  CHECK(world.launcher == "Open MPI");
  CHECK(!world.agent_store);
  CHECK(read(mpirun + Variables{{"OMPI_COMM_WORLD_RANK", "0"}}).port == world.port);
  CHECK(read(mpirun + Variables{{"PMIX_NAMESPACE", "1297809410"}}).port != world.port);  // another mpirun beside it
  CHECK(read(mpirun + srun).launcher == "Open MPI");  // inside an allocation of Slurm
  const auto spread = mpirun + Variables{{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  CHECK(has(refusal(spread), "several hosts"));
  CHECK(has(refusal(spread), "mpirun -x MASTER_ADDR=<host> (and -x MASTER_PORT=<port>"));
  const auto told = read(spread + Variables{{"MASTER_ADDR", "n07"}});
  CHECK(told.host == "n07");
  CHECK(told.port == world.port);
  CHECK(read(spread + Variables{{"MASTER_ADDR", "n07"}, {"MASTER_PORT", "1234"}}).port == 1234);
}

TEST_CASE("another MPI is refused, because its ranks would train one by one") {
  CHECK(has(refusal({{"PMI_SIZE", "2"}, {"PMI_RANK", "0"}}), "export RANK, WORLD_SIZE"));
  CHECK(read({{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}) == td::World{});
  CHECK(read(srun + Variables{{"PMI_SIZE", "7"}}).launcher == "Slurm");
}

TEST_CASE("Slurm") {
  const auto world = read(srun);
  CHECK(world.rank == 6);
  CHECK(world.world_size == 7);
  CHECK(world.local_rank == 0);
  CHECK(world.local_world_size == 1);  // the third node of 3(x2),1
  CHECK(world.host == "node003");
  CHECK(world.port >= 20000);
  CHECK(world.port < 30000);
  CHECK(world.launcher == "Slurm");
  CHECK(read(srun + Variables{{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}).local_world_size == 3);
  CHECK(read(srun + Variables{{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}).port == world.port);
  CHECK(read(srun + Variables{{"SLURM_JOB_ID", "4712"}}).port != world.port);
  CHECK(read(srun + Variables{{"SLURM_STEP_ID", "1"}}).port != world.port);
  CHECK(read(srun - "SLURM_STEP_NODELIST").host == "node001");
  CHECK(read(srun - "SLURM_STEP_NUM_TASKS").world_size == 7);
  CHECK(read(srun + Variables{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "99"}}).host == "a");
  CHECK(read(srun + Variables{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "99"}}).port == 99);
  CHECK(read(srun - "SLURM_STEP_TASKS_PER_NODE" + Variables{{"SLURM_NTASKS_PER_NODE", "4"}}).local_world_size == 4);
  CHECK(read(srun - "SLURM_STEP_TASKS_PER_NODE" + Variables{{"SLURM_TASKS_PER_NODE", "3(x2),1"}}).local_world_size ==
        1);
}

TEST_CASE("Slurm: what is missing, and what did not come from srun") {
  CHECK(has(refusal(srun - "SLURM_LOCALID"),
            "SLURM_PROCID is set, but SLURM_LOCALID is not: start the program with srun"));
  CHECK(has(refusal(srun - "SLURM_STEP_NUM_TASKS" - "SLURM_NTASKS"), "SLURM_STEP_NUM_TASKS is not"));
  CHECK(has(refusal(srun - "SLURM_STEP_TASKS_PER_NODE"), "--ntasks-per-node"));
  CHECK(has(refusal(srun + Variables{{"SLURM_STEP_NODELIST", "node[3"}}),
            "SLURM_STEP_NODELIST is 'node[3', which names no host"));
  CHECK(has(refusal(srun - "SLURM_STEP_NODELIST" - "SLURM_JOB_NODELIST"), "export MASTER_ADDR"));
  // A batch script has the variables of its allocation, but is one process.
  const Variables batch{{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "3"}, {"SLURM_JOB_ID", "1"}};
  CHECK(has(refusal(batch), "SLURM_NTASKS is 3, but this process was not started by srun"));
  CHECK(read(batch + Variables{{"SLURM_NTASKS", "1"}}) == td::World{});
  CHECK(read({{"SLURM_NTASKS", "3"}}) == td::World{});  // the shell of salloc
}

TEST_CASE("the first host of Slurm's lists") {
  const auto first = [](const char* list) { return td::detail::first_slurm_host(list).value_or("none"); };
  CHECK(first("node7") == "node7");
  CHECK(first("a,b,c") == "a");
  CHECK(first("node[003-005,9]") == "node003");
  CHECK(first("node[9,003-005],login") == "node9");
  CHECK(first("gpu-a[12-14]-ib[0,1]") == "gpu-a12-ib0");
  CHECK(first("rack-1-node-2,rack-1-node-3") == "rack-1-node-2");
  CHECK(first("n[1-2].cluster.org") == "n1.cluster.org");
  for (const char* wrong : {"", ",a", "node[3", "node]3", "node[]", "node[a-b]", "[[1]]"}) {
    CAPTURE(wrong);
    CHECK(first(wrong) == "none");
  }
}

TEST_CASE("the tasks of a node in Slurm's lists") {
  const auto tasks = [](const char* list, int node) {
    return td::detail::slurm_tasks_of_node(list, node).value_or(-1);
  };
  CHECK(tasks("2", 0) == 2);
  CHECK(tasks("2", 1) == -1);
  CHECK(tasks("4(x2),3", 0) == 4);
  CHECK(tasks("4(x2),3", 1) == 4);
  CHECK(tasks("4(x2),3", 2) == 3);
  CHECK(tasks("4(x2),3", 3) == -1);
  CHECK(tasks("1,2(x10)", 10) == 2);
  for (const char* wrong : {"", "x", "2(3)", "2(x", "2(x)", "(x2)", "0", "-1", "2(x2"}) {
    CAPTURE(wrong);
    CHECK(tasks(wrong, 0) == -1);
  }
}

TEST_CASE("whatever is set, it is a world that can be, or a ConfigError of one sentence") {
  const std::string values[] = {
      "",     "0",           "1",        "2",    "3",          "-1",         "+1",       " 1",
      "1 ",   "0x1",         "1.0",      "1e9",  "2147483647", "2147483648", "65535",    "65536",
      "True", "a,b",         "n[1-2]",   "n[",   "]",          "4(x2),3",    "(x",       ",",
      "[]",   "99999999999", "\xff\xfe", "%s%n", "127.0.0.1",  "localhost",  "'; rm 'x", std::string(100'000, '9')};
  const std::string names[] = {"RANK",
                               "WORLD_SIZE",
                               "LOCAL_RANK",
                               "LOCAL_WORLD_SIZE",
                               "MASTER_ADDR",
                               "MASTER_PORT",
                               "TORCHELASTIC_USE_AGENT_STORE",
                               "TORCHELASTIC_RESTART_COUNT",
                               "TORCHELASTIC_RUN_ID",
                               "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               "PMIX_NAMESPACE",
                               "PMI_SIZE",
                               "SLURM_PROCID",
                               "SLURM_NTASKS",
                               "SLURM_STEP_NUM_TASKS",
                               "SLURM_LOCALID",
                               "SLURM_NODEID",
                               "SLURM_STEP_TASKS_PER_NODE",
                               "SLURM_TASKS_PER_NODE",
                               "SLURM_NTASKS_PER_NODE",
                               "SLURM_JOB_ID",
                               "SLURM_STEP_ID",
                               "SLURM_STEP_NODELIST",
                               "SLURM_JOB_NODELIST"};
  std::mt19937 random(1);
  const auto any = [&](const auto& list) { return list[random() % std::size(list)]; };
  const Variables none;
  int worlds = 0;
  int refused = 0;
  for (int i = 0; i < 6000; ++i) {
    auto variables = i % 4 == 0 ? torchrun : i % 4 == 1 ? mpirun : i % 4 == 2 ? srun : none;
    for (auto changes = random() % 4; changes > 0; --changes) variables[any(names)] = any(values);
    try {
      const auto world = read(variables);
      ++worlds;
      const bool possible = world.rank >= 0 && world.rank < world.world_size && world.local_rank >= 0 &&
                            world.local_rank < world.local_world_size && world.local_world_size <= world.world_size &&
                            !world.host.empty() && (world.port != 0 || world.world_size == 1);
      CHECK(possible);
    } catch (const td::ConfigError& error) {
      ++refused;
      const std::string text = error.what();
      const bool said = text.starts_with("World: ") && text.ends_with(".") && text.size() < 1000;
      CHECK_MESSAGE(said, text);
    }
  }
  CHECK(worlds > 1000);
  CHECK(refused > 1000);
}

TEST_CASE("a local rank beyond the GPUs") {
  td::World world;
  world.local_rank = 1;
  CHECK(world.device_index(2) == 1);
  CHECK_SAYS(td::ConfigError, "local rank 1 has no GPU, because this process sees 1", world.device_index(1));
  CHECK_THROWS_AS((void)world.device_index(0), td::ConfigError);
}
