// SPDX-License-Identifier: Apache-2.0
// compare() finds what differs, lets pass what does not, and measures what each combination takes.
#include "treadle/compare.hpp"

#include <optional>
#include <string>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace td = treadle;
using td::accumulation::AccumulateOver;
using td::accumulation::SplitBatch;
using td::clipping::ClipNorm;
using treadle_test::PlainNet;

namespace {

enum class Mood { Calm, Wild };
struct Own {
  using policy_axis = td::axis::Clipping;
  static constexpr bool measures_norm = false;
  static constexpr bool rewrites = false;
  double strength = 1.5;
  Mood mood = Mood::Calm;
  std::vector<int> levels{};
  bool operator==(const Own&) const = default;
  void check() const {}
  struct State {
    State(const Own&, at::Device) {}
    const at::Tensor* clip(at::TensorList, const at::Tensor* divisor) const { return divisor; }
  };
};
static_assert(td::clipping_policy<Own>);

std::vector<td::Batch> batches(int count = 6, std::int64_t rows = 8) {
  torch::manual_seed(3);
  std::vector<td::Batch> list;
  for (int i = 0; i < count; ++i) {
    auto x = torch::randn({rows, 6});
    list.push_back({x, x.slice(1, 0, 5).argmax(1)});
  }
  return list;
}

struct Objective {
  double factor = 1;
  auto operator()(auto& net, const td::Batch& batch) const {
    return td::Loss::mean(td::mean_loss(net.forward(batch.data), batch.target).value * factor, batch.target.numel());
  }
};

const auto make = [](const auto& policies) {
  return td::Trainer{PlainNet(), Objective{}, td::optim::AdamW{.learning_rate = 1e-2}, policies};
};
// Otherwise sound, but one precision computes another loss.
const auto make_wrong = []<class P>(const P& policies) {
  const bool wrong = std::is_same_v<typename P::Precision, td::precision::Bf16>;
  return td::Trainer{PlainNet(), Objective{wrong ? 1.2 : 1.0}, td::optim::AdamW{}, policies};
};

const td::CompareOptions quick{.blocks = 3, .block_seconds = 0.001, .warmup_steps = 1, .print = false};

/// What is said while `f` runs.
template <class F>
std::vector<std::string> said(F&& f) {
  std::vector<std::string> lines;
  auto before = td::set_sink([&](td::Severity, std::string_view text) { lines.emplace_back(text); });
  try {
    f();
  } catch (...) {
    td::set_sink(before);
    throw;
  }
  td::set_sink(before);
  return lines;
}

}  // namespace

TEST_CASE("policies are described by what differs from the defaults") {
  CHECK(td::describe(td::policies()) == "defaults");
  CHECK(td::describe(td::policies(td::precision::Bf16{}, AccumulateOver{.batches = 4})) == "Bf16 + AccumulateOver(4)");
  CHECK(td::describe(td::policies(AccumulateOver{.batches = 2, .tail = td::accumulation::Tail::Drop})) ==
        "AccumulateOver(2, Drop)");
  CHECK(td::describe(td::policies(td::precision::Fp16{})) == "Fp16");  // its Skip is its default
  CHECK(td::describe(td::policies(td::precision::Fp16{.growth_factor = 3}, td::nonfinite::Ignore{})) ==
        "Fp16(65536, 3) + Ignore");
  CHECK(td::describe(td::policies(td::nonfinite::Skip{}, ClipNorm{.max_norm = 0.5})) == "ClipNorm(0.5) + Skip");
  CHECK(td::describe(td::policies(td::precision::Bf16Weights{.keep_fp32 = {"a.*", "b"}})) == "Bf16Weights([a.*, b])");
  CHECK(td::describe(td::policies(td::parallelism::SingleDevice{at::Device(at::kCPU)})) == "SingleDevice(cpu)");
  CHECK(td::describe(td::policies(Own{.mood = Mood::Wild})) == "Own(1.5, Wild)");
  CHECK(td::describe(td::policies(Own{.levels = {1, 2}})) == "Own(1.5, Calm, [1, 2])");
}

TEST_CASE("names lose the scopes around them, and around their arguments") {
  CHECK(td::detail::unqualified("a::b::C") == "C");
  CHECK(td::detail::unqualified("a::C<b::D, e::F<g::H>>") == "C<D, F<H>>");
  CHECK(td::detail::unqualified("a::X<b::Y>::C") == "C");
  CHECK(td::detail::unqualified("main()::C") == "C");
  CHECK(td::detail::unqualified("{anonymous}::C") == "C");
  CHECK(td::detail::unqualified("(anonymous namespace)::C") == "C");
}

TEST_CASE("combinations that compute the same agree, each over the steps that it shares with the first") {
  const auto found =
      td::compare(make, batches(), quick, td::policies(), td::policies(td::precision::Bf16{}),
                  td::policies(SplitBatch{.micro_batches = 2}), td::policies(AccumulateOver{.batches = 3}),
                  td::policies(ClipNorm{.max_norm = 1e-3}), td::policies(td::precision::Fp16{.initial_scale = 3e38}));
  REQUIRE(found.rows.size() == 6);
  CHECK(found.agree());
  CHECK(found.rows[1].name == "Bf16");
  CHECK(found.rows[1].checked == 5);
  CHECK(found.rows[1].tolerance == 5e-2);
  CHECK(found.rows[2].checked == 5);
  CHECK(found.rows[2].tolerance == 1e-4);
  CHECK(found.rows[3].checked == 1);  // its step is three of the baseline's
  CHECK(found.rows[3].difference < 1e-5);
  CHECK(found.rows[4].checked == 1);  // its second step starts from other weights, as it should
  CHECK(found.rows[4].losses[4] > found.rows[0].losses[4]);
  CHECK(found.rows[5].checked == 5);  // after the steps that its loss scale skips
  for (const auto& row : found.rows) {
    CHECK(row.losses.size() == 5);
    CHECK(row.seconds_per_step > 0);
    CHECK(row.rows_per_second > 0);
    CHECK(row.time_ratio > 0);
  }
  CHECK(found.rows[0].time_ratio == 1);
  CHECK(found.rows[0].memory_ratio == 1);
}

TEST_CASE("losses are those of a loop by hand") {
  const auto data = batches();
  const auto found = td::compare<td::Policies<>>(make, data, quick);
  torch::manual_seed(quick.seed);
  auto trainer = make(td::policies());
  for (std::size_t i = 0; i < 5; ++i)
    CHECK(trainer.accumulate(data[i])->loss.item<double>() == found.rows[0].losses[i]);
}

TEST_CASE("memory is that of weights, gradients, state and activations on the device") {
  const auto wide = [](const auto& policies) {
    return td::Trainer{torch::nn::Linear(6, 100'000), Objective{}, td::optim::AdamW{}, policies};
  };
  const auto found =
      td::compare(wide, batches(2), quick, td::policies(), td::policies(td::averaging::ExponentialAverage{}),
                  td::policies(SplitBatch{.micro_batches = 8}));
  const double weights = 7 * 100'000 * 4.0, activations = 8 * 100'000 * 4.0;
  const auto base = static_cast<double>(found.rows[0].peak_bytes.value());
  CHECK(base > 4 * weights);  // weights, gradients, two moments
  CHECK(base < 4 * weights + 6 * activations);
  const auto average = static_cast<double>(found.rows[1].peak_bytes.value());
  CHECK(average > base + 0.9 * weights);
  CHECK(average < base + 1.5 * weights);
  CHECK(found.rows[1].memory_ratio == doctest::Approx(average / base));
  CHECK(found.rows[2].memory_ratio < 1);  // an eighth of the activations
  CHECK(found.rows[0].reserved_bytes.has_value() == torch::cuda::is_available());
}

TEST_CASE("losses that differ stop the comparison with a sentence, or mark it") {
  using Bf16 = td::Policies<td::precision::Bf16>;
  const auto text =
      treadle_test::thrown<td::Error>([] { td::compare<td::Policies<>, Bf16>(make_wrong, batches(), quick); });
  CHECK(text.find("'Bf16' has a loss of ") != std::string::npos);
  CHECK(text.find("in step 0 where 'defaults' has ") != std::string::npos);
  CHECK(text.find("0.0500 is allowed") != std::string::npos);
  CHECK(treadle_test::is_sentence(text));

  auto options = quick;
  options.on_disagreement = td::Disagreement::Warn;
  options.print = true;
  td::Comparison found;
  const auto lines = said([&] { found = td::compare<td::Policies<>, Bf16>(make_wrong, batches(), options); });
  CHECK(!found.agree());
  CHECK(found.rows[1].difference == doctest::Approx(0.2).epsilon(0.1));
  REQUIRE(lines.size() == 2);
  CHECK(treadle_test::is_sentence(lines[0]));
  CHECK(lines[1].find("DIFFER (0.") != std::string::npos);

  options = quick;
  options.tolerance = 0.5;
  CHECK(td::compare<td::Policies<>, Bf16>(make_wrong, batches(), options).agree());
}

TEST_CASE("a window of another length is compared too") {
  const auto wrong = []<class P>(const P& policies) {
    return td::Trainer{PlainNet(), Objective{P::Accumulation::windows ? 1.01 : 1.0}, td::optim::AdamW{}, policies};
  };
  CHECK_SAYS(td::Error, "'AccumulateOver(4)' has a loss",
             td::compare(wrong, batches(), quick, td::policies(), td::policies(AccumulateOver{.batches = 4})));
  CHECK_SAYS(td::Error, "'defaults' has a loss",
             td::compare(wrong, batches(), quick, td::policies(AccumulateOver{.batches = 4}), td::policies()));
}

TEST_CASE("a loss that is not a number agrees with nothing") {
  const auto nan = []<class P>(const P& policies) {
    const bool bad = !std::is_same_v<typename P::Precision, td::precision::Fp32>;
    return td::Trainer{PlainNet(), Objective{bad ? std::numeric_limits<double>::quiet_NaN() : 1.0}, td::optim::AdamW{},
                       policies};
  };
  CHECK_SAYS(td::Error, "has a loss of nan",
             td::compare<td::Policies<>, td::Policies<td::precision::Tf32>>(nan, batches(), quick));
}

TEST_CASE("a model that is not made anew is found out") {
  PlainNet shared;
  const auto forgetful = [&](const auto& policies) {
    return td::Trainer{shared, Objective{}, td::optim::AdamW{.learning_rate = 0.1}, policies};
  };
  CHECK_SAYS(td::Error, "make_trainer must make a new model",
             td::compare(forgetful, batches(), quick, td::policies(), td::policies(SplitBatch{.micro_batches = 2})));
}

TEST_CASE("random numbers are the same for all, and a schedule without a horizon gets one") {
  const auto random = [](const auto& policies) {
    return td::Trainer{treadle_test::TinyNet(), Objective{}, td::optim::AdamW{.schedule = td::schedule::one_cycle()},
                       policies};
  };
  // Skipped steps draw numbers too, and must not shift those of the steps after them.
  const auto found =
      td::compare(random, batches(), quick, td::policies(), td::policies(td::precision::Fp16{.initial_scale = 3e38}));
  CHECK(found.agree());
}

TEST_CASE("the table goes to the sink, aligned, unless it is not wanted") {
  auto options = quick;
  options.print = true;
  const auto data = batches();
  const auto lines = said([&] { td::compare<td::Policies<>, td::Policies<td::precision::Bf16>>(make, data, options); });
  REQUIRE(lines.size() == 1);
  std::vector<std::string> rows(1);
  for (const char c : lines[0])
    if (c == '\n')
      rows.emplace_back();
    else
      rows.back() += c;
  REQUIRE(rows.size() == 4);
  CHECK(rows[0].starts_with("policies"));
  CHECK(rows[2].starts_with("defaults  "));
  CHECK(rows[2].find("baseline") != std::string::npos);
  CHECK(rows[3].starts_with("Bf16      "));
  CHECK(rows[3].find("agree (") != std::string::npos);
  for (const auto& row : rows) CHECK(row.size() == rows[0].size());
  CHECK(said([&] { td::compare<td::Policies<>>(make, data, quick); }).empty());
}

TEST_CASE("options and loaders that cannot work are refused") {
  const auto with = [](auto change) {
    auto options = quick;
    change(options);
    return options;
  };
  const auto data = batches();
  CHECK_SAYS(td::ConfigError, "must be at least 1",
             td::compare<td::Policies<>>(make, data, with([](auto& o) { o.check_steps = 0; })));
  CHECK_SAYS(td::ConfigError, "must be at least 1",
             td::compare<td::Policies<>>(make, data, with([](auto& o) { o.blocks = 0; })));
  CHECK_SAYS(td::ConfigError, "must not be negative",
             td::compare<td::Policies<>>(make, data, with([](auto& o) { o.tolerance = -1; })));
  CHECK_SAYS(td::DataError, "gave no batch", td::compare<td::Policies<>>(make, std::vector<td::Batch>{}, quick));
}

TEST_CASE("a comparison leaves the random numbers of the program where they were") {
  const auto loader = batches();
  torch::manual_seed(7);
  const auto want = torch::rand({4});
  for (const bool disagree : {false, true}) {
    torch::manual_seed(7);
    if (disagree)
      CHECK_THROWS_AS(td::compare(make_wrong, loader, quick, td::policies(), td::policies(td::precision::Bf16{})),
                      td::Error);
    else
      td::compare(make, loader, quick, td::policies(), td::policies(td::precision::Bf16{}));
    CHECK(torch::rand({4}).equal(want));
  }
}
