// SPDX-License-Identifier: Apache-2.0
// The learning rates on the device, parameter groups, and the patterns that choose them.
#include "treadle/optim/learning_rate.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;
using td::optim::LearningRate;
using namespace treadle_test;

std::vector<double> read(LearningRate& rates) {
  const auto host = state_of(rates).at("learning_rates").cpu();
  return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
}
td::ParameterList named(const std::vector<std::string>& names) {
  std::vector<td::Parameter> parameters;
  for (const auto& name : names) parameters.push_back({name, at::zeros({1}), at::zeros({1})});
  return {std::move(parameters), at::kCPU};
}

/// Notes how much memory is asked for on the CPU while it lives.
struct Asked : c10::Allocator {
  Asked() : real(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
  ~Asked() override { c10::SetCPUAllocator(real); }
  c10::DataPtr allocate(std::size_t bytes) override {
    sizes.push_back(bytes);
    return real->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { real->copy_data(to, from, bytes); }
  c10::Allocator* real;
  std::vector<std::size_t> sizes{};
};
}  // namespace

TEST_CASE("patterns") {
  static_assert(td::glob_match("*", ""));
  static_assert(td::glob_match("", ""));
  static_assert(!td::glob_match("", "a"));
  static_assert(!td::glob_match("?", ""));
  static_assert(td::glob_match("*.bias", "layers.0.bias"));
  static_assert(!td::glob_match("*.bias", "layers.0.bias2"));
  static_assert(td::glob_match("layers.?.weight", "layers.3.weight"));
  static_assert(!td::glob_match("layers.?.weight", "layers.13.weight"));
  static_assert(td::glob_match("layers.*.weight", "layers.13.attention.weight"));
  static_assert(td::glob_match("*a*b*", "xxaxxbxbxx"));
  static_assert(!td::glob_match("*a*b", "xxaxxbxbxx"));
  static_assert(td::glob_match("a**", "a"));
  static_assert(td::glob_match("*aab", "aaaab"));   // has to go back
  static_assert(!td::glob_match("[ab].c", "a.c"));  // no character classes
  static_assert(td::glob_match("a.c", "a.c"));
  static_assert(!td::glob_match("a.c", "abc"));  // a dot is a dot
  static_assert(!td::glob_match("Weight", "weight"));
  CHECK(td::glob_match(std::string(50, '*') + "b", std::string(2000, 'a') + "b"));  // without blowing up
}

TEST_CASE("the first group that matches wins") {
  const auto parameters = named({"a.weight", "a.bias", "b.weight", "b.bias"});
  const std::vector<td::optim::ParameterGroup> groups{{.pattern = "*.bias"}, {.pattern = "b.*"}};
  CHECK(td::optim::assign_groups(groups, parameters) == std::vector<std::size_t>{0, 1, 2, 1});
  CHECK(td::optim::assign_groups({}, parameters) == std::vector<std::size_t>{0, 0, 0, 0});
}

TEST_CASE("a group that nothing matches is refused, one that is only hidden is not") {
  const auto parameters = named({"a.weight", "a.bias"});
  CHECK_SAYS(td::ConfigError, "parameter group 'c.*' matches no parameter",
             td::optim::assign_groups({{.pattern = "*"}, {.pattern = "c.*"}}, parameters));
  CHECK(td::optim::assign_groups({{.pattern = "*"}, {.pattern = "a.*"}}, parameters) == std::vector<std::size_t>{1, 1});
}

TEST_CASE("each group keeps its own base rate along the schedule") {
  LearningRate rates(td::schedule::linear({.steps = 4}), {1.0, 0.1}, device());
  CHECK(rates.planned());
  for (const float want : {1.0f, 0.75f, 0.5f, 0.25f, 0.0f, 0.0f}) {
    rates.look_up();
    CHECK(read(rates) == std::vector<double>{want, static_cast<float>(0.1 * want)});
    rates.advance(nullptr);
  }
}

TEST_CASE("only applied steps move the schedule, and the tensors keep their place") {
  LearningRate rates(td::schedule::table({1, 2, 3}), {1.0}, device());
  const auto* address = rates.of(0).data_ptr();
  const auto yes = at::ones({}, at::device(device()).dtype(at::kLong));
  const auto no = at::zeros_like(yes);
  std::vector<double> seen;
  for (const auto* applied : {&no, &yes, &no, &no, &yes, &yes, &yes}) {
    rates.look_up();
    seen.push_back(rates.of(0).item<float>());
    rates.advance(applied);
  }
  CHECK(seen == std::vector<double>{1, 1, 2, 2, 2, 3, 3});
  CHECK(rates.of(0).data_ptr() == address);
}

TEST_CASE("a rate is the fp32 that is next to base x factor") {
  LearningRate rates(td::schedule::table({1.0 / 3.0}), {0.1}, device());
  rates.look_up();
  CHECK(rates.of(0).item<float>() == static_cast<float>(0.1 * (1.0 / 3.0)));
  CHECK((rates.of(0).scalar_type() == at::kFloat));
}

TEST_CASE("a plan starts the schedule anew, and scale lasts beyond it") {
  LearningRate rates(td::schedule::linear(), {1.0}, device());
  CHECK_FALSE(rates.planned());
  CHECK(rates.follows_run());
  rates.plan(2);
  CHECK(rates.planned());
  rates.look_up();
  rates.advance(nullptr);
  rates.look_up();
  CHECK(read(rates) == std::vector<double>{0.5});
  rates.scale(0.5);
  CHECK(read(rates) == std::vector<double>{0.25});
  rates.look_up();
  CHECK(read(rates) == std::vector<double>{0.25});
  rates.plan(4);
  rates.look_up();
  CHECK(read(rates) == std::vector<double>{0.5});
}

TEST_CASE("a plan is written over the one before if it is no longer") {
  LearningRate rates(td::schedule::linear(), {1.0, 0.1}, at::kCPU);
  rates.plan(8);
  for (const std::int64_t steps : {8, 4, 2, 8}) {
    CAPTURE(steps);
    {
      const Asked memory;
      rates.plan(steps);
      CHECK(memory.sizes.empty());
    }
    for (std::int64_t t = 0; t < steps + 2; ++t) {
      rates.look_up();
      const auto want = static_cast<float>(t < steps ? 1.0 - static_cast<double>(t) / static_cast<double>(steps) : 0.0);
      CHECK(rates.of(0).item<float>() == want);
      rates.advance(nullptr);
    }
  }
  const Asked memory;
  rates.plan(9);
  CHECK(memory.sizes.size() == 1);
}

TEST_CASE("constant rates are there without a look-up") {
  LearningRate rates({}, {0.5, 0.25}, device());
  CHECK(rates.constant());
  CHECK(rates.planned());
  CHECK_FALSE(rates.follows_run());
  CHECK(read(rates) == std::vector<double>{0.5, 0.25});
  rates.scale(2);
  CHECK(read(rates) == std::vector<double>{1.0, 0.5});
}
