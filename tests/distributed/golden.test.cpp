// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed PYTHON TIMEOUT 600
// Two Gloo ranks against PyTorch's DistributedDataParallel on two Gloo ranks: golden/ddp.py has the cases.
#include <treadle/parallelism/distributed_data_parallel.hpp>

#include <torch/torch.h>
#include <unistd.h>
#include <treadle/treadle.hpp>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/doctest.hpp"
#include "support/ranks.hpp"

namespace td = treadle;

namespace {

constexpr int steps = 8;

struct Mlp : torch::nn::Module {
  Mlp() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first{12, 16};
  torch::nn::Linear second{16, 5};
};
struct Convolutional : torch::nn::Module {
  Convolutional() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(norm(conv(x))).flatten(1)); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3).bias(false)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4 * 4 * 4, 5};
};
struct CrossEntropy {
  template <class Net>
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};

/// What ddp.py wrote, by name.
class Reference {
 public:
  explicit Reference(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (const auto& item : torch::pickle_load(bytes).toGenericDict())
      tensors_.emplace(item.key().toStringRef(), item.value().toTensor());
  }
  const at::Tensor& operator()(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::runtime_error("ddp.py wrote no '" + name + "'");
    return found->second;
  }

 private:
  std::map<std::string, at::Tensor> tensors_;
};

/// `tolerance`: relative and absolute; 0 asks for equal bits.
void check_close(const std::string& what, const at::Tensor& ours, const at::Tensor& theirs, double tolerance) {
  const auto here = ours.detach();
  if (tolerance == 0 ? at::equal(here, theirs) : at::allclose(here, theirs, tolerance, tolerance)) return;
  FAIL_CHECK(what << " is off by " << (here - theirs).abs().max().item<double>() << ", allowed: " << tolerance);
}

template <class Net, class Accumulation>
void check_case(const Reference& reference, const td::World& world, const std::string& name, Accumulation accumulation,
                int window, double tolerance) {
  auto net = std::make_shared<Net>();
  const std::string own = name + "/" + std::to_string(world.rank) + "/";
  if (world.rank == 0) {  // the others get them from it
    const torch::NoGradGuard no_grad;
    for (auto& item : net->named_parameters()) item.value().copy_(reference(name + "/init/" + item.key()));
    for (auto& item : net->named_buffers()) item.value().copy_(reference(name + "/init/" + item.key()));
  }
  td::Trainer trainer{
      net, CrossEntropy{}, td::optim::AdamW{.learning_rate = 1e-2, .weight_decay = 0.05},
      td::policies(td::parallelism::DistributedDataParallel<>{.device = at::Device(at::kCPU)}, accumulation)};
  for (int step = 0; step < steps; ++step) {
    std::optional<td::StepResult> done;
    for (int k = step * window; k < (step + 1) * window; ++k) {
      REQUIRE(!done);
      done = trainer.accumulate(
          td::Batch{reference(own + "x/" + std::to_string(k)), reference(own + "y/" + std::to_string(k))});
    }
    REQUIRE(done);
    const std::string at = std::to_string(step) + "/";
    check_close(own + at + "loss", done->loss, reference(own + at + "loss"), tolerance);
    for (const auto& item : net->named_parameters()) {
      const std::string key = name + "/" + at + "param/" + item.key();
      check_close(key, item.value(), reference(key), tolerance);
    }
    for (const auto& item : net->named_buffers()) {
      const std::string key = own + at + "buffer/" + item.key();
      check_close(key, item.value(), reference(key), tolerance);
    }
  }
}

std::string reference_path() {
  const char* const path = std::getenv("TREADLE_TEST_REFERENCE");
  return path == nullptr ? "" : path;
}

// PyTorch divides each loss by 3, Treadle the sum of the gradients: the only difference that is allowed. Measured over
// the 8 steps: 2.4e-7 in losses between 1 and 2, 6e-8 in weights.
constexpr double thirds = 3e-7;

const treadle_test::Role as_pytorch("as PyTorch", [](const td::World& world) {
  at::set_num_threads(1);  // as ddp.py does
  const Reference reference(reference_path());
  const td::accumulation::NoAccumulation each;
  const td::accumulation::AccumulateOver three{.batches = 3};
  check_case<Mlp>(reference, world, "mlp", each, 1, 0);
  check_case<Mlp>(reference, world, "mlp_window", three, 3, thirds);
  check_case<Convolutional>(reference, world, "cnn", each, 1, 0);
  check_case<Convolutional>(reference, world, "cnn_window", three, 3, thirds);
});

}  // namespace

TEST_CASE("two ranks train as PyTorch's DistributedDataParallel does") {
  const char* const python = std::getenv("TREADLE_PYTHON");
  if (python == nullptr) throw std::runtime_error("TREADLE_PYTHON is not set: run this program through ctest");
  const char* const temporary = std::getenv("TMPDIR");
  const std::string path =
      std::string(temporary ? temporary : "/tmp") + "/treadle-golden-ddp-" + std::to_string(::getpid());
  const std::string command =
      "'" + std::string(python) + "' -W ignore '" TREADLE_TEST_SOURCE_DIR "/golden/ddp.py' --out '" + path + "'";
  const int status = std::system(command.c_str());
  int code = -1;
  if (status == 0) {
    ::setenv("TREADLE_TEST_REFERENCE", path.c_str(), 1);
    code = treadle_test::run_ranks(2, "as PyTorch");
  }
  ::unlink(path.c_str());
  INFO(command);
  REQUIRE(status == 0);
  CHECK(code == 0);
}
