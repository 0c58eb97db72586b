// SPDX-License-Identifier: Apache-2.0
// Activations on the host: what goes, what stays, and that it comes back as it went. On a CPU the same with plain
// copies.
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
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
    int no_model = 0;
    attach(no_model, device(), td::BufferList{});
  }
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
  // Both blocks: input, tanh, sigmoid.
  run({.min_bytes = 0, .in_flight_bytes = 0}, 2 * (2 * small + large), true);
  run({.min_bytes = 0}, 2 * (2 * small + large), true);
  run({.min_bytes = large}, 2 * large, true);
  run({.min_bytes = large + 1}, 0, false);
  run({.min_bytes = 0, .budget_bytes = 0}, 0, false);
  run({.min_bytes = 0, .budget_bytes = 2 * small + large}, 2 * small + large, true);       // the first block
  run({.min_bytes = 0, .in_flight_bytes = 0, .recompute_blocks = true}, 2 * small, true);  // their inputs
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

TEST_CASE(
    "on CUDA the default budget is what the link carries in a forward pass, and nothing of it makes the host wait") {
  TREADLE_REQUIRE_CUDA();
  Attached state({});
  CHECK(state.bandwidth() > 1e9);
  CHECK(state.budget_bytes() == std::numeric_limits<std::int64_t>::max());
  auto w = at::randn({2048, 2048}, here()).set_requires_grad(true);
  const auto x = at::randn({2048, 2048}, here());
  for (int i = 0; i < 12; ++i) {
    at::Tensor y = x;
    {
      const auto scope = state.pass();
      for (int k = 0; k < 16; ++k) y = state([w](const at::Tensor& z) { return z.matmul(w).tanh() * 0.01; }, y);
    }
    y.sum().backward();
    td::synchronize(device());
  }
  CHECK(state.budget_bytes() < std::int64_t{16} << 30);
  CHECK(state.offloaded_bytes() <= state.budget_bytes());
  CHECK(state.offloaded_bytes() > 0);
}
