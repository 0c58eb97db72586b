// SPDX-License-Identifier: Apache-2.0
// The loss scale's rule in plain numbers, and the device operations against it, over every short history.
#include "treadle/precision/loss_scale.hpp"

#include "support/tiny.hpp"

namespace {
namespace td = treadle;
using td::precision::Fp16;
using td::precision::LossScale;

td::ParameterList no_parameters() {
  return {{}, treadle_test::device()};
}
}  // namespace

TEST_CASE("the rule, step by step") {
  LossScale scale{.scale = 8, .growth_interval = 2};
  scale.update(false);
  CHECK(scale.scale == 8);
  scale.update(false);
  CHECK(scale.scale == 16);  // after two good steps in a row
  scale.update(false);
  scale.update(true);
  CHECK(scale.scale == 8);  // at once
  scale.update(false);
  CHECK(scale.scale == 8);  // the good step before the bad one no longer counts
  scale.update(false);
  CHECK(scale.scale == 16);
}

TEST_CASE("the scale never leaves fp32 and never passes its floor") {
  LossScale top{.scale = 2.0e38, .growth_interval = 1};
  top.update(false);
  CHECK(top.scale == 2.0e38);
  LossScale low{.scale = 4, .minimum_scale = 3};
  low.update(true);
  CHECK(low.scale == 3);
  low.update(true);
  CHECK(low.scale == 3);
  LossScale bottomless{.scale = 4};
  for (int i = 0; i < 4; ++i) bottomless.update(true);
  CHECK(bottomless.scale == 0.25);
}

TEST_CASE("the device does the same for every history of eight steps") {
  td::ParameterList parameters = no_parameters();
  const auto options = at::device(treadle_test::device()).dtype(at::kFloat);
  const at::Tensor verdicts[] = {at::zeros({}, options), at::ones({}, options)};
  int compared = 0;
  for (const int interval : {1, 2, 3})
    for (const double floor : {0.0, 16.0})
      for (const double start : {64.0, 2.0e38})
        for (unsigned history = 0; history < 256; ++history) {
          if (treadle_test::device().is_cuda() && history % 16 != 0) continue;  // each read waits for the device
          const Fp16 policy{.initial_scale = start, .growth_interval = interval, .minimum_scale = floor};
          policy.check();
          Fp16::State state(policy, parameters, {}, false);
          LossScale plain{.scale = static_cast<float>(start), .growth_interval = interval, .minimum_scale = floor};
          for (int step = 0; step < 8; ++step) {
            const bool bad = (history >> step & 1) != 0;
            state.update_scale(verdicts[bad]);
            plain.update(bad);
            ++compared;
            if (state.loss_scale().item<float>() == static_cast<float>(plain.scale)) continue;
            FAIL("history " << history << " at step " << step << ": the device has " << state.loss_scale().item<float>()
                            << ", the rule " << plain.scale);
          }
        }
  CHECK(compared >= 16 * 12 * 8);
}

TEST_CASE("other factors than powers of two round as fp32 does") {
  td::ParameterList parameters = no_parameters();
  const Fp16 policy{.initial_scale = 1000, .growth_factor = 1.1, .backoff_factor = 0.3, .growth_interval = 1};
  Fp16::State state(policy, parameters, {}, false);
  LossScale plain{.scale = 1000, .growth_factor = 1.1, .backoff_factor = 0.3, .growth_interval = 1};
  const auto found = at::zeros({}, at::device(treadle_test::device()).dtype(at::kFloat));
  for (const bool bad : {false, true, false, false, true, true, false}) {
    found.fill_(bad ? 1 : 0);
    state.update_scale(found);
    plain.update(bad);
    CHECK(state.loss_scale().item<float>() == doctest::Approx(plain.scale).epsilon(1e-6));
  }
}

TEST_CASE("state is shown by name and lies at a fixed address") {
  td::ParameterList parameters = no_parameters();
  Fp16::State state(Fp16{}, parameters, {}, false);
  const auto* address = state.loss_scale().data_ptr();
  state.update_scale(at::ones({}, state.loss_scale().options()));
  CHECK(state.loss_scale().data_ptr() == address);
  const auto shown = treadle_test::state_of(state);
  REQUIRE(shown.size() == 2);
  CHECK(shown.at("loss_scale").item<float>() == 32768);
  CHECK(shown.at("growth_tracker").item<int>() == 0);
}

TEST_CASE("one policy value serves two trainers that share nothing") {
  using namespace treadle_test;
  const auto policies = td::policies(Fp16{.initial_scale = 1024});
  auto first = make<PlainNet>();
  auto second = make<PlainNet>();
  td::Trainer a{first, CrossEntropy{}, td::optim::AdamW{}, policies};
  td::Trainer b{second, CrossEntropy{}, td::optim::AdamW{}, policies};
  a.accumulate(poisoned(make_batch(8, 1)));
  CHECK(a.precision().loss_scale().item<float>() == 512);
  CHECK(b.precision().loss_scale().item<float>() == 1024);
  CHECK(a.skipped_steps().item<std::int64_t>() == 1);
  CHECK(b.skipped_steps().item<std::int64_t>() == 0);
}
