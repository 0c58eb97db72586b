// SPDX-License-Identifier: Apache-2.0
// treadle-twin: TIMEOUT 120 TOLERANCE 2 NUMBERS loss
// The twin of ../03_own_loop.cpp in LibTorch alone: the same model, data and windows, and the same numbers.
#include <torch/torch.h>

struct Ratings {
  at::Tensor user, item, stars;
};

struct FactorsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& user, const at::Tensor& item) { return (users(user) * items(item)).sum(1); }
  torch::nn::Embedding users = register_module("users", torch::nn::Embedding(100, 8));
  torch::nn::Embedding items = register_module("items", torch::nn::Embedding(80, 8));
};
TORCH_MODULE(Factors);

std::vector<Ratings> make_batches() {
  const auto user = torch::randint(100, {5000}), item = torch::randint(80, {5000});
  const auto stars = (torch::randn({100, 3}).index({user}) * torch::randn({80, 3}).index({item})).sum(1);
  std::vector<Ratings> batches;
  for (std::int64_t i = 0; i < 5000; i += 64)
    batches.push_back({user.slice(0, i, i + 64), item.slice(0, i, i + 64), stars.slice(0, i, i + 64)});
  return batches;
}

int main() {
  const at::Device device = torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  torch::manual_seed(1);
  const auto batches = make_batches();
  Factors net;
  net->to(device);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
  for (int epoch = 1; epoch <= 5; ++epoch) {
    at::Tensor sum = torch::zeros({}, device);
    std::int64_t count = 0;
    int steps = 0;
    std::int64_t window = 0, rows = 0;
    const auto step = [&] {
      // How much the window holds is known only now: the division comes after the sums, in a pass of its own.
      for (auto& parameter : net->parameters()) parameter.mutable_grad() /= static_cast<double>(rows);
      optimizer.step();
      optimizer.zero_grad();
      count += rows;
      ++steps;
      window = rows = 0;
    };
    for (const auto& batch : batches) {
      const auto stars = batch.stars.to(device);
      auto loss = (net->forward(batch.user.to(device), batch.item.to(device)) - stars).square().sum();
      loss.backward();
      sum += loss.detach();
      rows += stars.numel();
      if (++window == 4) step();
    }
    if (window > 0) step();
    std::printf("epoch %d: %d steps, loss %.4f\n", epoch, steps, sum.item<double>() / static_cast<double>(count));
  }
}
