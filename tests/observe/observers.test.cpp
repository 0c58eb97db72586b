// SPDX-License-Identifier: Apache-2.0
// treadle-test: PYTHON
// The text sink and the observers, driven by events alone.

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <treadle/observe/concept.hpp>
#include <treadle/observe/curve.hpp>
#include <treadle/observe/metrics_file.hpp>
#include <treadle/observe/progress_bar.hpp>
#include <treadle/observe/table.hpp>
#include <treadle/runtime/sink.hpp>

#include "support/doctest.hpp"
#include "support/skip.hpp"

namespace td = treadle;
namespace fs = std::filesystem;
using namespace td::observe;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double inf_value = std::numeric_limits<double>::infinity();

using Text = std::pair<td::Severity, std::string>;

/// Collects every text while it lives.
struct Capture {
  std::vector<Text> texts;
  td::Sink before =
      td::set_sink([this](td::Severity severity, std::string_view text) { texts.emplace_back(severity, text); });
  ~Capture() { td::set_sink(before); }
  std::vector<std::string> of(td::Severity wanted) const {
    std::vector<std::string> found;
    for (const auto& [severity, text] : texts)
      if (severity == wanted) found.push_back(text);
    return found;
  }
};

/// Sets an environment variable while it lives.
struct Setting {
  Setting(const char* name, const char* value) : name(name) {
    if (const char* old = std::getenv(name)) before = old, was_set = true;
    setenv(name, value, 1);
  }
  ~Setting() { was_set ? setenv(name, before.c_str(), 1) : unsetenv(name); }
  const char* name;
  std::string before;
  bool was_set = false;
};

/// Points standard output to `file` while it lives.
struct Redirect {
  explicit Redirect(int file) {
    std::fflush(stdout);
    saved = dup(STDOUT_FILENO);
    dup2(file, STDOUT_FILENO);
  }
  ~Redirect() {
    std::fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
  }
  int saved = -1;
};

/// A new folder. It is emptied by the shell: LibTorch's libraries bring a remove_all of their own that crashes.
struct Folder {
  fs::path path = fs::current_path() / ("observers_test_" + std::to_string(getpid()));
  Folder() {
    clear();
    fs::create_directories(path);
  }
  ~Folder() { clear(); }
  void clear() const {
    if (std::system(("rm -rf '" + path.string() + "'").c_str()) != 0) std::abort();
  }
};

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}
std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> found;
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) found.push_back(line);
  return found;
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

td::Metrics metrics(std::initializer_list<std::pair<const char*, double>> values) {
  td::Metrics made;
  for (const auto& [name, value] : values) made.set(name, value);
  return made;
}
LogEvent log_event(std::int64_t epoch, std::int64_t step, td::Metrics values) {
  return {.epoch = epoch,
          .step_in_epoch = step,
          .step = step,
          .metrics = std::move(values),
          .learning_rate = 0.001,
          .seconds = 1.5,
          .steps_per_second = 84.2,
          .rows_per_second = 10777};
}
EpochEvent epoch_event(std::int64_t epoch, std::int64_t step, td::Metrics train, std::optional<td::Metrics> test = {}) {
  return {.epoch = epoch,
          .step = step,
          .train = std::move(train),
          .test = std::move(test),
          .seconds = 12.3,
          .rows_per_second = 5120};
}
void make_steps(ProgressBar& bar, std::int64_t epoch, std::int64_t count, std::int64_t before) {
  const td::StepResult result{};
  for (std::int64_t i = 0; i < count; ++i)
    bar.on_step({.result = result, .epoch = epoch, .step_in_epoch = i + 1, .step = before + i + 1});
}

std::string config_error(const std::function<void()>& f) {
  try {
    f();
  } catch (const td::ConfigError& error) {
    return error.what();
  }
  return "";
}

/// Runs a Python program with one argument; its exit status.
int python(const std::string& program, const fs::path& argument) {
  const char* interpreter = std::getenv("TREADLE_PYTHON");
  return std::system(("'" + std::string(interpreter) + "' -c '" + program + "' '" + argument.string() + "'").c_str());
}
bool has_python() {
  const char* interpreter = std::getenv("TREADLE_PYTHON");
  return interpreter != nullptr && fs::exists(interpreter);
}

}  // namespace

TEST_CASE("a sink takes every text, and is given back") {
  std::vector<Text> outer;
  const td::Sink before =
      td::set_sink([&](td::Severity severity, std::string_view text) { outer.emplace_back(severity, text); });
  {
    Capture inner;
    td::say("one");
    td::warn("two");
    td::write_text(td::Severity::Progress, "three");
    CHECK((inner.texts == std::vector<Text>{{td::Severity::Info, "one"},
                                            {td::Severity::Warning, "two"},
                                            {td::Severity::Progress, "three"}}));
  }
  td::say("four");
  // A sink may wrap the one before it, replace itself, and be called from many threads.
  td::Sink wrapped;
  wrapped =
      td::set_sink([&](td::Severity severity, std::string_view text) { wrapped(severity, "> " + std::string(text)); });
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([] {
        for (int n = 0; n < 100; ++n) td::say("x");
      });
  }
  td::set_sink([](td::Severity, std::string_view) { td::set_sink({}); });
  td::say("this call replaces its own sink");
  CHECK(outer.size() == 401);
  CHECK(outer.back().second == "> x");
  td::set_sink(before);
}

TEST_CASE("the console keeps progress and lines apart") {
  const Folder folder;
  const int file = open((folder.path / "out").c_str(), O_CREAT | O_RDWR, 0600);
  {
    const Redirect redirect(file);
    td::write_text(td::Severity::Progress, "");
    td::write_text(td::Severity::Progress, "50 %");
    td::say("a line");
    td::write_text(td::Severity::Progress, "60 %");
    td::write_text(td::Severity::Progress, "");
  }
  close(file);
  CHECK(read(folder.path / "out") == "\r50 %\x1b[K\r\x1b[Ka line\n\r60 %\x1b[K\r\x1b[K");
}

TEST_CASE("numbers as text") {
  using namespace td::detail;
  CHECK(exact_number(0.1) == "0.1");
  CHECK(exact_number(-nan_value) == "nan");
  CHECK(exact_number(-inf_value) == "-inf");
  CHECK(metric_number(0.91625) == "0.9163");
  CHECK(metric_number(0) == "0.0000");
  CHECK(metric_number(0.0000123) == "1.23e-05");
  CHECK(metric_number(1234567) == "1.23e+06");
  CHECK(short_number(7.517) == "7.52");
  CHECK(short_number(9.999) == "10.0");
  CHECK(short_number(84.24) == "84.2");
  CHECK(short_number(999.4) == "999");
  CHECK(short_number(999.6) == "1.00k");
  CHECK(short_number(10777) == "10.8k");
  CHECK(short_number(3.25e6) == "3.25M");
  CHECK(duration_text(8.24) == "8.2 s");
  CHECK(duration_text(59.96) == "1:00");
  CHECK(duration_text(125) == "2:05");
  CHECK(duration_text(3725) == "1:02:05");
  CHECK(duration_text(inf_value) == "?");
  CHECK(text_width("━╸x") == 3);
  CHECK(cut_text("a━b", 2) == "a━");
}

TEST_CASE("ProgressBar writes a line an epoch where there is no terminal") {
  const Folder folder;
  const int file = open((folder.path / "out").c_str(), O_CREAT | O_RDWR, 0600);
  {
    const Redirect redirect(file);
    ProgressBar bar;  // decides by itself
    bar.on_fit_begin({.epochs = 12, .steps_per_epoch = 5, .total_steps = 60, .device = "cpu", .evaluates = true});
    for (int epoch = 0; epoch < 2; ++epoch) {
      make_steps(bar, epoch, 5, 5 * epoch);
      bar.on_log(log_event(epoch, 5, metrics({{"loss", 0.5}})));
      bar.on_epoch(
          epoch_event(epoch, 5 * epoch + 5, metrics({{"loss", 0.5}, {"accuracy", 0.8}}), metrics({{"loss", 0.625}})));
    }
    bar.on_fit_end({});
  }
  close(file);
  CHECK(read(folder.path / "out") ==
        "epoch  1/12  loss 0.5000  accuracy 0.8000  |  test loss 0.6250  |  12.3 s  5.12k train rows/s\n"
        "epoch  2/12  loss 0.5000  accuracy 0.8000  |  test loss 0.6250  |  12.3 s  5.12k train rows/s\n");
}

TEST_CASE("ProgressBar redraws one line on a terminal") {
  const int master = posix_openpt(O_RDWR | O_NOCTTY);
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) TREADLE_SKIP("no pseudo-terminal");
  const int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
  winsize size{.ws_row = 20, .ws_col = 70, .ws_xpixel = 0, .ws_ypixel = 0};
  ioctl(slave, TIOCSWINSZ, &size);
  const Setting terminal("TERM", "xterm"), utf8("LC_ALL", "C.UTF-8");
  unsetenv("COLUMNS");
  {
    const Redirect redirect(slave);
    ProgressBar bar;
    bar.on_fit_begin({.epochs = 1, .steps_per_epoch = 4, .total_steps = 4, .device = "cpu"});
    make_steps(bar, 0, 4, 0);
    bar.on_fit_end({});
  }
  std::string text;  // the kernel hands it over piece by piece
  for (pollfd ready{.fd = master, .events = POLLIN, .revents = 0};
       !text.ends_with("\r\x1b[K") && poll(&ready, 1, 5000) == 1;) {
    char bytes[4096];
    text.append(bytes, static_cast<std::size_t>(std::max<ssize_t>(::read(master, bytes, sizeof bytes), 0)));
  }
  close(slave);
  close(master);
  CHECK(!has(text, "\n"));
  CHECK(has(text, "\repoch 1/1  ───"));
  CHECK(has(text, "━━━  4/4  "));
  CHECK(text.ends_with("\r\x1b[K"));
  std::stringstream redraws(text);
  for (std::string line; std::getline(redraws, line, '\r');)
    CHECK(td::detail::text_width(line) <= 69 + 3);  // 3: the erase code
}

TEST_CASE("ProgressBar is honest about what it does not know, and rare") {
  Capture capture;
  const Setting columns("COLUMNS", "100"), ascii("LC_ALL", "C");
  {
    ProgressBar bar{{.live = true}};
    bar.on_fit_begin({});  // neither epochs nor steps are known
    CHECK(capture.texts.back().second == "epoch 1  0 steps  0.0 s");
    const auto began = std::chrono::steady_clock::now();
    make_steps(bar, 0, 20000, 0);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    CHECK(static_cast<double>(capture.texts.size()) <= 2 + 10 * took.count());
    std::this_thread::sleep_for(std::chrono::milliseconds(110));
    auto event = log_event(0, 20000, metrics({{"loss", nan_value}, {"accuracy", 0.5}}));
    event.skipped = 2;
    bar.on_log(event);
    const auto text = capture.texts.back().second;
    CHECK(has(text, "epoch 1  20000 steps  loss nan  accuracy 0.5000  2 skipped  84.2 steps/s  10.8k rows/s"));
    CHECK(!has(text, "left"));
    CHECK(!has(text, "/0"));
    CHECK(!has(text, "=="));
    ProgressBar moved{std::move(bar)};
    capture.texts.clear();
  }
  // The bar that was left over is erased once, by the object that owns it.
  CHECK((capture.texts == std::vector<Text>{{td::Severity::Progress, ""}}));

  capture.texts.clear();
  ProgressBar bar{{.live = true, .updates_per_second = 1e9}};
  bar.on_fit_begin({.epochs = 2, .steps_per_epoch = 4, .total_steps = 8, .device = "cpu", .evaluates = true});
  make_steps(bar, 0, 2, 0);
  bar.on_log(log_event(0, 2, metrics({{"loss", 0.25}})));
  CHECK(has(capture.texts.back().second, "epoch 1/2  =========="));
  CHECK(has(capture.texts.back().second, "  2/4  loss 0.2500  84.2 steps/s"));
  CHECK(has(capture.texts.back().second, "0.1 s left"));
  make_steps(bar, 0, 4, 0);
  CHECK(has(capture.texts.back().second, "evaluating"));
  make_steps(bar, 1, 6, 4);  // more steps than were announced: no more totals
  CHECK(has(capture.texts.back().second, "  6 steps  "));
  CHECK(!has(capture.texts.back().second, "left"));
  for (const char* narrow : {"10", "25", "40", "60", "200"}) {
    const Setting small("COLUMNS", narrow);
    make_steps(bar, 1, 1, 4);
    CHECK(td::detail::text_width(capture.texts.back().second) < static_cast<std::size_t>(std::atoi(narrow)) + 1);
  }
  bar.on_fit_end({});
  CHECK((capture.texts.back() == Text{td::Severity::Progress, ""}));
  CHECK(has(config_error([] { ProgressBar never{{.updates_per_second = 0}}; }), "updates_per_second"));
}

namespace {
/// Rows with everything that makes a file hard to read: late metrics, names that need quoting or collide, NaN, inf.
template <class Observer>
void write_hard_rows(Observer& file) {
  file.on_fit_begin({});
  file.on_log(log_event(0, 50, metrics({{"loss", 0.1}, {"step", 7}})));
  auto scaled = log_event(0, 100, metrics({{"loss", nan_value}, {"a, \"b\"", inf_value}, {"test_loss", 3}}));
  scaled.loss_scale = 65536;
  file.on_log(scaled);
  file.on_epoch(
      epoch_event(0, 100, metrics({{"loss", -inf_value}, {"test_loss", 3}}), metrics({{"loss", 0.25}, {"late", 1}})));
  file.on_log(log_event(1, 150, metrics({{"loss", 0.05}})));
}
}  // namespace

TEST_CASE("MetricsFile writes CSV that stays a table when metrics come late") {
  const Folder folder;
  const auto path = folder.path / "metrics.csv";
  std::ofstream(path) << "left over from another run";
  {
    MetricsFile file{path};
    write_hard_rows(file);
    CHECK(lines(read(path)).size() == 5);  // each row is there at once, not only at the end
  }
  // An epoch's row goes by the clock of the log points, so a moment after the last one.
  const auto content = std::regex_replace(read(path), std::regex("(epoch,1,100,1[.]5)0*[0-9]*"), "$1");
  CHECK(
      content ==
      "event,epoch,step,seconds,learning_rate,skipped,steps_per_second,rows_per_second,data_wait,loss,step_,loss_scale,"
      "\"a, \"\"b\"\"\",test_loss,test_loss_,test_late\n"
      "log,1,50,1.5,0.001,0,84.2,10777,0,0.1,7,,,,,\n"
      "log,1,100,1.5,0.001,0,84.2,10777,0,nan,,65536,inf,3,,\n"
      "epoch,1,100,1.5,0.001,0,,5120,0,-inf,,,,3,0.25,1\n"
      "log,2,150,1.5,0.001,0,84.2,10777,0,0.05,,,,,,\n");
  CHECK(!fs::exists(path.string() + ".tmp"));
  if (has_python())
    CHECK(python("import csv, sys, math\n"
                 "rows = list(csv.DictReader(open(sys.argv[1])))\n"
                 "assert len(rows) == 4 and all(None not in r and None not in r.values() for r in rows), rows\n"
                 "assert math.isnan(float(rows[1][\"loss\"])) and float(rows[2][\"loss\"]) == -math.inf\n"
                 "assert rows[1][\"a, \\\"b\\\"\"] == \"inf\" and rows[2][\"test_loss_\"] == \"0.25\", rows\n",
                 path) == 0);

  SUBCASE("append goes on, without a line that a crash cut short, with the columns by name") {
    std::ofstream(path, std::ios::app) << "log,2,200,1.";
    MetricsFile more{path, {.append = true}};
    more.on_fit_begin({});
    more.on_log(log_event(1, 200, metrics({{"new", 9}, {"loss", 0.5}})));
    const auto rows = lines(read(path));
    REQUIRE(rows.size() == 6);
    CHECK(rows[0].ends_with(",test_late,new"));
    CHECK(rows[4].ends_with(",0.05,,,,,,,"));
    CHECK(rows[5] == "log,2,200,1.5,0.001,0,84.2,10777,0,0.5,,,,,,,9");
  }
  SUBCASE("append refuses what it did not write") {
    for (const char* foreign : {"name,age\nx,3\n", "event,epoch\nlog,1,2\n", "event,\"epoch\nlog\n"}) {
      std::ofstream(path, std::ios::trunc) << foreign;
      MetricsFile more{path, {.append = true}};
      CHECK(has(config_error([&] { more.on_fit_begin({}); }), "cannot be continued"));
      CHECK(read(path) == foreign);
    }
  }
  SUBCASE("a second fit of the same trainer goes on in the file") {
    MetricsFile file{path};
    file.on_fit_begin({});
    file.on_log(log_event(0, 1, metrics({{"loss", 1}})));
    file.on_fit_begin({});
    file.on_log(log_event(0, 1, metrics({{"loss", 2}})));
    CHECK(lines(read(path)).size() == 3);
  }
  SUBCASE("a file that a link points to is rewritten where it is") {
    fs::create_symlink(path, folder.path / "link.csv");
    MetricsFile file{folder.path / "link.csv"};
    write_hard_rows(file);
    CHECK(fs::is_symlink(folder.path / "link.csv"));
    CHECK(lines(read(path)).size() == 5);
  }
}

TEST_CASE("MetricsFile writes JSON lines") {
  const Folder folder;
  const auto path = folder.path / "metrics.jsonl";
  {
    MetricsFile file{path};
    write_hard_rows(file);
  }
  {
    MetricsFile more{path, {.append = true}};
    more.on_fit_begin({});
    more.on_log(log_event(1, 200, metrics({{"tab\tline\nbell\a\\", 1}})));
  }
  const auto rows = lines(read(path));
  REQUIRE(rows.size() == 5);
  CHECK(std::regex_replace(rows[2], std::regex("(\"seconds\": 1[.]5)0*[0-9]*"), "$1") ==
        "{\"event\": \"epoch\", \"epoch\": 1, \"step\": 100, \"seconds\": 1.5, \"learning_rate\": 0.001, "
        "\"skipped\": 0, \"rows_per_second\": 5120, \"data_wait\": 0, \"loss\": null, \"test_loss\": 3, "
        "\"test_loss_\": 0.25, \"test_late\": 1}");
  if (has_python())
    CHECK(python("import json, sys\n"
                 "def refuse(name): raise ValueError(name)\n"
                 "rows = [json.loads(l, parse_constant=refuse) for l in open(sys.argv[1])]\n"
                 "assert rows[0][\"loss\"] == 0.1 and rows[0][\"step_\"] == 7 and rows[1][\"loss\"] is None, rows\n"
                 "assert rows[1][\"a, \\\"b\\\"\"] is None and rows[4][\"tab\\tline\\nbell\\a\\\\\"] == 1, rows\n",
                 path) == 0);
}

TEST_CASE("files that cannot be written are refused when fit begins") {
  const Folder folder;
  CHECK(has(config_error([] { MetricsFile file{"metrics.txt"}; }), "must end in .csv or .jsonl"));
  CHECK(has(config_error([] { Curve curve{"curve.png"}; }), "must end in .svg"));
  MetricsFile nowhere{folder.path / "no" / "metrics.csv"};
  CHECK(has(config_error([&] { nowhere.on_fit_begin({}); }), "create the folder first"));
  Curve curve{folder.path / "no" / "curve.svg"};
  CHECK(has(config_error([&] { curve.on_fit_begin({}); }), "create the folder first"));
  fs::create_directory(folder.path / "folder.csv");
  MetricsFile directory{folder.path / "folder.csv"};
  CHECK(has(config_error([&] { directory.on_fit_begin({}); }), "cannot write"));
  fs::create_symlink("/dev/null", folder.path / "device.csv");
  MetricsFile device{folder.path / "device.csv"};
  CHECK(has(config_error([&] { device.on_fit_begin({}); }), "not a regular file"));
  CHECK(fs::is_character_file("/dev/null"));
}

TEST_CASE("a disk that fills up is a warning, once") {
  if (!fs::exists("/dev/full")) TREADLE_SKIP("no /dev/full");
  const Folder folder;
  fs::create_symlink("/dev/full", folder.path / "full.jsonl");
  Capture capture;
  MetricsFile file{folder.path / "full.jsonl"};
  write_hard_rows(file);
  const auto warnings = capture.of(td::Severity::Warning);
  REQUIRE(warnings.size() == 1);
  CHECK(has(warnings[0], "full.jsonl'; training goes on"));
}

TEST_CASE("rows go on once a full disk has room again") {
  const Folder folder;
  const auto path = folder.path / "metrics.csv";
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit whole{};
  getrlimit(RLIMIT_FSIZE, &whole);
  const auto limit = [&](rlim_t bytes) {
    const rlimit now{.rlim_cur = std::min(bytes, whole.rlim_max), .rlim_max = whole.rlim_max};
    setrlimit(RLIMIT_FSIZE, &now);
  };
  Capture capture;
  MetricsFile file{path};
  limit(20);  // not even the header
  file.on_fit_begin({});
  file.on_log(log_event(0, 1, metrics({{"loss", 1}})));
  limit(170);  // the header and one row
  for (int step = 2; step <= 6; ++step) file.on_log(log_event(0, step, metrics({{"loss", 1.0 / step}})));
  file.on_log(log_event(0, 7, metrics({{"loss", 7}, {"late", 7}})));  // no room for another column
  limit(RLIM_INFINITY);
  file.on_log(log_event(0, 8, metrics({{"loss", 8}})));
  file.on_log(log_event(0, 9, metrics({{"loss", 9}, {"late", 9}})));
  std::signal(SIGXFSZ, before);
  const auto rows = lines(read(path));
  REQUIRE(rows.size() >= 4);
  CHECK(rows.front().ends_with(",loss,late"));
  CHECK(rows.back() == "log,1,9,1.5,0.001,0,84.2,10777,0,9,9");
  CHECK(rows[rows.size() - 2] == "log,1,8,1.5,0.001,0,84.2,10777,0,8,");
  CHECK(rows.size() < 9);
  for (const auto& row : rows) CHECK(std::ranges::count(row, ',') == 10);
  CHECK(capture.of(td::Severity::Warning).size() == 1);
}

TEST_CASE("results of an earlier run stay until there are new ones") {
  const Folder folder;
  const auto csv = folder.path / "metrics.csv", svg = folder.path / "curve.svg";
  const auto begin_and_end = [&](bool step) {
    MetricsFile file{csv};
    Curve curve{svg};
    file.on_fit_begin({});
    curve.on_fit_begin({});
    if (step) {
      file.on_log(log_event(0, 1, metrics({{"loss", 1}})));
      curve.on_log(log_event(0, 1, metrics({{"loss", 1}})));
    }
    curve.on_fit_end({});
  };
  begin_and_end(false);
  CHECK_FALSE(fs::exists(csv));
  CHECK_FALSE(fs::exists(svg));
  std::ofstream(csv) << "old";
  std::ofstream(svg) << "old";
  begin_and_end(false);
  CHECK(read(csv) == "old");
  CHECK(read(svg) == "old");
  begin_and_end(true);
  CHECK(lines(read(csv)).size() == 2);
  CHECK(has(read(svg), "</svg>"));
}

TEST_CASE("names that differ in a control character alone are two columns") {
  const Folder folder;
  const auto path = folder.path / "metrics.csv";
  for (int run = 0; run < 2; ++run) {
    MetricsFile file{path, {.append = true}};
    file.on_fit_begin({});
    file.on_log(log_event(0, 1, metrics({{"a\nb", 1}, {"a b", 2}, {"a\\nb", 3}, {"a\u0001b", 4}})));
    file.on_log(log_event(0, 2, metrics({{"a b", 2}})));
  }
  const auto rows = lines(read(path));
  REQUIRE(rows.size() == 5);  // the second run found its columns
  CHECK(rows[0].ends_with(",data_wait,a\\nb,\"a b\",a\\\\nb,a\\u0001b"));
  CHECK(rows[1].ends_with(",0,1,2,3,4"));
  CHECK(rows[4].ends_with(",0,,2,,"));
}

TEST_CASE("the seconds of a metrics file never go back") {
  const Folder folder;
  MetricsFile file{folder.path / "metrics.csv"};
  file.on_fit_begin({});
  auto log = log_event(0, 10, metrics({{"loss", 1}}));
  log.seconds = 20;  // the epoch took 12.3 of them, an observer before it the rest
  file.on_log(log);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  file.on_epoch(epoch_event(0, 10, metrics({{"loss", 1}})));
  const auto row = lines(read(folder.path / "metrics.csv")).back();
  const double seconds = std::stod(row.substr(row.find(",10,") + 4));
  CHECK(seconds >= 20.03);
  CHECK(seconds < 25);
}

TEST_CASE("Table shows epochs, the reason to stop and the last test metrics") {
  td::FitResult result{.epochs = 2, .steps = 938, .seconds = 24.6};
  result.history.push_back(epoch_event(0, 469, metrics({{"loss", 0.5}, {"accuracy", 0.8}})));
  result.history.push_back(epoch_event(1, 938, metrics({{"loss", 0.25}, {"accuracy", 0.9}}),
                                       metrics({{"loss", 0.26}, {"accuracy", 0.91625}})));
  Capture capture;
  Table{}.on_fit_end(result);
  REQUIRE(capture.texts.size() == 1);
  CHECK(capture.texts[0].second ==
        "epoch  train loss  train accuracy  test loss  test accuracy  epoch time  train rows/s\n"
        "-----  ----------  --------------  ---------  -------------  ----------  ------------\n"
        "    1      0.5000          0.8000          -              -      12.3 s         5.12k\n"
        "    2      0.2500          0.9000     0.2600         0.9163      12.3 s         5.12k\n"
        "finished: 2 epochs, 938 steps in 24.6 s\n"
        "test loss: 0.2600\n"
        "test accuracy: 0.9163");
  result.stop_reason = td::StopReason::EarlyStop;
  result.skipped = 1;
  result.history[1].data_wait = 0.174;
  const auto slow = Table{}.text(result);
  CHECK(has(slow, "rows/s  data wait\n"));
  CHECK(has(slow, "no further improvement: 2 epochs, 938 steps in 24.6 s; 1 step skipped because of inf or NaN\n"));
  CHECK(has(slow, "up to 17 % of the training time: keep the data in memory"));
  for (int epoch = 2; epoch < 100; ++epoch)
    result.history.push_back(epoch_event(epoch, 0, metrics({{"loss", 1.0 / epoch}})));
  const auto rows = lines(Table{{.rows = 10}}.text(result));
  CHECK(rows.size() == 2 + 11 + 2 + 2);
  CHECK(rows[6].starts_with("    5 "));
  CHECK(rows[7].starts_with("  ..."));
  CHECK(rows[8].starts_with("   96 "));
  CHECK(Table{}.text({}) == "finished: 0 epochs, 0 steps in 0.0 s");
}

TEST_CASE("Series keeps its mean and its bounds; axes have round ticks") {
  td::detail::Series series(100);
  double sum = 0;
  for (int i = 1; i <= 1000; ++i) {
    series.add(i, i % 7);
    sum += i % 7;
  }
  const auto points = series.points();
  CHECK(points.size() >= 50);
  CHECK(points.size() <= 100);
  CHECK(points.back().x == 1000);
  double mean = 0;
  for (const auto& point : points) mean += point.y / static_cast<double>(points.size());
  CHECK(mean == doctest::Approx(sum / 1000).epsilon(0.02));
  td::detail::Series gaps(4);
  for (const double y : {1.0, nan_value, nan_value, nan_value}) gaps.add(0, y);
  CHECK(gaps.points()[0].y == 1);
  CHECK(std::isnan(gaps.points()[1].y));

  const auto axis = td::detail::Axis::over(0.22, 1.77, 5);
  CHECK(axis.low == 0);
  CHECK(axis.high == 2);
  CHECK(axis.tick == 0.5);
  CHECK(axis.ticks() == 5);
  CHECK(axis.decimals == 1);
  for (const auto& [low, high] :
       {std::pair{3.0, 3.0}, {0.0, 0.0}, {-1e-12, 1e12}, {1e-300, 2e-300}, {inf_value, -inf_value}}) {
    const auto any = td::detail::Axis::over(low, high, 5);
    CHECK(any.ticks() >= 2);
    CHECK(any.ticks() <= 12);
  }
}

TEST_CASE("Curve draws a panel a metric as well-formed SVG, and survives every value") {
  const Folder folder;
  const auto path = folder.path / "curve.svg";
  Curve curve{path};
  curve.on_fit_begin({});
  for (int step = 50; step <= 400; step += 50) {
    curve.on_log(
        log_event(0, step, metrics({{"loss", step == 200 ? nan_value : 100.0 / step}, {"a<b & \"c\"", inf_value}})));
    if (step % 200 == 0) curve.on_epoch(epoch_event(step / 200 - 1, step, {}, metrics({{"loss", 1.0 / step}})));
  }
  CHECK(has(read(path), "</svg>"));  // there after each epoch, not only at the end
  curve.on_fit_end({});
  const auto count = [](const std::string& text, const std::string& part) {
    int n = 0;
    for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
    return n;
  };
  auto picture = read(path);
  CHECK(count(picture, "class=\"title\"") == 2);
  CHECK(has(picture, "a&lt;b &amp; &quot;c&quot;"));
  CHECK(has(picture, "prefers-color-scheme:dark"));
  CHECK(!has(picture, "nan"));
  CHECK(!has(picture, "inf"));
  const auto train = picture.substr(picture.find("class=\"line train\" d=\""));
  CHECK(count(train.substr(0, train.find("/>")), "M") == 2);  // the NaN is a gap
  CHECK(has(picture, ">0.0025</text>"));                      // the last test loss, beside its point
  if (has_python()) CHECK(python("import sys, xml.dom.minidom\nxml.dom.minidom.parse(sys.argv[1])\n", path) == 0);

  // A second fit goes on to the right; an epoch without a log point is a point itself.
  curve.on_fit_begin({});
  curve.on_epoch(epoch_event(0, 10, metrics({{"loss", 0.5}})));
  picture = read(path);
  CHECK(count(picture, "<circle") == 1 + 2);
  CHECK(has(picture, ">400</text>"));
  for (int i = 0; i < 9; ++i) curve.on_log(log_event(0, 20, metrics({{std::to_string(i).c_str(), 1.0}})));
  CHECK(count(curve.svg(), "class=\"title\"") == 4);
  CHECK(has(picture, "class=\"bad\""));
  CHECK(has(Curve{path}.svg(), "</svg>"));
}

TEST_CASE("Curve shows where values are missing, whole steps, and no text over another or over the edge") {
  const Folder folder;
  Curve curve{folder.path / "curve.svg"};
  curve.on_fit_begin({});
  const std::string name = "a name that is much longer than the room beside the legend: of the encoder";
  for (int step = 1; step <= 4; ++step) {
    td::Metrics values =
        metrics({{"loss", step < 3 ? 1e-7 * step : nan_value}, {"once", step == 4 ? nan_value : -1.5e12}});
    values.set(name, 9e-8);
    curve.on_log(log_event(0, step, values));
  }
  curve.on_epoch(epoch_event(0, 4, metrics({{"loss", 1}}), metrics({{"once", -1.5e12}, {"loss", nan_value}})));
  curve.on_fit_begin({});
  curve.on_epoch(epoch_event(0, 2, {}));  // every step was skipped: there is no value at all
  curve.on_fit_end({});
  const auto picture = read(folder.path / "curve.svg");

  // What is drawn as text: begin, end and height, at a width that the widest usual fonts stay below.
  struct Drawn {
    double begin, end, y;
    std::string text;
  };
  std::vector<Drawn> drawn;
  const std::regex text("<text x=\"([^\"]*)\" y=\"([^\"]*)\" ([^>]*)>(<title>[^<]*</title>)?([^<]*)</text>");
  for (std::sregex_iterator it(picture.begin(), picture.end(), text), end; it != end; ++it) {
    const double x = std::stod((*it)[1]);
    const std::string style = (*it)[3];
    const double each = has(style, "title") ? 8.7 : has(style, "end-") || has(style, "bad") ? 8.2 : 7.5;
    const double width = each * static_cast<double>(td::detail::text_width((*it)[5].str()));
    const double begin = has(style, "\"end\"") ? x - width : has(style, "\"middle\"") ? x - width / 2 : x;
    drawn.push_back({begin, begin + width, std::stod((*it)[2]), (*it)[5]});
  }
  CHECK(drawn.size() > 30);
  for (const auto& a : drawn) {
    INFO("text: " << a.text);
    const double panel = a.begin + 0.01 < 420 ? 0 : 420;
    CHECK(a.begin >= panel);
    CHECK(a.end <= panel + 420);
    for (const auto& b : drawn)
      if (&a != &b && std::abs(a.y - b.y) < 10) CHECK((a.end <= b.begin || b.end <= a.begin));
  }
  const auto times = [&](const std::string& wanted) {
    return std::ranges::count_if(drawn, [&](const Drawn& d) { return d.text == wanted; });
  };
  for (const char* step : {"0", "2", "4", "6"}) CHECK(times(step) == 3);  // the fit after the first ends at step 6
  CHECK(times("0.5") == 0);
  CHECK(times("not finite") == 2);  // in the two panels that have a mark
  CHECK(has(picture, "<title>" + name + "</title>a name"));
  CHECK(has(picture, "e encoder</text>"));
  CHECK(has(picture, "h0"));  // a value between two gaps is a dot
}

TEST_CASE("all of them are observers") {
  const Folder folder;
  auto set = td::observers(ProgressBar{{.live = false}}, MetricsFile{folder.path / "m.jsonl"}, Table{},
                           Curve{folder.path / "c.svg"});
  Capture capture;
  set.on_fit_begin({.epochs = 1, .device = "cpu"});
  set.on_log(log_event(0, 1, metrics({{"loss", 1}})));
  set.on_epoch(epoch_event(0, 1, metrics({{"loss", 1}})));
  set.on_fit_end({.epochs = 1, .steps = 1});
  CHECK(capture.texts.size() == 2);
  CHECK(lines(read(folder.path / "m.jsonl")).size() == 2);
  CHECK(fs::file_size(folder.path / "c.svg") > 500);
}
