// SPDX-License-Identifier: Apache-2.0
// Recomputing policies on blocks of every kind, against the same blocks called plainly.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "treadle/checkpointing/checkpoint_every_block.hpp"
#include "treadle/checkpointing/checkpoint_every_n.hpp"
#include "treadle/checkpointing/checkpoint_selective.hpp"
#include "treadle/precision/autocast.hpp"
#include "treadle/testing/contract.hpp"

#include "support/skip.hpp"
#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {

using namespace treadle_test;
using td::checkpointing::CheckpointEveryBlock;
using td::checkpointing::CheckpointEveryN;
using td::checkpointing::CheckpointSelective;
using td::checkpointing::NoCheckpointing;
using torch::autograd::variable_list;

at::TensorOptions here() {
  return at::TensorOptions().device(device());
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double drop = 0.2, bool norm = false)
      : fc(register_module("fc", torch::nn::Linear(6, 12))),
        proj(register_module("proj", torch::nn::Linear(12, 6))),
        dropout(register_module("dropout", torch::nn::Dropout(drop))) {
    if (norm) batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(12));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::gelu(fc(x));
    if (batch_norm) y = batch_norm(y);
    return x + dropout(proj(y));
  }
  torch::nn::Linear fc;
  torch::nn::Linear proj;
  torch::nn::Dropout dropout;
  torch::nn::BatchNorm1d batch_norm{nullptr};
};
TORCH_MODULE(Block);

/// Six blocks with batch norm and dropout.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int size = 6, double drop = 0.2, bool norm = true) {
    for (int i = 0; i < size; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(drop, norm)));
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Stack);

/// A state for function objects, which write no buffers.
template <class Policy>
struct Alone : Policy::State {
  explicit Alone(const Policy& policy = {}) : Policy::State(policy) {
    this->attach(no_model, device(), td::BufferList{});
  }
  [[nodiscard]] auto pass() { return Policy::State::pass(no_model); }
  int no_model = 0;
};

/// What a run leaves: its outputs, gradients, buffers, and the next random numbers.
using Trace = std::vector<at::Tensor>;

std::string difference(const Trace& got, const Trace& want) {
  if (got.size() != want.size()) return "sizes";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].defined() != want[i].defined()) return "number " + std::to_string(i) + " is missing";
    if (got[i].defined() && !same_bits(got[i], want[i])) return "number " + std::to_string(i);
  }
  return {};
}

/// Runs `body(model, state)`, which returns a loss and what else to look at, from the same start under a policy.
template <class Policy, class Model, class Body>
Trace trace(const Policy& policy, Model model, bool input_needs_gradient, Body&& body) {
  reseed(5);
  auto x = at::randn({4, 6}, here()).set_requires_grad(input_needs_gradient);
  typename Policy::State state(policy);
  state.attach(*model, device(), td::detail::list_buffers(*model));
  Trace seen;
  for (int pass = 0; pass < 3; ++pass) {  // the first finds out how many blocks there are
    state.begin_step();
    at::Tensor loss;
    {
      [[maybe_unused]] const auto scope = state.pass(*model);
      loss = body(*model, state, x);
    }
    if (loss.requires_grad()) loss.backward();
    state.end_step();
    seen.push_back(loss.detach());
  }
  seen.push_back(x.grad());
  for (const auto& p : model->parameters()) seen.push_back(p.grad());
  for (const auto& b : model->buffers()) seen.push_back(b.clone());
  seen.push_back(at::rand({4}, here()));
  seen.push_back(at::rand({4}));
  return seen;
}

template <class MakeModel, class Body>
void check_same(MakeModel&& make_model, Body&& body) {
  const auto run = [&](auto policy, bool input) {
    reseed(3);
    auto model = make_model();
    model->to(device());
    return trace(policy, model, input, body);
  };
  for (const bool input : {true, false}) {
    CAPTURE(input);
    const auto plain = run(NoCheckpointing{}, input);
    CHECK(difference(run(CheckpointEveryBlock{}, input), plain) == "");
    CHECK(difference(run(CheckpointEveryN{}, input), plain) == "");
    CHECK(difference(run(CheckpointEveryN{.n = 2}, input), plain) == "");
    CHECK(difference(run(CheckpointEveryN{.n = 100}, input), plain) == "");
  }
}

const auto through_all = [](StackImpl& net, auto& step, const at::Tensor& x) {
  at::Tensor y = x;
  for (auto& block : net.blocks) y = step(block, y);
  return y.square().sum();
};

}  // namespace

TEST_CASE("stacks of blocks with dropout and batch norm are bitwise the plain run") {
  check_same([] { return Stack(); }, through_all);
  check_same([] { return Stack(); },  // with work between the blocks, chance in it too
             [](StackImpl& net, auto& step, const at::Tensor& x) {
               at::Tensor y = x;
               for (auto& block : net.blocks) y = at::dropout(step(block, y).tanh(), 0.3, true) * 1.5;
               return y.square().sum();
             });
  check_same([] { return Stack(); },  // changed in place between blocks of one segment
             [](StackImpl& net, auto& step, const at::Tensor& x) {
               at::Tensor y = x;
               for (auto& block : net.blocks) {
                 y = step(block, y);
                 y.add_(0.5);
               }
               return y.square().sum();
             });
}

TEST_CASE("inputs, outputs and blocks of every kind are bitwise the plain run") {
  SUBCASE("several tensors in and out, undefined and integer ones, numbers and containers") {
    check_same([] { return Stack(2, 0.2, false); },
               [](StackImpl& net, auto& step, const at::Tensor& x) {
                 const auto index = at::arange(4, here().dtype(at::kLong));
                 auto block = [w = net.blocks[0]->fc->weight](const at::Tensor& a, const at::Tensor& none,
                                                              const std::vector<at::Tensor>& more, double scale,
                                                              const at::Tensor& at) {
                   CHECK(!none.defined());
                   auto y = (a * more[0]).index_select(0, at).matmul(w.t()).tanh() * scale;
                   return std::tuple{y, y.sigmoid() * more[1].sum(), at};
                 };
                 auto [y, z, same] = step(block, x, at::Tensor(), std::vector{x.sin(), x.cos()}, 2.0, index.flip(0));
                 auto [u, v, w] = step(block, x + z.sum(), at::Tensor(), std::vector{x, x}, 0.5, same);
                 return (y * z).sum() + (u - v).square().sum();
               });
  }
  SUBCASE("frozen blocks") {
    for (const int frozen : {0, 1, 5})
      check_same(
          [&] {
            Stack net;
            for (auto& p : net->blocks[static_cast<std::size_t>(frozen)]->parameters()) p.set_requires_grad(false);
            return net;
          },
          through_all);
    check_same(
        [] {
          Stack net;
          for (auto& p : net->parameters()) p.set_requires_grad(false);
          return net;
        },
        through_all);
  }
  SUBCASE("tied weights, and one block in several places") {
    check_same(
        [] {
          Stack net;
          net->blocks[3]->fc->weight = net->blocks[1]->fc->weight;
          return net;
        },
        [](StackImpl& net, auto& step, const at::Tensor& x) {
          at::Tensor y = x;
          for (const std::size_t i : {0, 1, 3, 1, 2, 2, 1}) y = step(net.blocks[i], y);
          return y.square().sum() + net.blocks[1]->fc(x).sum();
        });
  }
  SUBCASE("a module itself, its holder, a pointer and a shared pointer") {
    check_same([] { return Stack(); },
               [](StackImpl& net, auto& step, const at::Tensor& x) {
                 auto y = step(*net.blocks[0], step(net.blocks[1], x));
                 BlockImpl* third = net.blocks[2].get();
                 y = step(third, y);
                 std::shared_ptr<BlockImpl> fourth = net.blocks[3].ptr();
                 return step(std::move(fourth), y).square().sum();
               });
  }
  SUBCASE("evaluation mode, whose backward pass reads the running statistics") {
    check_same(
        [] {
          Stack net;
          net->eval();
          return net;
        },
        through_all);
  }
  SUBCASE("a block that reads the buffer which it writes") {
    struct CountingImpl : torch::nn::Module {
      CountingImpl()
          : count(register_buffer("count", at::ones({1}))),
            table(register_buffer("table", at::ones({2, 3}))),
            mask(register_buffer("mask", at::ones({4, 6}, at::kBool))),
            w(register_parameter("w", at::ones({6}))) {}
      at::Tensor forward(const at::Tensor& x) {
        const auto scale = count * 0.5 + table.sum();
        count.add_(1);
        table.mul_(0.9);
        return (x * w * scale * mask).tanh();
      }
      at::Tensor count;
      at::Tensor table;
      at::Tensor mask;
      at::Tensor w;
    };
    struct Counting : torch::nn::ModuleHolder<CountingImpl> {
      using torch::nn::ModuleHolder<CountingImpl>::ModuleHolder;
    };
    check_same([] { return Counting(); },
               [](CountingImpl& net, auto& step, const at::Tensor& x) {
                 const auto again = step(net, step(net, x));
                 return step([&net](const at::Tensor& y) { return net.forward(y); }, again).square().sum();
               });
  }
  SUBCASE("a function of LibTorch's kind that saves what it likes") {
    struct Cube : torch::autograd::Function<Cube> {
      static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
        const auto square = x * x;
        context->save_for_backward({x, square});
        return square * x;
      }
      static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& g) {
        const auto once = context->get_saved_variables();
        const auto twice = context->get_saved_variables();  // asked for twice
        return {g[0] * (once[1] + 2 * twice[0] * twice[0])};
      }
    };
    check_same([] { return Stack(); },
               [](StackImpl& net, auto& step, const at::Tensor& x) {
                 auto block = [b = net.blocks[0]](const at::Tensor& y) mutable { return Cube::apply(b->forward(y)); };
                 return step(block, step(block, x)).sum();
               });
  }
}

TEST_CASE("blocks within blocks are bitwise the plain run") {
  const auto nested = [](int depth) {
    return [depth](StackImpl& net, auto& step, const at::Tensor& x) {
      std::function<at::Tensor(int, const at::Tensor&)> level = [&net, &step, &level](int d, const at::Tensor& y) {
        if (d == 0) return step(net.blocks[0], y);
        auto z = step(net.blocks[static_cast<std::size_t>(d)], y);
        // By reference: the closures outlive the backward passes, which the caller makes.
        z = step([&level, d](const at::Tensor& u) { return level(d - 1, u).tanh(); }, z);
        return step([&level, d](const at::Tensor& u) { return at::dropout(level(d - 1, u), 0.2, true); }, z);
      };
      auto loss = level(depth, x).square().sum();
      if (loss.requires_grad()) loss.backward({}, /*retain_graph=*/true);
      return loss.detach();
    };
  };
  for (const int depth : {1, 2, 3}) check_same([] { return Stack(); }, nested(depth));
}

TEST_CASE("autocast is in a recompute what it was") {
  const auto bf16 = [](StackImpl& net, auto& step, const at::Tensor& x) {
    const td::precision::Autocast cast(device().type(), at::kBFloat16);
    // A weight that is used twice is cast once, and its gradient summed in bfloat16.
    const auto& w = net.blocks[0]->fc->weight;
    auto twice = [w](const at::Tensor& y) { return at::linear(at::linear(y, w).tanh().matmul(w), w); };
    at::Tensor y = step(twice, x).matmul(w);
    for (auto& block : net.blocks) y = step(block, y);
    y = step(
        [&](const at::Tensor& z) {  // and within a block another one
          const td::precision::Autocast other(device().type(), at::kBFloat16, false);
          return at::linear(z, w).sin();
        },
        y);
    return y.to(at::kFloat).square().sum();
  };
  check_same([] { return Stack(); }, bf16);
}

TEST_CASE("a block is recomputed once, as far as it must be, and its activations are gone meanwhile") {
  reseed(1);
  int calls = 0;
  int ends = 0;
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> inside{at::Tensor().getIntrusivePtr()};
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  const auto block = [&, w](const at::Tensor& x) {
    ++calls;
    auto y = x.matmul(w).tanh();
    inside = y.getIntrusivePtr();
    auto z = y.matmul(w);  // saves y: all that is needed
    ++ends;
    return z + 1;
  };
  const auto run = [&](auto policy) {
    Alone<decltype(policy)> state(policy);
    calls = ends = 0;
    auto y = state(block, state(block, at::randn({3, 6}, here())));
    CHECK(calls == 2);
    const bool gone = inside.expired();
    y.sum().backward();
    return gone;
  };
  CHECK(!run(NoCheckpointing{}));
  CHECK(calls == 2);
  CHECK(run(CheckpointEveryBlock{}));
  CHECK(calls == 4);
  CHECK(ends == 2);  // neither recompute came that far
  CHECK(run(CheckpointEveryN{.n = 2}));
  CHECK(calls == 4);
  CHECK(ends == 3);
  {
    const at::NoGradGuard no_grad;
    Alone<CheckpointEveryBlock> state;
    calls = 0;
    CHECK(!state(block, at::randn({3, 6}, here())).requires_grad());
    CHECK(calls == 1);
  }
}

TEST_CASE("several backward passes through one graph, and backward passes of backward passes") {
  const auto twice = [](StackImpl& net, auto& step, const at::Tensor& x) {
    auto loss = through_all(net, step, x);
    if (!loss.requires_grad()) return loss;
    loss.backward({}, /*retain_graph=*/true);
    return loss * 3;
  };
  const auto penalty = [](StackImpl& net, auto& step, const at::Tensor& x) {
    auto y = x * 1;
    if (!y.requires_grad()) y.set_requires_grad(true);
    at::Tensor z = y;
    for (auto& block : net.blocks) z = step(block, z);
    const auto gradient = torch::autograd::grad({z.sum()}, {y}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return gradient.square().sum() + z.square().sum();
  };
  const auto within = [](StackImpl& net, auto& step, const at::Tensor& x) {  // a backward pass within a block
    at::Tensor y = x;
    for (auto& block : net.blocks)
      y = step(
          [&block](const at::Tensor& in) {
            auto leaf = in.detach().set_requires_grad(true);
            const auto out = block->forward(leaf);
            return block->forward(in) +
                   torch::autograd::grad({out.square().sum()}, {leaf}, {}, true, /*create_graph=*/true)[0];
          },
          y);
    return y.square().sum();
  };
  const auto parts = [](StackImpl& net, auto& step, const at::Tensor& x) {  // one block's weights, then all
    auto loss = through_all(net, step, x);
    const auto some = net.blocks[2]->parameters();
    const auto gradients = torch::autograd::grad({loss}, some, {}, /*retain_graph=*/true);
    at::Tensor sum = loss;
    for (const auto& g : gradients) sum = sum + g.sum();
    return sum;
  };
  check_same([] { return Stack(); }, twice);
  check_same([] { return Stack(6, 0.2, false); }, penalty);
  check_same([] { return Stack(6, 0.2, false); }, within);
  check_same([] { return Stack(); }, parts);
}

TEST_CASE("what fails in a pass is told, and leaves generators, buffers and autocast as they were") {
  reseed(2);
  Block block(0.5, true);
  block->to(device());
  struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (const int fails_at : {1, 2}) {
    int calls = 0;
    CheckpointEveryBlock::State state;
    state.attach(*block, device(), td::detail::list_buffers(*block));
    const auto failing = [&](const at::Tensor& x) {
      auto y = block->forward(x);
      if (++calls == fails_at) throw Failure("on purpose");
      return y.tanh();
    };
    auto x = at::randn({4, 6}, here()).set_requires_grad(true);
    at::Tensor y;
    const auto first = [&] { y = state(failing, x); };
    if (fails_at == 1) {
      CHECK_THROWS_AS(first(), Failure);
    } else {
      first();
      const td::precision::Autocast cast(device().type(), at::kBFloat16);
      const auto before = Trace{block->batch_norm->running_mean.clone(), block->batch_norm->num_batches_tracked.clone(),
                                at::rand({1}), at::rand({1}, here())};
      reseed(9);
      const auto random = Trace{at::rand({3}), at::rand({3}, here())};
      reseed(9);
      CHECK_THROWS_AS(y.sum().backward(), Failure);
      CHECK(difference(Trace{at::rand({3}), at::rand({3}, here())}, random) == "");
      CHECK(difference(Trace{block->batch_norm->running_mean, block->batch_norm->num_batches_tracked},
                       Trace{before[0], before[1]}) == "");
      CHECK(at::autocast::is_autocast_enabled(device().type()));
      CHECK(at::autocast::is_autocast_cache_enabled());
    }
    CHECK(td::detail::HookEngine::get().sources().empty());
    CHECK(!td::detail::is_recomputing());
    state(block, x).sum().backward();  // usable afterwards
  }
  // A block that catches whatever comes does not catch the end of a recompute.
  CheckpointEveryBlock::State state;
  state.attach(*block, device(), {});
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  const auto catching = [w](const at::Tensor& x) {
    auto y = x.matmul(w).tanh();
    try {
      y = y.matmul(w);
    } catch (...) {
      y = y * 0;
    }
    return y.sin().matmul(w);
  };
  const auto x = at::randn({4, 6}, here());
  catching(x).sum().backward();
  const auto want = w.grad().clone();
  w.mutable_grad().reset();
  state(catching, x).sum().backward();
  CHECK(same_bits(w.grad(), want));
  // Nor does one that makes an exception of its own of it, and one that may not throw at all runs to its end.
  const auto renaming = [w](const at::Tensor& y) {
    try {
      return y.matmul(w).tanh().matmul(w);
    } catch (...) {
      throw Failure("a block has failed");
    }
  };
  const auto never_throwing = [w](const at::Tensor& y) noexcept { return y.matmul(w).tanh().matmul(w); };
  w.mutable_grad().reset();
  renaming(x).sum().backward();
  const auto other = w.grad().clone();
  w.mutable_grad().reset();
  state(renaming, x).sum().backward();
  CHECK(same_bits(w.grad(), other));
  w.mutable_grad().reset();
  state(never_throwing, x).sum().backward();
  CHECK(same_bits(w.grad(), other));
}

TEST_CASE("a block that computes something else the second time is named") {
  reseed(2);
  Stack net(2, 0.0, false);
  net->to(device());
  CheckpointEveryBlock::State state;
  state.attach(*net, device(), {});
  const auto x = at::randn({4, 6}, here());
  int calls = 0;
  const auto& w = net->blocks[0]->fc->weight;
  const auto backward_of = [&](auto&& block) {
    calls = 0;
    const auto scope = state.pass(*net);
    auto y = state(net->blocks[1], x);
    y = state(block, y);
    y.sum().backward();
  };
  CHECK_SAYS(
      td::ConfigError, "checkpointing::CheckpointEveryBlock: block number 2 of the forward pass (",
      backward_of([&](const at::Tensor& y) { return (++calls == 2 ? y.slice(0, 0, 2) : y).matmul(w.t()).tanh(); }));
  CHECK_SAYS(td::ConfigError, "was Float[4, 12] on ", backward_of([&](const at::Tensor& y) {
               return y.matmul(w.t()).to(++calls == 2 ? at::kDouble : at::kFloat).tanh();
             }));
  CHECK_SAYS(td::ConfigError, "it saved 4 tensors and now 2", backward_of([&](const at::Tensor& y) {
               auto z = y.matmul(w.t());
               return ++calls == 2 ? z : z.tanh().sin();
             }));
  struct Changing : BlockImpl {
    using BlockImpl::BlockImpl;
    at::Tensor forward(const at::Tensor& y) { return BlockImpl::forward(++calls % 2 == 0 ? y.slice(0, 1) : y); }
    int calls = 0;
  };
  auto changing = std::make_shared<Changing>(0.0);
  changing->to(device());
  net->register_module("changing", changing);
  CheckpointEveryN::State by_name;
  by_name.attach(*net, device(), {});
  CHECK_SAYS(td::ConfigError, "checkpointing::CheckpointEveryN: block 'changing' computes something else",
             by_name(*changing, x).sum().backward());
}

TEST_CASE("in a row of blocks each must save its own tensors, as many as before") {
  reseed(2);
  const auto x = at::randn({4, 6}, here()).set_requires_grad(true);
  // Saves `first` tensors of one shape, and `again` the second time.
  const auto saving = [](int first, int again) {
    return [first, again, calls = std::make_shared<int>(0)](const at::Tensor& in) {
      const int times = (*calls)++ == 0 ? first : again;
      auto y = in;
      for (int i = 0; i < times; ++i) y = y.sin();
      return y;
    };
  };
  const auto run = [&](auto&& one, auto&& two) {
    Alone<CheckpointEveryN> state(CheckpointEveryN{.n = 2});
    const auto scope = state.pass();
    auto y = state(one, x);
    state(two, y).sum().backward();
  };
  run(saving(2, 2), saving(1, 1));
  // Five tensors of one shape both times: only their owners differ.
  CHECK_SAYS(td::ConfigError, "block number 1 of the forward pass (", run(saving(3, 2), saving(2, 3)));
  CHECK_SAYS(td::ConfigError, "it saved 3 tensors and now 2", run(saving(3, 2), saving(2, 3)));
  CHECK_SAYS(td::ConfigError, "block number 1 of the forward pass (", run(saving(2, 3), saving(3, 2)));
  CHECK_SAYS(td::ConfigError, "it saved 2 tensors and now more", run(saving(2, 3), saving(3, 2)));
  CHECK_SAYS(td::ConfigError, "block number 2 of the forward pass (", run(saving(2, 2), saving(3, 2)));
  CHECK_SAYS(td::ConfigError, "it saved 3 tensors and now 2", run(saving(2, 2), saving(3, 2)));
}

TEST_CASE("what plain autograd refuses because it was changed in place is refused") {
  reseed(2);
  Block block(0.0);
  block->to(device());
  Alone<CheckpointEveryBlock> state;
  const auto x = at::randn({4, 6}, here()).set_requires_grad(true);
  {
    auto y = state(block, x);
    block->proj->weight.detach().add_(1);
    CHECK_SAYS(td::ConfigError, "has had a weight changed in place", y.sum().backward());
    auto z = state([w = block->proj->weight](const at::Tensor& in) { return in.matmul(w).sin(); }, x);
    block->proj->weight.detach().add_(1);
    CHECK_SAYS(td::ConfigError, "needs changed in place", z.sum().backward());
  }
  {  // under autocast nothing that is saved shows it
    CheckpointEveryBlock::State attached;
    attached.attach(*block, device(), {});
    const auto scope = attached.pass(*block);
    const auto cast = [w = block->proj->weight](const at::Tensor& in) { return in.matmul(w.to(at::kBFloat16)).sin(); };
    auto y = attached(cast, x.to(at::kBFloat16));
    y.sum().backward({}, /*retain_graph=*/true);
    block->fc->weight.detach().add_(1);
    CHECK_SAYS(td::ConfigError, "is a function object, which may use any weight of the model", y.sum().backward());
  }
  CHECK_SAYS(td::ConfigError, "a function object was given to a state that belongs to no trainer",
             CheckpointEveryBlock::State()([](const at::Tensor& in) { return in; }, x));
  {
    auto in = x * 1;
    auto y = state(block, in);
    in.add_(1);
    CHECK_SAYS(td::ConfigError, "has had an input changed in place", y.sum().backward());
  }
  {
    auto y = state(
        [](const at::Tensor& in) {
          auto a = in.sin();
          auto b = a.exp();
          b.add_(1);
          return b.square().sin();
        },
        x);
    CHECK_SAYS(td::ConfigError, "needs changed in place", y.sum().backward());
  }
  struct Cache : torch::nn::Module {
    Cache() : cache(register_buffer("cache", at::zeros({1 << 19}, here()))) {}
    at::Tensor forward(const at::Tensor& in) {
      cache.add_(1);
      return in.sin() * cache[0];
    }
    at::Tensor cache;
  } cache;
  CHECK_SAYS(td::ConfigError, "writes a buffer of more than 1 MiB", state(cache, x));
}

namespace {
/// A norm, then projections that share its result, a GELU, and an in-place residual; regions all over.
struct MixerImpl : torch::nn::Module {
  MixerImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        batch_norm(register_module("batch_norm", torch::nn::BatchNorm1d(6))),
        a(register_module("a", torch::nn::Linear(6, 8))),
        b(register_module("b", torch::nn::Linear(6, 8))),
        c(register_module("c", torch::nn::Linear(8, 6))) {}
  at::Tensor forward(const at::Tensor& x, auto& step) {
    auto y = step.cheap("norm", norm, x);
    y = step.cheap("norm", batch_norm, y);  // of a region's result
    auto u = step.cheap("up", a, y);        // which others save too
    u.add_(0.25);                           // in place before it is saved: from here on it is not the region's result
    auto v = b(y.view({2, 2, 6})).view({4, 8});  // through a view
    auto [g, s] = step.cheap(
        "gelu",
        [](const at::Tensor& p, const at::Tensor& q) {
          return std::pair{at::dropout(at::gelu(p), 0.3, true), at::silu(q)};
        },
        u, v);
    auto w = c(g * s) * s.slice(1, 2, 8) + step.cheap(
                                               "view", [](const at::Tensor& p) { return p.slice(1, 0, 6); }, s);
    w = w + x;
    return step
        .cheap(
            "cast", [](const at::Tensor& p) { return p.to(at::kDouble); }, w)
        .sin()
        .to(at::kFloat);
  }
  torch::nn::LayerNorm norm;
  torch::nn::BatchNorm1d batch_norm;
  torch::nn::Linear a, b, c;
};
TORCH_MODULE(Mixer);
}  // namespace

TEST_CASE("marked regions are bitwise the plain run, wherever their results are saved") {
  const auto run = [](auto policy, bool input, auto&& body) {
    reseed(3);
    Mixer model;
    model->to(device());
    return trace(policy, model, input, body);
  };
  const CheckpointSelective standard;
  const CheckpointSelective everything{.regions = {"*"}};
  const CheckpointSelective one{.regions = {"g?lu", "nothing"}};
  const auto check = [&](auto&& body) {
    for (const bool input : {true, false}) {
      const auto plain = run(NoCheckpointing{}, input, body);
      CHECK(difference(run(standard, input, body), plain) == "");
      CHECK(difference(run(everything, input, body), plain) == "");
      CHECK(difference(run(one, input, body), plain) == "");
    }
  };
  const auto once = [](MixerImpl& model, auto& step, const at::Tensor& x) {
    return model.forward(model.forward(x, step), step).square().sum();
  };
  check(once);
  check([&](MixerImpl& model, auto& step, const at::Tensor& x) {
    auto loss = once(model, step, x);
    loss.backward({}, /*retain_graph=*/true);
    return loss * 2;
  });
  check([&](MixerImpl& model, auto& step, const at::Tensor& x) {  // second derivatives
    auto y = x * 1;
    if (!y.requires_grad()) y.set_requires_grad(true);
    auto out = model.forward(y, step);
    return torch::autograd::grad({out.square().sum()}, {y}, {}, true, true)[0].square().sum();
  });
  check([&](MixerImpl& model, auto& step, const at::Tensor& x) {  // in mixed precision, weights cast in regions
    const td::precision::Autocast cast(device().type(), at::kBFloat16);
    auto y = step.cheap("norm", model.norm, x);
    const auto w = step.cheap(
        "cast", [](const at::Tensor& p) { return p.to(at::kBFloat16); }, model.a->weight);
    y = step.cheap(
        "gelu", [](const at::Tensor& p) { return at::gelu(p); }, at::linear(y, w));
    return model.c(y).to(at::kFloat).square().sum();
  });
  check([&](MixerImpl& model, auto& step, const at::Tensor& x) {  // within blocks, regions within regions
    auto block = [&model, &step](const at::Tensor& p) {
      return step.cheap(
          "norm",
          [&model, &step](const at::Tensor& q) {
            return step
                .cheap(
                    "gelu", [](const at::Tensor& r) { return at::gelu(r); }, model.norm(q))
                .sin();
          },
          p);
    };
    auto loss = step(block, step(block, x)).square().sum();
    if (loss.requires_grad()) loss.backward({}, /*retain_graph=*/true);  // while `block` lives
    return loss.detach();
  });
}

TEST_CASE("what a region has produced is gone between the passes, and comes back once") {
  reseed(1);
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  const auto weak = [](const at::Tensor& t) { return Weak(t.storage().getWeakStorageImpl()); };
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  int calls = 0;
  const auto run = [&](auto policy) {
    Alone<decltype(policy)> state(policy);
    calls = 0;
    at::Tensor loss;
    std::vector<Weak> produced;
    {
      [[maybe_unused]] const auto scope = state.pass();
      auto y = at::randn({3, 6}, here()).matmul(w);
      auto z = state.cheap(
          "gelu",
          [&calls](const at::Tensor& p) {
            ++calls;
            return at::gelu(p);
          },
          y);
      produced.push_back(weak(z));
      loss = z.matmul(w).sum() + z.view({6, 3}).square().sum();
    }
    const bool gone = produced[0].expired();
    loss.backward();
    return gone;
  };
  CHECK(!run(NoCheckpointing{}));
  CHECK(run(CheckpointSelective{}));
  CHECK(calls == 2);
  CHECK(!run(CheckpointSelective{.regions = {"other"}}));
  {  // A region that saves nothing itself, and whose result and input nobody saves: both are gone at once.
    Alone<CheckpointSelective> state;
    const auto scope = state.pass();
    std::vector<Weak> gone;
    for (int i = 0; i < 3; ++i) {
      auto y = at::randn({3, 6}, here()).matmul(w);
      gone.push_back(weak(y));
      auto z = state.cheap(
          "cast", [](const at::Tensor& p) { return p.to(at::kDouble); }, y);
      gone.push_back(weak(z));
      z.sum();
    }
    CHECK(gone[0].expired());
    CHECK(gone[1].expired());
    CHECK(gone[2].expired());
  }
  CHECK_SAYS(td::ConfigError, "checkpointing::CheckpointSelective: regions is empty",
             CheckpointSelective{.regions = {}}.check());
  // Changed in place after it was saved: plain autograd refuses that as well.
  Alone<CheckpointSelective> state;
  at::Tensor loss;
  {
    const auto scope = state.pass();
    auto y = at::randn({3, 6}, here()).matmul(w);
    auto z = y.sigmoid();
    loss = state
               .cheap(
                   "gelu", [](const at::Tensor& p) { return at::gelu(p); }, z)
               .sum();
    z.detach().mul_(2);
  }
  CHECK_SAYS(td::ConfigError, "changed in place", loss.backward());
  {
    const auto scope = state.pass();
    auto z = at::randn({3, 6}, here()).matmul(w).sigmoid();
    loss = z.sum();
    z.detach().mul_(2);
  }
  CHECK_SAYS(td::ConfigError, "changed in place", loss.backward());
  int shape = 0;
  {
    const auto scope = state.pass();
    auto z = state.cheap(
        "norm",
        [&shape](const at::Tensor& p) {
          return p.repeat({1, ++shape});
        },
        w * 1);
    loss = z.square().sum();
  }
  CHECK_SAYS(td::ConfigError, "checkpointing::CheckpointSelective: region 'norm' gives something else",
             loss.backward());
}

TEST_CASE("a dropped graph frees everything") {
  reseed(2);
  struct Token {
    std::shared_ptr<int> alive = std::make_shared<int>(0);
  } token;
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  for (const std::int64_t n : {1, 3}) {
    Alone<CheckpointEveryN> state(CheckpointEveryN{.n = n});
    c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> input{at::Tensor().getIntrusivePtr()};
    for (int i = 0; i < 100; ++i) {
      at::Tensor y = at::randn({4, 6}, here());
      input = y.getIntrusivePtr();
      for (int k = 0; k < 4; ++k) {
        if (k > 0) y = y.cos();  // between blocks of one segment: an input that comes from the segment itself
        y = state(
            [token, w, &state](const at::Tensor& in) {
              return state([token, w](const at::Tensor& z) { return z.matmul(w).tanh(); }, in).sin();
            },
            y);
      }
      CHECK(token.alive.use_count() > 4);
      if (i % 2 == 0) y.sum().backward({}, /*retain_graph=*/i % 4 == 0);
      y.reset();
      CHECK(token.alive.use_count() == 1);
      CHECK(input.expired());
    }
  }
}

TEST_CASE("a function object may hold what its own row of blocks has computed") {
  reseed(2);
  const auto w = at::randn({6, 6}, here()).set_requires_grad(true);
  const auto x = at::randn({4, 6}, here());
  const auto token = std::make_shared<int>(0);
  const auto loss_of = [&](auto& step) {
    const auto a = step([w, token](const at::Tensor& in) { return in.matmul(w).tanh(); }, x);
    const auto b = a.cos();
    const auto c = step([w, a, b, token](const at::Tensor& in) { return in.matmul(w).sigmoid() * a + b; }, a);
    return step([w, c, all = std::vector{a, b}](const at::Tensor& in) { return (in * c + all[0]).sin(); }, c).sum();
  };
  const auto plain = [](auto&& block, const at::Tensor& in) { return block(in); };
  loss_of(plain).backward();
  const auto want = w.grad().clone();
  CHECK(token.use_count() == 1);
  for (const std::int64_t n : {1, 2, 100}) {
    CAPTURE(n);
    Alone<CheckpointEveryN> state(CheckpointEveryN{.n = n});
    for (const bool backward : {true, false, true}) {
      w.mutable_grad().reset();
      auto loss = loss_of(state);
      CHECK(token.use_count() > 1);
      if (backward) loss.backward({}, /*retain_graph=*/true);
      if (backward) CHECK(same_bits(w.grad(), want));
      loss.reset();
      CHECK(token.use_count() == 1);
    }
  }
}

TEST_CASE("copies of buffers that never change are shared") {
  td::detail::SharedCopies copies;
  auto mask = at::ones({4, 4});
  const auto first = copies.of(mask);
  CHECK(copies.of(mask).is_same(first));
  mask.mul_(2);
  const auto second = copies.of(mask);
  CHECK(!second.is_same(first));
  CHECK(second[0][0].item<float>() == 2);
  CHECK(first[0][0].item<float>() == 1);
  mask.set_data(at::zeros({4, 4}));
  CHECK(copies.of(mask)[0][0].item<float>() == 0);
  CHECK(td::detail::writes_show(mask));
  CHECK(td::detail::writes_show(at::ones({4}, at::kLong)));
  CHECK(!td::detail::writes_show(at::ones({4})));  // a batch norm's
}

TEST_CASE("a foreign engine is refused, never replaced") {
  struct Foreign : torch::autograd::Engine {
    static torch::autograd::Engine& get() {
      static auto* engine = new Foreign;
      return *engine;
    }
  };
  static auto* ours = &td::detail::HookEngine::get();
  Alone<CheckpointEveryBlock> state;
  const auto x = at::randn({2}).set_requires_grad(true);
  const auto block = [](const at::Tensor& y) { return y.sin(); };
  auto y = state(block, x);
  torch::autograd::set_default_engine_stub(&Foreign::get);
  const auto back = [] {
    torch::autograd::set_default_engine_stub([]() -> torch::autograd::Engine& { return *ours; });
  };
  CHECK_SAYS(td::ConfigError, "has installed an autograd engine of its own", state(block, x));
  CHECK(&torch::autograd::Engine::get_default_engine() == &Foreign::get());
  back();
  state(block, y).sum().backward();
  CHECK(same_bits(x.grad(), (x.cos() * x.sin().cos()).detach()));
}

TEST_CASE("the contract is kept") {
  std::vector<at::Device> devices{at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA, 0);
  for (const auto where : devices) {
    for (const auto& sentence : td::testing::check_checkpointing_contract(CheckpointEveryBlock{}, where))
      FAIL_CHECK(sentence);
    for (const auto& sentence : td::testing::check_checkpointing_contract(CheckpointEveryN{.n = 2}, where))
      FAIL_CHECK(sentence);
    for (const auto& sentence : td::testing::check_checkpointing_contract(CheckpointSelective{.regions = {"*"}}, where))
      FAIL_CHECK(sentence);
  }
  CHECK_SAYS(td::ConfigError, "checkpointing::CheckpointEveryN: n is -1", CheckpointEveryN{.n = -1}.check());
}
