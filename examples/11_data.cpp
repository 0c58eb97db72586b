// SPDX-License-Identifier: Apache-2.0
// A data set of one's own: pictures of 3 shapes that are drawn when they are asked for, on worker threads, those to
// train on flipped at random, otherwise in each epoch; trained on, and gone on with from the middle of an epoch.
// treadle-example: TIMEOUT 120 PASS test accuracy: (1|0\.[89])
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>

#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/transforms.hpp>
#include <treadle/treadle.hpp>

namespace td = treadle;

/// A disk, a square or a cross somewhere in 16x16 pixels, with noise: picture i of a seed is always the same.
struct Shapes {
  std::int64_t count = 0;
  std::uint64_t seed = 0;
  std::int64_t size() const { return count; }
  td::data::Example get(std::int64_t i) const {
    td::data::KeyedGenerator random(seed, static_cast<std::uint64_t>(i));
    const std::int64_t shape = i % 3;
    auto picture = torch::empty({1, 16, 16});
    auto* pixel = picture.data_ptr<float>();
    const double top = random.uniform(5, 10);
    const double left = random.uniform(5, 10);
    for (int y = 0; y < 16; ++y)
      for (int x = 0; x < 16; ++x, ++pixel) {
        const double dy = std::abs(y - top);
        const double dx = std::abs(x - left);
        const bool inside = shape == 0   ? dy * dy + dx * dx < 16
                            : shape == 1 ? std::max(dy, dx) < 3.5
                                         : std::min(dy, dx) < 1 && std::max(dy, dx) < 4.5;
        *pixel = static_cast<float>(inside + 0.2 * random.normal());
      }
    return {picture, shape};
  }
};

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential layers =
      register_module("layers", torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 12, 3).padding(1)),
                                                      torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                                                      torch::nn::Conv2d(torch::nn::Conv2dOptions(12, 24, 3).padding(1)),
                                                      torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                                                      torch::nn::Linear(24 * 4 * 4, 3)));
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
};
TORCH_MODULE(Net);

struct Classify {
  auto operator()(NetImpl& net, const td::Batch& batch, auto& step) const {
    auto logits = net.forward(batch.data);
    step.record("accuracy", td::correct(logits, batch.target), batch.target.numel());
    return td::mean_loss(logits, batch.target);
  }
};

int main() {
  torch::manual_seed(1);
  const auto pictures = td::data::map(Shapes{3000, /*seed=*/7}, td::data::RandomFlip{});
  const td::data::LoaderOptions options{.batch_size = 50, .shuffle = true, .seed = 7, .workers = 2};
  td::data::Loader train{pictures, options};
  td::data::Loader test{Shapes{600, /*seed=*/8}, {.batch_size = 100, .workers = 2}};
  td::Trainer trainer{Net(), Classify{}, td::optim::AdamW{.learning_rate = 3e-3}};
  const auto result = trainer.fit(train, test, {.epochs = 3});
  td::say("test accuracy: " + std::to_string(result.test()["accuracy"]));

  // A position is two integers. Another loader, in another process say, goes on from there with the same batch.
  td::data::Position here;
  torch::Tensor next;
  for (const auto& batch : train) {
    if (here.batch == 4) next = batch.data;
    if (here.batch == 4) break;
    here = train.position();
  }
  td::data::Loader again{pictures, options};
  again.seek(here);
  const bool same = torch::equal(again.begin()->data, next);
  td::say(std::string("the batch after batch 3 is the same after a restart: ") + (same ? "yes" : "no"));
  return same ? 0 : 1;
}
