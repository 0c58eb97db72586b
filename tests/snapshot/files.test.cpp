// SPDX-License-Identifier: Apache-2.0
// treadle-test: PYTHON TIMEOUT 300
// The files of snapshots: JSON within bounds, files that are on the disk or not there, safetensors.
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/doctest.hpp"
#include "support/folder.hpp"
#include "support/skip.hpp"
#include "treadle/snapshot/checksum.hpp"
#include "treadle/snapshot/durable_file.hpp"
#include "treadle/snapshot/input_file.hpp"
#include "treadle/snapshot/json.hpp"

namespace td = treadle;
namespace td_detail = treadle::detail;
using treadle_test::Folder;

namespace {

/// What a SnapshotError says; "" if nothing was thrown.
template <class Work>
std::string sentence_of(Work&& work) {
  try {
    work();
  } catch (const td::SnapshotError& error) {
    return error.what();
  }
  return "";
}

#define CHECK_SAYS(text, ...)                                                      \
  do {                                                                             \
    const std::string said = sentence_of([&] { static_cast<void>(__VA_ARGS__); }); \
    INFO("it says: " << said);                                                     \
    CHECK(said.find(text) != std::string::npos);                                   \
    CHECK(said.find('\n') == std::string::npos);                                   \
  } while (false)

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
bool is_there(const std::filesystem::path& path) {
  struct stat state {};
  return ::lstat(path.c_str(), &state) == 0;
}
std::set<std::string> names_in(const std::filesystem::path& path) {
  const auto names = td_detail::names_in(td_detail::FileHandle(::open(path.c_str(), O_RDONLY | O_DIRECTORY)), path);
  return {names.begin(), names.end()};
}
nlohmann::json parsed(const std::string& text) {
  return td_detail::parse_json(text, "some.json");
}

/// Runs `work` in a process of its own, and returns its exit status; 99 if it threw.
template <class Work>
int in_process(Work&& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(status);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void nothing(int) {}

}  // namespace

TEST_CASE("JSON is read within bounds, and every fault is a sentence with the file and the byte") {
  CHECK(parsed(R"({"b": [1, -2, 2.5, true, null, "\u00e9"], "a": {}})") ==
        nlohmann::json({{"a", nlohmann::json::object()}, {"b", {1, -2, 2.5, true, nullptr, "é"}}}));
  CHECK(parsed(" [[], [[]], {\"x\": [{}]}] ").dump() == R"([[],[[]],{"x":[{}]}])");
  CHECK(parsed("18446744073709551615").get<std::uint64_t>() == std::numeric_limits<std::uint64_t>::max());

  CHECK_SAYS("'some.json' is damaged or foreign: its JSON has the key 'a' twice near byte 12",
             parsed(R"({"a": 1, "a": 2})"));
  CHECK_SAYS("has the key 'k' twice", parsed(R"([{"a": {"k": [], "b": {"k": 1}, "k": 2}}])"));
  CHECK_SAYS("near byte 3", parsed("{}x"));
  CHECK_SAYS("cannot be parsed", parsed("{} {}"));
  CHECK_SAYS("has a zero byte near byte 3", parsed(std::string("{}\0{}", 5)));
  CHECK_SAYS("ill-formed UTF-8", parsed("[\"\xC3\x28\"]"));
  CHECK_SAYS("cannot be parsed", parsed("[\"\\ud800\"]"));
  CHECK_SAYS("number overflow", parsed("[1e999]"));
  for (const char* text :
       {"", " ", "{", "[1,", "[1,]", "{\"a\"}", "{\"a\":}", "{a:1}", "nul", "NaN", "[01]", "// x\n1", "'a'"}) {
    CAPTURE(text);
    CHECK_SAYS("'some.json' is damaged or foreign: its JSON cannot be parsed (", parsed(text));
  }

  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') + std::string(static_cast<std::size_t>(depth), ']');
  };
  CHECK(parsed(nested(64)).is_array());
  CHECK_SAYS("is nested too deep near byte 65", parsed(nested(65)));
  CHECK_SAYS("is nested too deep", parsed(std::string(10'000'000, '[')));
  CHECK_SAYS("is nested too deep", parsed([] {
               std::string text;
               for (int i = 0; i < 100'000; ++i) text += "{\"a\":";
               return text;
             }()));
  CHECK_SAYS("holds 5 bytes of JSON, and 4 are the most", td_detail::parse_json("12345", "x", {.bytes = 4}));
  // A token as long as the text is not repeated in the sentence.
  CHECK(sentence_of([] { parsed('"' + std::string(1'000'000, 'x')); }).size() < 300);
  CHECK(sentence_of([] { parsed(std::string(1'000'000, '9') + "e999999999"); }).size() < 300);
  CHECK(sentence_of([] {
          const std::string key(1000, 'k');
          parsed("{\"" + key + "\":1,\"" + key + "\":2}");
        }).size() < 300);
}

TEST_CASE("JSON is written in one form, which reads back as what it was") {
  const nlohmann::json value{
      {"z", 0.1}, {"a", {1, 2}}, {"big", std::numeric_limits<std::uint64_t>::max()}, {"s", "é\n"}};
  const std::string text = td_detail::dump_json(value, "x");
  CHECK(text ==
        "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"big\": 18446744073709551615,\n  \"s\": \"é\\n\",\n  \"z\": 0.1\n}\n");
  CHECK(parsed(text) == value);
  CHECK(td_detail::dump_json(parsed(text), "x") == text);
  for (const double number : {0.1, 1e-310, 3.0, 1.7976931348623157e308, -0.0, 1.0 / 3})
    CHECK(parsed(td_detail::dump_json(number, "x")).get<double>() == number);
  CHECK_SAYS("'x' cannot be written: JSON has no infinity", td_detail::dump_json({{"a", {1, INFINITY}}}, "x"));
  CHECK_SAYS("JSON has no infinity and no NaN", td_detail::dump_json(NAN, "x"));
  CHECK_SAYS("one of its strings is not UTF-8", td_detail::dump_json("\xFF", "x"));
}

TEST_CASE("sums are those of xxhsum, in pieces as in one") {
  CHECK(td_detail::checksum("") == 0x2d06800538d394c2);
  CHECK(td_detail::checksum_text(0xab) == "00000000000000ab");
  CHECK(td_detail::checksum_from("00000000000000ab") == 0xab);
  for (const char* text : {"", "ab", "00000000000000AB", "00000000000000a ", "000000000000000ab", "0x000000000000ab"})
    CHECK(!td_detail::checksum_from(text));
  const Folder folder;
  std::string bytes(3'000'001, 'x');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 + i / 257);
  td_detail::Checksum sum;
  for (std::size_t at = 0; at < bytes.size(); at += 1001)
    sum.add(bytes.data() + at, std::min<std::size_t>(1001, bytes.size() - at));
  CHECK(sum.value() == td_detail::checksum(bytes));
  CHECK(td_detail::file_checksum(folder.write("x", bytes)) == sum.value());
  bytes[2'000'000] = static_cast<char>(bytes[2'000'000] ^ 1);
  CHECK(td_detail::file_checksum(folder.write("x", bytes)) != sum.value());
}

TEST_CASE("a durable file is new, whole and kept, or gone") {
  const Folder folder;
  const auto path = folder.path / "file";
  {
    td_detail::DurableFile file(path);
    std::string all;
    for (int i = 0; i < 3000; ++i) {
      const std::string piece(static_cast<std::size_t>(i % 7 == 0 ? 300'000 : i), static_cast<char>('a' + i % 26));
      if (all.size() < 20'000'000) {
        file.write(piece);
        all += piece;
      }
    }
    CHECK(file.size() == static_cast<std::int64_t>(all.size()));
    file.finish();
    CHECK(bytes_of(path) == all);
  }
  CHECK(is_there(path));
  CHECK_SAYS("file' cannot be created (File exists): remove it, or choose another name.", td_detail::DurableFile(path));
  CHECK(is_there(path));
  CHECK_SAYS("(No such file or directory): create its folder first.",
             td_detail::DurableFile(folder.path / "no" / "file"));
  {
    td_detail::DurableFile file(folder.path / "dropped");
    file.write("x");
    file.sync();
    CHECK(is_there(folder.path / "dropped"));
  }
  CHECK(!is_there(folder.path / "dropped"));
  td_detail::sync_directory(folder.path);
  CHECK_SAYS("cannot be written to disk (No such file", td_detail::sync_directory(folder.path / "no"));
}

TEST_CASE("a file is replaced in one piece") {
  const Folder folder;
  const auto path = folder.path / "file";
  td_detail::write_file_atomically(path, "first");
  td_detail::write_file_atomically(path, "second");
  CHECK(bytes_of(path) == "second");
  {
    td_detail::AtomicFile dropped(path);
    dropped.file().write("third");
    dropped.file().sync();
    CHECK(bytes_of(path) == "second");
    CHECK(names_in(folder.path) == std::set<std::string>{"file", "file.treadle-tmp"});
    // Two at once: the second is told so, and the first is not harmed.
    CHECK_SAYS("file.treadle-tmp' is being written by somebody else", td_detail::write_file_atomically(path, "other"));
    CHECK(is_there(folder.path / "file.treadle-tmp"));
  }
  CHECK(bytes_of(path) == "second");
  CHECK(names_in(folder.path) == std::set<std::string>{"file"});

  // What a crash leaves is in nobody's way, and goes.
  folder.write("file.treadle-tmp", "half of somethi");
  td_detail::write_file_atomically(path, "third");
  CHECK(bytes_of(path) == "third");
  CHECK(names_in(folder.path) == std::set<std::string>{"file"});

  std::filesystem::create_symlink("file", folder.path / "link");
  td_detail::write_file_atomically(folder.path / "link", "fourth");
  CHECK(bytes_of(path) == "fourth");
  CHECK(std::filesystem::is_symlink(folder.path / "link"));

  std::filesystem::create_directory(folder.path / "folder");
  CHECK_SAYS("folder' cannot be written: it is no regular file",
             td_detail::write_file_atomically(folder.path / "folder", "x"));
  CHECK_SAYS("create its folder first", td_detail::write_file_atomically(folder.path / "no" / "file", "x"));
  CHECK_SAYS("cannot be written", td_detail::write_file_atomically("", "x"));
  std::filesystem::create_symlink("/etc/passwd", folder.path / "other.treadle-tmp");
  CHECK_SAYS("other.treadle-tmp' cannot be removed", td_detail::write_file_atomically(folder.path / "other", "x"));

  // Many writers of one path: each write is whole or refused, and at the end nothing else is there.
  const auto contended = folder.path / "many" / "file";
  std::filesystem::create_directory(folder.path / "many");
  std::atomic<int> written{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        try {
          td_detail::write_file_atomically(contended, std::string(5000, static_cast<char>('a' + t)));
          ++written;
        } catch (const td::SnapshotError&) {
        }
        const auto now = bytes_of(contended);
        if (!now.empty() && (now.size() != 5000 || now.find_first_not_of(now[0]) != std::string::npos)) std::abort();
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(written > 0);
  CHECK(names_in(folder.path / "many") == std::set<std::string>{"file"});
}

TEST_CASE("a writer that is killed at any moment leaves the old file or the new one, and one temporary at most") {
  const Folder folder;
  const auto path = folder.path / "file";
  td_detail::write_file_atomically(path, std::string(100'000, 'a'));
  for (int kill = 0; kill < 40; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int i = 0;; ++i)
        td_detail::write_file_atomically(path, std::string(100'000, static_cast<char>('a' + i % 26)));
    }
    ::usleep(static_cast<useconds_t>(200 + 373 * kill));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto now = bytes_of(path);
    REQUIRE(now == std::string(100'000, now.at(0)));
    REQUIRE(names_in(folder.path).size() <= 2);
  }
  td_detail::write_file_atomically(path, "end");
  CHECK(names_in(folder.path) == std::set<std::string>{"file"});
}

TEST_CASE("a full disk and a limit are sentences, and leave what was there") {
  const Folder folder;
  const auto path = folder.path / "file";
  td_detail::write_file_atomically(path, "good");
  // A limit on the size of files, in a process that has it for itself.
  CHECK(in_process([&] {
          ::signal(SIGXFSZ, SIG_IGN);
          const rlimit limit{1 << 20, 1 << 20};
          if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
          for (const std::size_t size : {std::size_t{100'000}, std::size_t{3'000'000}}) {  // buffered and not
            const auto said = sentence_of([&] {
              td_detail::AtomicFile file(path);
              for (int i = 0; i < 40; ++i) file.file().write(std::string(size, 'x'));
              file.commit();
            });
            if (said.find("file.treadle-tmp' cannot be written (File too large): raise the limit") == std::string::npos)
              return 2;
          }
          return 0;
        }) == 0);
  CHECK(bytes_of(path) == "good");
  CHECK(names_in(folder.path) == std::set<std::string>{"file"});

  td_detail::FileHandle full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (full) CHECK(td_detail::write_fully(full.get(), "x", 1) == ENOSPC);

  const auto small = folder.path / "small";
  std::filesystem::create_directory(small);
  if (::mount("tmpfs", small.c_str(), "tmpfs", 0, "size=1m") != 0)
    TREADLE_SKIP("a small disk cannot be mounted here, which takes root");
  td_detail::write_file_atomically(small / "file", std::string(500'000, 'a'));
  CHECK_SAYS("cannot be written (No space left on device): make room, or choose a folder on another disk.",
             td_detail::write_file_atomically(small / "file", std::string(700'000, 'b')));
  CHECK_SAYS("(No space left on device)", td_detail::DurableFile(small / "other").reserve(2 << 20));
  CHECK(bytes_of(small / "file") == std::string(500'000, 'a'));
  CHECK(names_in(small) == std::set<std::string>{"file"});
  CHECK(::umount(small.c_str()) == 0);
}

TEST_CASE("interrupted and short writes go on") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  struct sigaction action {};
  action.sa_handler = nothing;  // without SA_RESTART: a call that waits is interrupted
  struct sigaction before {};
  REQUIRE(::sigaction(SIGALRM, &action, &before) == 0);
  const std::string sent(4'000'000, 'x');
  std::size_t received = 0;
  std::thread reader([&] {
    sigset_t signals;
    sigfillset(&signals);
    ::pthread_sigmask(SIG_SETMASK, &signals, nullptr);  // all signals are the writer's
    std::vector<char> piece(50'000);
    for (ssize_t got = 1; got > 0; received += static_cast<std::size_t>(got > 0 ? got : 0)) {
      ::usleep(500);
      got = ::read(ends[0], piece.data(), piece.size());
    }
  });
  const itimerval often{{0, 300}, {0, 300}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  CHECK(td_detail::write_fully(ends[1], sent.data(), sent.size()) == 0);
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  ::close(ends[1]);
  reader.join();
  ::close(ends[0]);
  CHECK(received == sent.size());
}

TEST_CASE("a folder is removed with all that it holds, and nothing that is elsewhere") {
  const Folder folder;
  folder.write("kept/file", "x");
  folder.write("tree/a/b/file", "x");
  folder.write("tree/.hidden", "x");
  std::filesystem::create_directories(folder.path / "tree/empty");
  std::filesystem::create_symlink(folder.path / "kept", folder.path / "tree/link");
  std::filesystem::create_symlink(folder.path / "kept", folder.path / "outer");
  std::filesystem::create_symlink("nowhere", folder.path / "tree/a/dangling");
  CHECK(td_detail::remove_tree(folder.path / "tree/"));
  CHECK(!is_there(folder.path / "tree"));
  CHECK(!td_detail::remove_tree(folder.path / "tree"));
  CHECK(!td_detail::remove_tree(folder.path / "no" / "tree"));
  CHECK(td_detail::remove_tree(folder.path / "outer/"));
  CHECK(bytes_of(folder.path / "kept/file") == "x");
  CHECK(td_detail::remove_tree(folder.path / "kept/file"));
  CHECK(names_in(folder.path) == std::set<std::string>{"kept"});
  for (const char* name : {"", ".", "..", "/", "//", "kept/.", "kept/.."})
    CHECK_SAYS("is not removed: name the folder itself", td_detail::remove_tree(name));
}

TEST_CASE("input files are regular, of a size, and read whole") {
  const Folder folder;
  const auto path = folder.write("file", "0123456789");
  CHECK(td_detail::read_file(path, 10) == "0123456789");
  CHECK_SAYS("file' holds 10 bytes, and 9 are the most", td_detail::read_file(path, 9));
  CHECK_SAYS("no' cannot be read (No such file or directory): name a file that is there.",
             td_detail::read_file(folder.path / "no", 9));
  CHECK_SAYS("is no regular file", td_detail::read_file(folder.path, 9));
  REQUIRE(::mkfifo((folder.path / "pipe").c_str(), 0600) == 0);
  CHECK_SAYS("is no regular file", td_detail::read_file(folder.path / "pipe", 9));
  const td_detail::InputFile file(path);
  REQUIRE(::truncate(path.c_str(), 5) == 0);
  CHECK_SAYS("has become shorter while it was read", file.read_all(10));
  CHECK_SAYS("has become shorter while it was read", file.checksum());
}
