// SPDX-License-Identifier: Apache-2.0
// Activations on the host: what goes, what stays, and that it comes back as it went. On a CPU the same with plain
// copies.
#include <torch/csrc/autograd/autograd.h>

#if TREADLE_HAS_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "treadle/checkpointing/offload_activations.hpp"
#include "treadle/runtime/device.hpp"
#include "treadle/testing/contract.hpp"

#include "support/skip.hpp"
#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {

using namespace treadle_test;
using td::checkpointing::OffloadActivations;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

Weak weak(const at::Tensor& tensor) {
  return Weak(tensor.storage().getWeakStorageImpl());
}
at::TensorOptions here() {
  return at::TensorOptions().device(device());
}

struct Attached : OffloadActivations::State {
  explicit Attached(const OffloadActivations& policy) : OffloadActivations::State(policy) {
    attach(no_model, device(), td::BufferList{});
  }
  [[nodiscard]] auto pass() { return OffloadActivations::State::pass(no_model); }
  int no_model = 0;
};

/// Two blocks: x, tanh(x w) and its product are saved, 4 x 6, 4 x 6 and 4 x 12 numbers.
struct Chain {
  at::Tensor w = at::randn({6, 6}, here()).set_requires_grad(true);
  at::Tensor v = at::randn({6, 12}, here()).set_requires_grad(true);
  std::vector<Weak> inside{};

  at::Tensor operator()(auto& step, const at::Tensor& x) {
    const auto block = [this](const at::Tensor& y) {
      auto a = y.matmul(w).tanh();
      auto b = a.matmul(v).sigmoid();
      inside.push_back(weak(a));
      inside.push_back(weak(b));
      return (b.view({2, 2, 2, 6}).select(1, 0) * b.view({2, 2, 2, 6}).select(1, 1))
          .reshape({4, 6});  // views of one memory
    };
    return step(block, step(block, x)).square().sum();
  }
};
constexpr std::int64_t small = 4 * 6 * 4;
constexpr std::int64_t large = 4 * 12 * 4;

}  // namespace

TEST_CASE("what is saved in blocks goes to the host, once a memory, and comes back") {
  reseed(4);
  const auto x = at::randn({4, 6}, here());
  Chain plain;
  const auto direct = [](auto&& block, const at::Tensor& y) { return block(y); };
  auto loss = plain(direct, x);
  CHECK(!plain.inside[0].expired());
  loss.backward();

  const auto run = [&](const OffloadActivations& policy, std::int64_t sent, bool gone) {
    Chain chain{plain.w.detach().clone().set_requires_grad(true), plain.v.detach().clone().set_requires_grad(true)};
    Attached state(policy);
    for (int i = 0; i < 3; ++i) {
      chain.inside.clear();
      chain.w.mutable_grad().reset();
      chain.v.mutable_grad().reset();
      at::Tensor out;
      {
        const auto scope = state.pass();
        out = chain(state, x);
      }
      CHECK(state.offloaded_bytes() == sent);
      // On a GPU memory stays while its copy is under way, unless nothing may be.
      if (device().is_cpu() || policy.in_flight_bytes == 0 || !gone) CHECK(chain.inside[1].expired() == gone);
      CHECK(same_bits(out.detach(), loss.detach()));
      out.backward({}, /*retain_graph=*/i == 1);
      if (i == 1) {
        chain.w.mutable_grad().reset();
        chain.v.mutable_grad().reset();
        out.backward();
      }
      CHECK(same_bits(chain.w.grad(), plain.w.grad()));
      CHECK(same_bits(chain.v.grad(), plain.v.grad()));
    }
  };
  // Both blocks: tanh and sigmoid, and the input, but for the first one, which is data and has no graph.
  run({.min_bytes = 0, .in_flight_bytes = 0}, 3 * small + 2 * large, true);
  run({.min_bytes = 0}, 3 * small + 2 * large, true);
  run({.min_bytes = large}, 2 * large, true);
  run({.min_bytes = large + 1}, 0, false);
  run({.min_bytes = 0, .budget_bytes = 0}, 0, false);
  run({.min_bytes = 0, .budget_bytes = small + large}, small + large, true);           // the first block
  run({.min_bytes = 0, .in_flight_bytes = 0, .recompute_blocks = true}, small, true);  // the second one's input
}

TEST_CASE("what lives on anyway stays: weights that are frozen, buffers and data") {
  reseed(4);
  struct Frozen : torch::nn::Module {
    Frozen()
        : frozen(register_parameter("frozen", at::randn({6, 6}, here()), /*requires_grad=*/false)),
          w(register_parameter("w", at::randn({6, 6}, here()))),
          mask(register_buffer("mask", at::rand({4, 6}, here()))) {}
    at::Tensor forward(const at::Tensor& x) { return (x.matmul(frozen) * mask).matmul(w); }
    at::Tensor frozen;
    at::Tensor w;
    at::Tensor mask;
  } net;
  OffloadActivations::State state({.min_bytes = 0});
  state.attach(net, device(), td::detail::list_buffers(net));
  const auto dataset = at::randn({1000, 6}, here());
  const auto sent = [&](auto&& block, const at::Tensor& x) {
    at::Tensor y;
    {
      const auto scope = state.pass(net);
      y = state(block, x);
    }
    y.sum().backward();
    return state.offloaded_bytes();
  };
  CHECK(sent(net, (at::randn({4, 6}, here()) * net.w[0])) == small);  // the masked product
  CHECK(sent(net, dataset.slice(0, 40, 44)) == small);
  // Also where a function object holds it.
  CHECK(sent([&net, part = dataset.slice(0, 8, 12)](const at::Tensor& x) { return x * net.w[0] * part; },
             dataset.slice(0, 4, 8)) == 0);
  // A mask that the block makes itself goes.
  CHECK(sent(
            [&net](const at::Tensor& x) {
              return x.matmul(net.w) * at::rand({4, 6}, here());
            },
            dataset.slice(0, 4, 8)) == small);
}

TEST_CASE("the time of a forward pass is that of the largest ones") {
  td::detail::PassTimes times;
  CHECK(times.shortest() == 0);
  times.add({1000, 3.0});
  times.add({1000, 2.5});
  times.add({100, 0.2});  // the short batch at the end of an epoch
  times.add({0, 0.1});    // nothing was saved
  CHECK(times.shortest() == 2.5);
  CHECK(times.samples() == 2);
  times.add({2000, 5.0});  // larger batches from here on
  CHECK(times.shortest() == 5.0);
  times.add({1000, 2.0});
  CHECK(times.shortest() == 5.0);
  CHECK(times.samples() == 1);
}

TEST_CASE("parameters stay, and what was changed in place is refused") {
  reseed(4);
  Attached state({.min_bytes = 0});
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  auto x = at::randn({4, 6}, here()).set_requires_grad(true);
  {
    const auto scope = state.pass();
    auto y = state([w](const at::Tensor& z) { return z.matmul(w) + z.matmul(w.t()) + z * w[0]; }, x);
  }
  CHECK(state.offloaded_bytes() == 0);  // leaves and their views
  at::Tensor loss;
  const auto forward = [&] {
    const auto scope = state.pass();
    auto y = x * 2;
    loss = state([w](const at::Tensor& z) { return z.matmul(w).tanh(); }, y).sum();
    return y;
  };
  forward().add_(1);
  CHECK_SAYS(td::ConfigError, "checkpointing::OffloadActivations: a tensor that the backward pass needs",
             loss.backward());
  forward();
  w.detach().add_(1);
  CHECK_SAYS(td::ConfigError, "changed in place", loss.backward());
  forward();
  loss.backward();
  CHECK_SAYS(td::ConfigError, "is negative", OffloadActivations{.min_bytes = -1}.check());
}

TEST_CASE("a dropped graph lets go of everything, with copies under way") {
  reseed(4);
  Attached state({.min_bytes = 0});
  Chain chain;
  for (int i = 0; i < 100; ++i) {
    chain.inside.clear();
    const auto scope = state.pass();
    auto loss = chain(state, at::randn({4, 6}, here()));
    if (i % 3 == 0) loss.backward();
  }
  for (const auto& memory : chain.inside) CHECK(memory.expired());
}

TEST_CASE("the contract is kept") {
  for (const bool recompute : {false, true}) {
    const OffloadActivations policy{.min_bytes = 0, .recompute_blocks = recompute};
    for (const auto& sentence : td::testing::check_checkpointing_contract(policy, device())) FAIL_CHECK(sentence);
  }
}

namespace {
/// Passes through 16 blocks of 2048 x 2048.
struct Wide {
  Attached state{{}};
  at::Tensor w = at::randn({2048, 2048}, here()).set_requires_grad(true);
  at::Tensor x = at::randn({2048, 2048}, here()).set_requires_grad(true);

  void pass(std::int64_t rows = 2048, bool throws = false) {
    at::Tensor y = x.slice(0, 0, rows) * 1;
    {
      const auto scope = state.pass();
      for (int k = 0; k < 16; ++k) y = state([this](const at::Tensor& z) { return z.matmul(w).tanh() * 0.01; }, y);
      if (throws) throw std::runtime_error("on purpose");
    }
    y.sum().backward();
  }
};
}  // namespace

TEST_CASE("on CUDA the default budget is what the link carries in a forward pass") {
  TREADLE_REQUIRE_CUDA();
  Wide wide;
  auto& state = wide.state;
  CHECK(state.bandwidth() > 1e9);
  CHECK(state.budget_bytes() == std::numeric_limits<std::int64_t>::max());
  const auto settle = [&] {
    for (int i = 0; i < 12; ++i) {
      wide.pass();
      if (i % 3 == 0) CHECK_THROWS(wide.pass(2048, /*throws=*/true));
      if (i % 3 == 1) wide.pass(64);
      td::synchronize(device());
    }
  };
  settle();
  wide.pass();
  CHECK(state.offloaded_bytes() <= state.budget_bytes());
  CHECK(state.offloaded_bytes() > 0);
  // Measured without the link: what is computed alone takes no longer than the budget allows for.
  double alone = 1e9;
  for (int i = 0; i < 8; ++i) {
    const auto stream = td::detail::stream_here(device());
    at::Tensor y = wide.x * 1;
    td::synchronize(device());
    auto began = td::detail::timed_event(stream);
    for (int k = 0; k < 16; ++k) y = y.matmul(wide.w).tanh() * 0.01;
    const td::detail::TimedSpan span{std::move(began), td::detail::timed_event(stream)};
    td::synchronize(device());
    alone = std::min(alone, span.seconds());
  }
  const double allowed = static_cast<double>(state.budget_bytes()) / state.bandwidth();
  CAPTURE(alone);
  CAPTURE(allowed);
  CHECK(allowed > 0.4 * alone);
  CHECK(allowed < 3 * alone);
}

TEST_CASE("on CUDA nothing of it makes the host wait") {
  TREADLE_REQUIRE_CUDA();
#if TREADLE_HAS_CUDA
  Wide wide;
  for (int i = 0; i < 12; ++i) {  // pinned memory, kernels, the budget
    wide.pass();
    td::synchronize(device());
  }
  struct NoSync {
    NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
    ~NoSync() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
  };
  {
    const NoSync no_sync;
    CHECK_THROWS(wide.x.sum().item<float>());  // the check catches one
    for (int i = 0; i < 3; ++i) wide.pass();
  }
  // Three passes are queued long before the device has made them.
  const auto stream = td::detail::stream_here(device());
  td::synchronize(device());
  for (int i = 0; i < 64; ++i) wide.x.detach().matmul(wide.x.detach());
  const auto queued = td::detail::timed_event(stream);
  wide.pass();
  CHECK(!queued.query());
  td::synchronize(device());
#endif
}
