// SPDX-License-Identifier: Apache-2.0
// Guards around the forward pass: they hold what they say and leave what they found, also after a throw.
#include <array>
#include <stdexcept>

#include "support/tiny.hpp"
#include "treadle/precision/autocast.hpp"
#include "treadle/runtime/math_flags.hpp"

namespace {
namespace td = treadle;
using td::precision::Autocast;

struct Flags {
  bool enabled;
  at::ScalarType dtype;
  bool cache;
  int nesting;
  bool operator==(const Flags&) const = default;
};
Flags flags() {
  const int inside = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return {at::autocast::is_autocast_enabled(at::kCPU), at::autocast::get_autocast_dtype(at::kCPU),
          at::autocast::is_autocast_cache_enabled(), inside - 1};
}
at::ScalarType product() {
  const auto x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

struct Tf32 {
  bool matmul;
  bool cudnn;
  bool operator==(const Tf32&) const = default;
};
Tf32 tf32() {
  return {at::globalContext().allowTF32CuBLAS(), at::globalContext().allowTF32CuDNN()};
}
void set_tf32(Tf32 wanted) {
  at::globalContext().setAllowTF32CuBLAS(wanted.matmul);
  at::globalContext().setAllowTF32CuDNN(wanted.cudnn);
}
}  // namespace

TEST_CASE("autocast casts while it lives and not after") {
  const auto before = flags();
  CHECK((product() == at::kFloat));
  {
    const Autocast cast(at::kCPU, at::kBFloat16);
    CHECK((product() == at::kBFloat16));
    CHECK(flags().nesting == before.nesting + 1);
  }
  CHECK((product() == at::kFloat));
  CHECK(flags() == before);
}

TEST_CASE("autocast nests, each with its own dtype and cache flag") {
  const auto before = flags();
  {
    const Autocast outer(at::kCPU, at::kBFloat16);
    const auto between = flags();
    {
      const Autocast inner(at::kCPU, at::kHalf, /*cache=*/false);
      CHECK((product() == at::kHalf));
      CHECK_FALSE(flags().cache);
    }
    CHECK(flags() == between);
    CHECK((product() == at::kBFloat16));
  }
  CHECK(flags() == before);
}

TEST_CASE("autocast leaves what a program had set itself") {
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(false);
  const auto before = flags();
  { const Autocast cast(at::kCPU, at::kBFloat16); }
  CHECK(flags() == before);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_cache_enabled(true);
}

TEST_CASE("autocast ends with an exception") {
  const auto before = flags();
  CHECK_THROWS_AS(
      [] {
        const Autocast outer(at::kCPU, at::kBFloat16);
        const Autocast inner(at::kCPU, at::kHalf);
        throw std::runtime_error("inside");
      }(),
      std::runtime_error);
  CHECK(flags() == before);
}

TEST_CASE("no cast of a weight outlives the outermost guard") {
  auto weight = at::ones({2, 2}).requires_grad_();
  const auto x = at::ones({2, 2});
  const auto compute = [&] {
    const Autocast cast(at::kCPU, at::kBFloat16);
    return at::mm(x, weight)[0][0].item<float>();
  };
  CHECK(compute() == 2);
  weight.detach().fill_(3);  // as a rule does: in place
  CHECK(compute() == 6);
}

TEST_CASE("the TF32 switches are held either way and put back") {
  const auto found = tf32();
  for (const Tf32 before : {Tf32{false, false}, Tf32{false, true}, Tf32{true, false}, Tf32{true, true}})
    for (const bool wanted : {false, true}) {
      set_tf32(before);
      {
        const td::MathFlags held(wanted);
        CHECK(tf32() == Tf32{wanted, wanted});
        {
          const td::MathFlags inner(!wanted);
          CHECK(tf32() == Tf32{!wanted, !wanted});
        }
        CHECK(tf32() == Tf32{wanted, wanted});
      }
      CHECK(tf32() == before);
      CHECK_THROWS_AS(([&] {
                        const td::MathFlags held(wanted);
                        throw std::runtime_error("inside");
                      }()),
                      std::runtime_error);
      CHECK(tf32() == before);
    }
  set_tf32(found);
}

TEST_CASE("a program that uses LibTorch's new switches gets them back") {
  auto& context = at::globalContext();
  using at::Float32Backend, at::Float32Op, at::Float32Precision;
  const auto read = [&] {
    return std::array{context.float32Precision(Float32Backend::CUDA, Float32Op::MATMUL),
                      context.float32Precision(Float32Backend::CUDA, Float32Op::CONV),
                      context.float32Precision(Float32Backend::CUDA, Float32Op::RNN)};
  };
  const auto legacy = tf32();
  for (const auto matmul : {Float32Precision::IEEE, Float32Precision::TF32})
    for (const auto conv : {Float32Precision::IEEE, Float32Precision::TF32}) {
      context.setFloat32Precision(Float32Backend::CUDA, Float32Op::MATMUL, matmul);
      context.setFloat32Precision(Float32Backend::CUDA, Float32Op::CONV, conv);
      context.setFloat32Precision(Float32Backend::CUDA, Float32Op::RNN, conv);
      const auto before = read();
      for (const bool wanted : {false, true}) {
        {
          const td::MathFlags held(wanted);
          for (const auto now : read()) CHECK((now == Float32Precision::TF32) == wanted);
        }
        CHECK(read() == before);
      }
    }
  set_tf32(legacy);  // the old setters bring old and new switches together again
}

TEST_CASE("two trainers with other precisions alternate and leave no switch behind") {
  using namespace treadle_test;
  const auto before = tf32();
  struct Sees {
    Tf32* seen;
    td::Loss operator()(PlainNetImpl& net, const td::Batch& batch) const {
      *seen = tf32();
      return td::mean_loss(net.forward(batch.data), batch.target);
    }
  };
  Tf32 in_fp32{}, in_tf32{};
  auto a = make<PlainNet>();
  auto b = make<PlainNet>();
  td::Trainer exact{a, Sees{&in_fp32}, td::optim::Sgd{}};
  td::Trainer fast{b, Sees{&in_tf32}, td::optim::Sgd{}, td::policies(td::precision::Tf32{})};
  for (int i = 0; i < 2; ++i) {
    exact.accumulate(make_batch(4, 1));
    fast.accumulate(make_batch(4, 1));
    CHECK(in_fp32 == Tf32{false, false});
    CHECK(in_tf32 == Tf32{true, true});
    CHECK(tf32() == before);
  }
  exact.evaluate(make_batches({4}));
  CHECK(in_fp32 == Tf32{false, false});
  CHECK(tf32() == before);
}
