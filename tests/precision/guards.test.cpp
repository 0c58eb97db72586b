// SPDX-License-Identifier: Apache-2.0
// Guards around the forward pass: they hold what they say and leave what they found, also after a throw.
#include <array>
#include <stdexcept>
#include <type_traits>

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

namespace {

/// An autocast region as programs write it around their training, with or without LibTorch's count of nested ones.
struct Region {
  explicit Region(bool nests) : nests(nests), before(flags()) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    if (nests) at::autocast::increment_nesting();
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
    if (nests) at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before.enabled);
    at::autocast::set_autocast_dtype(at::kCPU, before.dtype);
  }
  bool nests;
  Flags before;
};

/// Its weights are used as they are, so that autocast keeps what it has cast; torch::nn::Linear casts a view anew.
struct DirectNetImpl : torch::nn::Module {
  DirectNetImpl()
      : first(register_parameter("first", at::randn({8, 6}))), last(register_parameter("last", at::randn({5, 8}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(at::tanh(at::linear(x, first)), last); }
  at::Tensor first;
  at::Tensor last;
};
TORCH_MODULE(DirectNet);

/// Weights after four steps, what the last one reported, and an evaluation.
template <class Net, class Precision>
treadle_test::State trained(const Precision& precision) {
  using namespace treadle_test;
  auto net = make<Net>();
  td::Trainer trainer{
      net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 0.1},
      td::policies(precision, td::clipping::ClipNorm{.max_norm = 0.5}, td::accumulation::AccumulateOver{.batches = 2})};
  State all;
  for (const auto& batch : make_batches({8, 8, 8, 8, 8, 8, 8, 8}))
    if (auto done = trainer.accumulate(batch)) all["loss"] = done->loss.clone();
  for (auto& [name, value] : everything(trainer)) all[name] = value;
  all["evaluated"] = at::full({}, trainer.evaluate(make_batches({8}))["loss"], at::kDouble);
  return all;
}

}  // namespace

TEST_CASE_TEMPLATE("no cast from one side of a guard is used on the other", Nests, std::true_type, std::false_type) {
  auto weight = at::ones({2, 2}).requires_grad_();
  const auto x = at::ones({2, 2});
  const auto first = [&] { return at::mm(x, weight)[0][0]; };
  const Region region(Nests::value);
  CHECK(first().template item<float>() == 2);
  weight.detach().fill_(3);
  {
    const Autocast cast(at::kCPU, at::kHalf);
    CHECK((first().scalar_type() == at::kHalf));
    CHECK(first().template item<float>() == 6);
  }
  CHECK((first().scalar_type() == at::kBFloat16));
  CHECK(first().template item<float>() == 6);
}

TEST_CASE_TEMPLATE("a trainer in the caller's autocast region computes as it does outside", Precision,
                   td::precision::Fp32, td::precision::Tf32, td::precision::Bf16, td::precision::Fp16,
                   td::precision::Bf16Weights) {
  if (treadle_test::device().is_cuda()) return;  // the region below is the CPU's
  const auto normed = trained<treadle_test::TinyNet>(Precision{});
  const auto direct = trained<DirectNet>(Precision{});
  for (const bool nests : {false, true}) {
    CAPTURE(nests);
    const Region region(nests);
    const auto found = flags();
    CHECK(treadle_test::difference(trained<treadle_test::TinyNet>(Precision{}), normed) == "");
    CHECK(treadle_test::difference(trained<DirectNet>(Precision{}), direct) == "");
    CHECK(flags() == found);
    CHECK((product() == at::kBFloat16));
  }
}

TEST_CASE("the caller's region sees the weights that a step has written") {
  using namespace treadle_test;
  auto net = make<DirectNet>();
  net->to(at::kCPU);
  td::Trainer trainer{net, CrossEntropy{}, td::optim::Sgd{.learning_rate = 1.0},
                      td::policies(td::parallelism::SingleDevice{.device = at::Device(at::kCPU)})};
  const auto x = at::randn({4, 6});
  const auto fresh = [&] {
    const Region region(true);
    return net->forward(x).detach();
  };
  const Region region(true);
  const auto before = net->forward(x).detach();
  trainer.accumulate(td::Batch{x, at::zeros({4}, at::kLong)});
  const auto after = net->forward(x).detach();
  CHECK_FALSE(same_bits(after, before));
  CHECK(same_bits(after, fresh()));
}
