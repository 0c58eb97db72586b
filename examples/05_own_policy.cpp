// SPDX-License-Identifier: Apache-2.0
// A policy of one's own: it names its axis, states its facts, and is checked against the axis's contract.
// treadle-example: TIMEOUT 120 PASS contract kept.*SoftClip\(0\.5\): loss 0\.[0-4]
#include <treadle/clipping/norm.hpp>
#include <treadle/compare/describe.hpp>
#include <treadle/testing/clipping.hpp>
#include <treadle/treadle.hpp>

#include <torch/torch.h>

namespace td = treadle;

/// Divides the gradient by 1 + norm / limit: long ones come out at about `limit`, short ones nearly as they are.
struct SoftClip {
  using policy_axis = td::axis::Clipping;
  static constexpr bool measures_norm = true;
  static constexpr bool rewrites = false;  // the factor joins the one scalar that the rule divides by

  double limit = 1.0;

  void check() const {
    if (!(limit > 0)) throw td::ConfigError("SoftClip: limit must be positive, such as 1.0.");
  }

  class State {
   public:
    State(const SoftClip& policy, at::Device device) : limit_(policy.limit), device_(device) {}
    void measure(at::TensorList gradients) { raw_norm_ = td::clipping::global_norm(gradients, device_); }
    at::TensorList measured() const { return raw_norm_; }
    const at::Tensor* clip(at::TensorList, const at::Tensor* divisor) {
      norm_ = divisor ? raw_norm_ / *divisor : raw_norm_;  // of the true gradient; everything stays on the device
      divisor_ = (1 + norm_ / limit_).to(at::kFloat);
      if (divisor) divisor_.mul_(*divisor);
      return &divisor_;
    }
    const at::Tensor& norm() const { return norm_; }

   private:
    double limit_;
    at::Device device_;
    at::Tensor raw_norm_, norm_, divisor_;
  };
};
static_assert(td::clipping_policy<SoftClip>);  // what the compiler can check

struct SquaredError {
  auto operator()(auto& net, const td::Batch& batch) const {
    return torch::mse_loss(net.forward(batch.data), batch.target);
  }
};

int main() {
  torch::manual_seed(1);
  for (const auto& sentence : td::testing::check_clipping_contract(SoftClip{.limit = 0.5})) {  // what it cannot
    td::warn(sentence);
    return 1;
  }
  td::say("contract kept");

  const auto x = torch::randn({64, 8});
  const td::Batch batch{x, x.sum(1, /*keepdim=*/true)};
  const auto policies = td::policies(SoftClip{.limit = 0.5}, td::accumulation::SplitBatch{.micro_batches = 2});
  td::Trainer trainer{torch::nn::Linear(8, 1), SquaredError{}, td::optim::Sgd{.learning_rate = 0.1}, policies};
  td::StepResult last;
  for (int i = 0; i < 200; ++i) last = *trainer.accumulate(batch);
  td::say(td::describe(td::policies(SoftClip{.limit = 0.5})) + ": loss " + std::to_string(last.loss.item<double>()) +
          ", gradient norm " + std::to_string(last.grad_norm.item<double>()));
}
