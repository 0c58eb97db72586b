// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 600
// Real jobs of several processes: this program starts itself again, with the case "program" for its main function.
#include <treadle/runtime/launch.hpp>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

std::string variable(const char* name, const char* standard) {
  const char* value = std::getenv(name);
  return value == nullptr ? standard : value;
}

[[noreturn]] void end(int code) {
  std::fflush(stdout);
  std::_Exit(code);
}

void print(const std::string& line) {
  std::fwrite((line + "\n").data(), 1, line.size() + 1, stdout);
  std::fflush(stdout);
}

[[noreturn]] void sleep_forever() {
  for (;;) ::pause();
}

/// Enough to have OpenMP's threads up.
void tensor_work() {
  at::set_num_threads(2);
  const auto x = at::ones({256, 256});
  if (x.matmul(x).add(1).sum().item<float>() != 256.0F * 256.0F * 257.0F) end(99);
}

bool is_gone(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  const auto name_end = text.rfind(") ");
  return name_end == text.npos || text[name_end + 2] == 'Z' || text[name_end + 2] == 'X';
}

/// The command line that makes this program the case "program" alone.
std::vector<std::string> program_words() {
  return {"program", "--test-case=program", "--no-skip", "--no-intro"};
}

/// What a rank does, by the name of the case.
void rank_body(const std::string& role) {
  const auto world = td::World::from_environment();
  if (role == "stubborn" && world.rank == 0) ::signal(SIGTERM, SIG_IGN);
  if (role == "graceful") ::signal(SIGTERM, [](int) { std::_Exit(0); });
  tensor_work();
  const auto store = td::connect(world, seconds(60));
  const auto text = [&](const std::string& value) { return std::vector<std::uint8_t>(value.begin(), value.end()); };
  store->set("pid" + std::to_string(world.rank), text(std::to_string(::getpid())));
  print("rank " + std::to_string(world.rank) + " of " + std::to_string(world.world_size) + " pid " +
        std::to_string(::getpid()) + " launcher " + world.launcher + " threads " +
        variable("OMP_NUM_THREADS", "unset"));
  if (role == "sums") {  // all ranks see what all ranks have written, in two meetings
    for (int meeting = 0; meeting < 2; ++meeting) {
      const auto sums = meeting == 0 ? store : td::connect(world, seconds(60));
      sums->add("sum", world.rank + 1);
      if (sums->add("ready", 1) == world.world_size) sums->set("done", text("1"));
      sums->wait({"done"});
      if (sums->add("sum", 0) != 6) end(97);
    }
    print("rank " + std::to_string(world.rank) + " has the sum");
    return;
  }
  if (role == "connection" && world.rank == 0) {
    const auto pid = store->get("pid1");
    while (!is_gone(std::stoi(std::string(pid.begin(), pid.end())))) std::this_thread::sleep_for(milliseconds(1));
    throw std::runtime_error("the connection was lost");
  }
  if (role == "slow end" && world.rank == 0) {
    store->wait({"reported"});
    std::this_thread::sleep_for(milliseconds(100));
    throw std::runtime_error("a consequence");
  }
  if (world.rank != 1) sleep_forever();
  if (role == "throws" || role == "stubborn") throw std::runtime_error("the data is gone");
  if (role == "refused tensor") at::ones({2, 3}).matmul(at::ones({2, 3}));
  if (role == "exits") end(3);
  if (role == "killed" || role == "connection") ::raise(SIGKILL);
  if (role == "thread") std::thread([] { throw std::runtime_error("nobody catches this"); }).join();
  if (role == "reports") {
    td::report_failure("this rank hangs now");
    td::report_failure("this is the second report");
  }
  if (role == "slow end") {
    td::report_failure("the cause");
    store->set("reported", text("1"));
    std::this_thread::sleep_for(milliseconds(1500));
    end(5);
  }
  sleep_forever();
}

}  // namespace

TEST_CASE("program" * doctest::skip()) {
  tensor_work();  // before launch, so that the launcher has OpenMP's threads
  auto words = program_words();
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  td::LaunchOptions options;
  options.grace = milliseconds(std::stoi(variable("TEST_GRACE", "1000")));
  options.kill_grace = milliseconds(500);
  options.log_dir = variable("TEST_LOGS", "");
  int code = 0;
  const std::string role = variable("TEST_ROLE", "sums");
  const int ranks = std::stoi(variable("TEST_RANKS", "2"));
  if (const auto done = td::launch(ranks, static_cast<int>(argv.size()), argv.data(), options)) {
    code = *done;
    print("launch returned " + std::to_string(code));
  } else {
    code = td::run_rank([&] { rank_body(role); });
  }
  end(code);
}

namespace {

/// The program, running; what it and its ranks write is collected.
class Program {
 public:
  explicit Program(const std::string& role, std::map<std::string, std::string> more = {}) {
    more["TEST_ROLE"] = role;
    std::vector<std::string> environment;
    for (char** one = ::environ; *one != nullptr; ++one) {
      const std::string text(*one);
      if (more.count(text.substr(0, text.find('='))) == 0 && text.rfind("OMP_NUM_THREADS=", 0) != 0)
        environment.push_back(text);
    }
    for (const auto& [name, value] : more) environment.push_back(name + "=" + value);
    std::vector<char*> variables;
    for (auto& one : environment) variables.push_back(one.data());
    variables.push_back(nullptr);
    auto words = program_words();
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int pipe[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    read_end_ = pipe[0];
    ::fcntl(read_end_, F_SETFL, O_NONBLOCK);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, pipe[1], 1);
    ::posix_spawn_file_actions_adddup2(&actions, pipe[1], 2);
    REQUIRE(::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), variables.data()) == 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(pipe[1]);
  }
  ~Program() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(read_end_);
  }

  void send(int number) const { ::kill(pid_, number); }
  pid_t pid() const { return pid_; }

  /// Waits until `count` ranks have told their process id, and gives those.
  std::vector<pid_t> ranks(std::size_t count = 2) {
    const auto deadline = std::chrono::steady_clock::now() + seconds(90);
    std::vector<pid_t> found;
    while (found.size() < count && std::chrono::steady_clock::now() < deadline) {
      collect(milliseconds(20));
      found.clear();
      const std::regex line("rank [0-9]+ of [0-9]+ pid ([0-9]+)");
      for (std::sregex_iterator i(output_.begin(), output_.end(), line), last; i != last; ++i)
        found.push_back(std::stoi((*i)[1]));
    }
    INFO(output_);
    REQUIRE(found.size() == count);
    return found;
  }

  /// Waits for its end; gives the code, 128 + number for a signal, -1 if it does not end.
  int finish(seconds limit = seconds(90)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) return -1;
      collect(milliseconds(20));
    }
    ended_ = true;
    collect(milliseconds(0));
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  const std::string& output() const { return output_; }
  std::size_t count(const std::string& part) const {
    std::size_t result = 0;
    for (auto at = output_.find(part); at != output_.npos; at = output_.find(part, at + 1)) ++result;
    return result;
  }

 private:
  void collect(milliseconds limit) {
    pollfd waiting{read_end_, POLLIN, 0};
    if (::poll(&waiting, 1, static_cast<int>(limit.count())) == 1 && (waiting.revents & POLLIN) == 0)
      std::this_thread::sleep_for(limit);  // all writers have gone
    char buffer[4096];
    for (ssize_t size = 0; (size = ::read(read_end_, buffer, sizeof buffer)) > 0;)
      output_.append(buffer, static_cast<std::size_t>(size));
  }

  pid_t pid_ = -1;
  int read_end_ = -1;
  bool ended_ = false;
  std::string output_;
};

/// Whether all have ended within `limit`.
bool all_gone(const std::vector<pid_t>& pids, milliseconds limit = milliseconds(0)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto pid : pids) {
    while (!is_gone(pid)) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  return true;
}

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Failure {
  const char* role;
  int code;
  const char* sentence;
};

}  // namespace

TEST_CASE("ranks start after tensor work in the launcher, share a store, and end with 0") {
  Program program("sums", {{"TEST_RANKS", "3"}});
  const int code = program.finish();
  INFO(program.output());
  CHECK(code == 0);
  CHECK(program.count("has the sum") == 3);
  CHECK(program.count("launcher treadle") == 3);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  CHECK(program.count("threads " + std::to_string(std::max(1, cores / 3)) + "\n") == 3);
  CHECK(program.count("launch returned 0") == 1);
  CHECK(program.count("launch:") == 0);
  CHECK(all_gone(program.ranks(3)));
}

TEST_CASE("OMP_NUM_THREADS stays what it is") {
  Program program("sums", {{"OMP_NUM_THREADS", "7"}, {"TEST_RANKS", "3"}});
  CHECK(program.finish() == 0);
  CHECK(program.count("threads 7\n") == 3);
}

TEST_CASE("the first rank that fails is named once, the others end after the grace, and its code is returned") {
  const Failure failures[] = {
      {"throws", 1, "launch: rank 1 of 2 failed with exit code 1: the data is gone\n"},
      {"refused tensor", 1,
       "launch: rank 1 of 2 failed with exit code 1: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)\n"},
      {"exits", 3, "launch: rank 1 of 2 failed with exit code 3.\n"},
      {"killed", 137, "launch: rank 1 of 2 was killed by SIGKILL, which the kernel sends when memory is exhausted.\n"},
      {"thread", 134, "launch: rank 1 of 2 was killed by SIGABRT: nobody catches this\n"},
      {"reports", 1, "launch: rank 1 of 2 failed with exit code 1: this rank hangs now\n"}};
  for (const auto& [which, code, sentence] : failures) {
    const auto& role = which;  // clang 14 lets no lambda, and so no CAPTURE, take a structured binding
    CAPTURE(role);
    Program program(role);
    const auto ranks = program.ranks();
    const auto start = std::chrono::steady_clock::now();
    const int returned = program.finish();
    const double took = since(start);
    INFO(program.output());
    CHECK(returned == code);
    CHECK(program.count(sentence) == 1);
    CHECK(program.count("launch:") == 1);
    CHECK(program.count("launch returned " + std::to_string(code)) == 1);
    CHECK(took > 0.7);  // the grace is 1 s; some of it passes before the output is seen here
    CHECK(took < 15);
    CHECK(all_gone(ranks));
  }
}

TEST_CASE("a rank that does not obey SIGTERM gets SIGKILL") {
  Program program("stubborn");
  const auto ranks = program.ranks();
  const auto start = std::chrono::steady_clock::now();
  const int code = program.finish();
  const double took = since(start);
  INFO(program.output());
  CHECK(code == 1);
  CHECK(program.count("failed with exit code 1: the data is gone") == 1);
  CHECK(took > 1.2);  // both graces: 1 s and 0.5 s
  CHECK(took < 9);    // 10 s after SIGKILL the launcher would give up waiting
  CHECK(all_gone(ranks));
}

TEST_CASE("a consequence in another rank is not taken for the cause") {
  const Failure failures[] = {{"connection", 137, "launch: rank 1 of 2 was killed by SIGKILL"},
                              {"slow end", 5, "launch: rank 1 of 2 failed with exit code 5: the cause\n"}};
  for (const auto& [which, code, sentence] : failures) {
    const auto& role = which;  // clang 14 lets no lambda, and so no CAPTURE, take a structured binding
    CAPTURE(role);
    Program program(role, {{"TEST_GRACE", "4000"}});
    const int returned = program.finish();
    INFO(program.output());
    CHECK(returned == code);
    CHECK(program.count(sentence) == 1);
    CHECK(program.count("launch:") == 1);
  }
}

TEST_CASE("signals reach the ranks") {
  const std::pair<int, std::string> signals[] = {{SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGHUP, "SIGHUP"}};
  for (const auto& [number, called] : signals) {
    const auto& name = called;
    CAPTURE(name);
    Program program("waits", {{"TEST_GRACE", "60000"}});
    const auto ranks = program.ranks();
    const auto start = std::chrono::steady_clock::now();
    program.send(number);
    const int code = program.finish();
    INFO(program.output());
    CHECK(code == 128 + number);
    CHECK(since(start) < 15);  // they do not wait for the grace
    CHECK(program.count("launch: the job was ended by " + name + ".\n") == 1);
    CHECK(program.count("launch:") == 1);
    CHECK(all_gone(ranks));
  }
}

TEST_CASE("ranks that handle a signal choose their code") {
  Program program("graceful", {{"TEST_GRACE", "60000"}});
  const auto ranks = program.ranks();
  const auto start = std::chrono::steady_clock::now();
  program.send(SIGTERM);
  const int code = program.finish();
  INFO(program.output());
  CHECK(code == 0);
  CHECK(since(start) < 15);
  CHECK(program.count("launch:") == 0);
  CHECK(all_gone(ranks));
}

TEST_CASE("a launcher that is killed takes its ranks with it") {
  Program program("stubborn", {{"TEST_GRACE", "60000"}});
  const auto ranks = program.ranks();
  program.send(SIGKILL);
  CHECK(program.finish() == 137);
  CHECK(all_gone(ranks, seconds(5)));
}

TEST_CASE("each rank has its own file") {
  char folder[] = "/tmp/treadle-launch-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  const std::string logs = std::string(folder) + "/logs";
  Program program("throws", {{"TEST_LOGS", logs}});
  const int code = program.finish();
  INFO(program.output());
  CHECK(code == 1);
  CHECK(program.count("of 2 pid") == 0);
  CHECK(program.count("(output in '" + logs + "/rank-1.log'): the data is gone\n") == 1);
  for (int rank = 0; rank < 2; ++rank) {
    const auto path = logs + "/rank-" + std::to_string(rank) + ".log";
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    CHECK(text.str().find("rank " + std::to_string(rank) + " of 2 pid") != std::string::npos);
    CHECK((text.str().find("the data is gone\n") != std::string::npos) == (rank == 1));
    ::unlink(path.c_str());
  }
  ::rmdir(logs.c_str());
  ::rmdir(folder);
}

TEST_CASE("launch in this process leaves handlers and children as they were") {
  tensor_work();
  const int caught[] = {SIGHUP, SIGINT, SIGTERM, SIGCHLD};
  const auto handlers = [&] {
    std::vector<void (*)(int)> result;
    for (const int number : caught) {
      struct sigaction action {};
      ::sigaction(number, nullptr, &action);
      result.push_back(action.sa_handler);
    }
    return result;
  };
  struct sigaction mine {};
  mine.sa_handler = [](int) {};
  ::sigaction(SIGHUP, &mine, nullptr);
  const auto before = handlers();
  char folder[] = "/tmp/treadle-launch-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  auto words = program_words();
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  std::vector<std::string> texts;
  const auto sink = td::set_sink([&](td::Severity, std::string_view text) { texts.emplace_back(text); });
  ::setenv("TEST_ROLE", "throws", 1);
  td::LaunchOptions options;
  options.grace = milliseconds(200);
  options.log_dir = folder;
  const auto code = td::launch(2, static_cast<int>(argv.size()), argv.data(), options);
  ::unsetenv("TEST_ROLE");
  td::set_sink(sink);
  CHECK(code == 1);
  REQUIRE(texts.size() == 1);
  const std::string log = std::string(folder) + "/rank-1.log";
  CHECK(texts[0] == "launch: rank 1 of 2 failed with exit code 1 (output in '" + log + "'): the data is gone");
  ::unlink(log.c_str());
  ::unlink((std::string(folder) + "/rank-0.log").c_str());
  ::rmdir(folder);
  CHECK((handlers() == before));
  ::signal(SIGHUP, SIG_DFL);
  CHECK(::waitpid(-1, nullptr, WNOHANG) == -1);  // no child is left, not even a zombie
  CHECK(errno == ECHILD);
  CHECK(std::getenv("RANK") == nullptr);
}

TEST_CASE("what launch refuses") {
  auto words = program_words();
  std::vector<char*> list;
  for (auto& word : words) list.push_back(word.data());
  const auto argc = static_cast<int>(list.size());
  char** const argv = list.data();
  CHECK_SAYS(td::ConfigError, "0 processes cannot be started", td::launch(0, argc, argv));
  td::LaunchOptions options;
  options.grace = milliseconds(-1);
  CHECK_SAYS(td::ConfigError, "must not be negative", td::launch(2, argc, argv, options));
  options.grace = milliseconds(1000);
  options.log_dir = "/dev/null/logs";
  CHECK_SAYS(td::ConfigError, "cannot write '/dev/null/logs/rank-0.log'", td::launch(2, argc, argv, options));
  CHECK(!td::launch(1, argc, argv).has_value());  // one process is this one
  for (const auto& [variable, value] : {std::pair{"RANK", "1"},
                                        {"WORLD_SIZE", "4"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"MASTER_ADDR", "a"},
                                        {"MASTER_PORT", "1"}})
    ::setenv(variable, value, 1);
  CHECK_SAYS(td::ConfigError, "this process is rank 1 of 4 already (environment)", td::launch(2, argc, argv));
  CHECK(!td::launch(1, argc, argv).has_value());
  for (const char* variable : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    ::unsetenv(variable);
}

TEST_CASE("a rank that comes too late for its launcher says so") {
  Program program("sums", {{"TREADLE_LAUNCHER_PID", "1"}, {"TREADLE_REPORT_FD", "0"}});
  CHECK(program.finish() != 0);
  CHECK(program.count("launch: the launcher of this rank has ended") == 1);
}

TEST_CASE("closed standard streams give their numbers to nothing else") {
  std::array<char, 4096> path{};
  REQUIRE(::readlink("/proc/self/exe", path.data(), path.size() - 1) > 0);
  const std::string command = "TEST_ROLE=sums TEST_RANKS=3 timeout -k 5 90 '" + std::string(path.data()) +
                              "' --test-case=program --no-skip --no-intro";
  for (const char* closed : {" <&- >&-", " <&- >&- 2>&-", " >&-"}) {
    CAPTURE(std::string(closed));
    CHECK(std::system((command + closed).c_str()) == 0);
  }
}

TEST_CASE("run_rank without a launcher warns and returns the code") {
  std::vector<std::string> texts;
  const auto sink = td::set_sink([&](td::Severity, std::string_view text) { texts.emplace_back(text); });
  CHECK(td::run_rank([] {}) == 0);
  CHECK(td::run_rank([] { return 4; }) == 4);
  CHECK(td::run_rank([] { throw std::runtime_error("no such file"); }) == 1);
  CHECK(td::run_rank([] { throw 1; }) == 1);
  td::set_sink(sink);
  CHECK(texts == std::vector<std::string>{"no such file", "an exception that is no std::exception"});
}
