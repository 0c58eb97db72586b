// SPDX-License-Identifier: Apache-2.0
// The main function of every doctest program: it counts skipped cases and turns "everything was skipped" into
// exit code 77.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdlib>
#include <iostream>
#include <set>
#include <stdexcept>
#include <string>

#include <torch/cuda.h>

#include "skip.hpp"

namespace {
constexpr int all_skipped = 77;

std::string running_case;       // NOLINT: doctest runs the cases one after the other on one thread.
std::set<std::string> skipped;  // NOLINT: names, because a case with subcases is entered more than once.
unsigned cases_run = 0;         // NOLINT

struct CaseNames : doctest::IReporter {
  explicit CaseNames(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& stats) override { cases_run = stats.numTestCasesPassingFilters; }
  void test_case_start(const doctest::TestCaseData& data) override { running_case = data.m_name; }
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("case_names", 1, CaseNames);
}  // namespace

namespace treadle_test {
void skip_case(const std::string& reason) {
  if (skipped.insert(running_case).second) {
    std::cout << "SKIPPED " << running_case << ": " << reason << std::endl;
  }
}

bool cuda_or_fail() {
  if (torch::cuda::is_available()) return true;
  const char* demanded = std::getenv("TREADLE_CUDA_TESTS");
  if (demanded != nullptr && std::string(demanded) == "1") {
    throw std::runtime_error("this build demands CUDA tests (TREADLE_CUDA_TESTS=1), and there is no CUDA device");
  }
  return false;
}

bool cuda_devices_or_skip(int count) {
  return static_cast<int>(torch::cuda::device_count()) >= count;
}
}  // namespace treadle_test

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int status = context.run();
  if (context.shouldExit() || status != 0) return status;
  if (cases_run != 0 && skipped.size() == cases_run) return all_skipped;
  return 0;
}
