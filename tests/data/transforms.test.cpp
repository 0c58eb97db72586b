// SPDX-License-Identifier: Apache-2.0
// Functions of samples and batches: what they do against plain LibTorch, that workers do not matter, and that one image
// and a batch of them are the same.
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/stream_loader.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/data/transforms.hpp>
#include <treadle/data/transforms_blend.hpp>

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <numbers>
#include <optional>
#include <ranges>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/doctest.hpp"
#include "support/throws.hpp"

namespace td = treadle;
using td::data::KeyedGenerator;

namespace {

at::Tensor images(std::int64_t count, std::int64_t channels = 3, std::int64_t height = 10, std::int64_t width = 8) {
  auto generator = at::detail::createCPUGenerator(4);
  return at::randint(0, 256, {count, channels, height, width}, generator, torch::kByte);
}
td::Batch classes(std::int64_t count) {
  return {images(count), torch::arange(count).remainder(10)};
}
std::vector<KeyedGenerator> generators(std::int64_t count) {
  std::vector<KeyedGenerator> all;
  for (std::int64_t i = 0; i < count; ++i) all.emplace_back(5, 1, i);
  return all;
}
/// Each image by itself.
template <class Transform>
at::Tensor one_by_one(const Transform& transform, const at::Tensor& batch) {
  std::vector<at::Tensor> done;
  for (std::int64_t i = 0; i < batch.size(0); ++i) {
    KeyedGenerator random(5, 1, i);
    done.push_back(transform(batch[i], random));
  }
  return torch::stack(done);
}
template <class Transform>
at::Tensor together(const Transform& transform, const at::Tensor& batch) {
  auto random = generators(batch.size(0));
  return transform(batch, std::span<KeyedGenerator>(random));
}
template <class Loader>
std::vector<td::Batch> all(Loader&& loader) {
  std::vector<td::Batch> batches;
  for (const auto& batch : loader) batches.push_back(batch);
  return batches;
}
bool same(const std::vector<td::Batch>& a, const std::vector<td::Batch>& b) {
  return std::ranges::equal(a, b, [](const td::Batch& x, const td::Batch& y) {
    return torch::equal(x.data, y.data) && torch::equal(x.target, y.target);
  });
}

}  // namespace

TEST_CASE("Normalize is (x - mean) / deviation, of bytes as 0 to 1") {
  const auto x = images(4);
  const td::data::Normalize each{{0.1, 0.2, 0.3}, {0.5, 0.6, 0.7}};
  const auto want = (x.to(torch::kFloat) / 255 - torch::tensor({0.1, 0.2, 0.3}).view({3, 1, 1})) /
                    torch::tensor({0.5, 0.6, 0.7}).view({3, 1, 1});
  CHECK(torch::allclose(each(x), want, 1e-5, 1e-6));
  CHECK(torch::equal(each(x)[2], each(x[2])));
  CHECK(torch::allclose(td::data::Normalize{{0.5}, {0.25}}(x.to(torch::kDouble)), (x.to(torch::kDouble) - 0.5) / 0.25));
  CHECK_SAYS(td::ConfigError, "2 means and 2 deviations for 3 channels", td::data::Normalize{{1, 2}, {1, 2}}(x));
  CHECK_SAYS(td::DataError, "[N, C, H, W], and has 2", each(x[0][0]));
}

TEST_CASE("RandomCrop takes any part, and the padding is zeros") {
  const auto x = images(200);
  const td::data::RandomCrop crop{.height = 9, .width = 6, .padding = 2};
  const auto batch = together(crop, x);
  CHECK((batch.sizes() == at::IntArrayRef{200, 3, 9, 6}));
  CHECK(torch::equal(batch, one_by_one(crop, x)));
  const auto padded = torch::constant_pad_nd(x, {2, 2, 2, 2});
  std::vector<int> ys(6);
  std::vector<int> xs(7);
  for (std::int64_t i = 0; i < 200; ++i) {
    KeyedGenerator random(5, 1, i);  // by hand: the row, then the column
    const auto top = static_cast<std::int64_t>(random.below(6));
    const auto left = static_cast<std::int64_t>(random.below(7));
    ++ys[static_cast<std::size_t>(top)];
    ++xs[static_cast<std::size_t>(left)];
    CHECK(torch::equal(batch[i], padded[i].slice(1, top, top + 9).slice(2, left, left + 6)));
  }
  for (const int times : ys) CHECK(times > 15);
  for (const int times : xs) CHECK(times > 12);
  const td::data::RandomCrop wide{.height = 3, .padding = 7};  // some parts are nothing but padding
  CHECK(torch::equal(together(wide, x), one_by_one(wide, x)));
  CHECK((together(td::data::RandomCrop{.height = 8}, x).sizes() == at::IntArrayRef{200, 3, 8, 8}));
  CHECK_SAYS(td::DataError, "an image of 10x8 with a padding of 0 has no part of 11x11",
             together(td::data::RandomCrop{.height = 11}, x));
  CHECK_SAYS(td::DataError, "must have the dimensions [C, H, W]", one_by_one(crop, x[0]));
  auto few = generators(3);
  CHECK_SAYS(td::DataError, "3 generators for a batch of 200", crop(x, std::span<KeyedGenerator>(few)));
}

TEST_CASE("RandomFlip mirrors about half of the images") {
  const auto x = images(300);
  for (const bool vertical : {false, true}) {
    const td::data::RandomFlip flip{.probability = 0.5, .vertical = vertical};
    const auto batch = together(flip, x);
    CHECK(torch::equal(batch, one_by_one(flip, x)));
    int flipped = 0;
    for (std::int64_t i = 0; i < 300; ++i) {
      const bool is = torch::equal(batch[i], x[i].flip(vertical ? 1 : 2));
      CHECK((is || torch::equal(batch[i], x[i])));
      flipped += is;
    }
    CHECK(flipped > 115);
    CHECK(flipped < 185);
  }
  CHECK(torch::equal(together(td::data::RandomFlip{.probability = 1}, x), x.flip(3)));
  CHECK(torch::equal(together(td::data::RandomFlip{.probability = 0}, x), x));
}

TEST_CASE("RandomRotate turns about the middle, images that are no square included") {
  auto x = torch::zeros({1, 1, 41, 61});
  x[0][0][20][30] = 1;  // the middle
  x[0][0][20][45] = 1;  // 15 to the right of it
  for (std::int64_t i = 0; i < 20; ++i) {
    std::vector<KeyedGenerator> random{KeyedGenerator(5, 1, i)};
    KeyedGenerator again(5, 1, i);
    const double angle = again.uniform(-40, 40) * std::numbers::pi / 180;
    const auto turned = td::data::RandomRotate{.degrees = 40}(x, std::span<KeyedGenerator>(random))[0][0];
    CHECK(turned[20][30].item<float>() > 0.9);
    // Where the point went: along a circle of 15, counted in pixels.
    const auto row = torch::arange(41).view({41, 1});
    const auto far = torch::where((torch::arange(61) - 30).abs() + (row - 20).abs() > 5, turned, torch::zeros({}));
    const double mass = far.sum().item<double>();
    CHECK(mass == doctest::Approx(1).epsilon(0.15));
    CHECK((far * (torch::arange(61) - 30)).sum().item<double>() / mass ==
          doctest::Approx(15 * std::cos(angle)).epsilon(0.03));
    CHECK(std::abs((far * (row - 20)).sum().item<double>() / mass + 15 * std::sin(angle)) < 0.4);
  }
  const auto bytes = images(6);
  const td::data::RandomRotate rotate{.degrees = 30};
  CHECK((together(rotate, bytes).scalar_type() == torch::kByte));
  CHECK(torch::equal(together(rotate, bytes), one_by_one(rotate, bytes)));
  CHECK(torch::equal(together(td::data::RandomRotate{.degrees = 0}, bytes), bytes));
}

TEST_CASE("Resize is LibTorch's interpolation without aliasing") {
  const auto x = images(2).to(torch::kFloat);
  const td::data::Resize resize{.height = 5, .width = 7};
  namespace F = torch::nn::functional;
  const auto want = at::_upsample_bilinear2d_aa(x, {5, 7}, false);
  CHECK(torch::equal(resize(x), want));
  CHECK(torch::equal(resize(x[0]), want[0]));
  CHECK(torch::equal(resize(images(2)), want.round().clamp(0, 255).to(torch::kByte)));
  CHECK((td::data::Resize{.height = 4}(x[0]).sizes() == at::IntArrayRef{3, 4, 4}));
  CHECK(torch::equal(td::data::Resize{.height = 10, .width = 8}(x), x));
}

TEST_CASE("ColorJitter multiplies brightness, contrast and saturation, and cuts off") {
  const auto x = images(5).to(torch::kFloat) / 255;
  const td::data::ColorJitter jitter{.brightness = 0.5, .contrast = 0.4, .saturation = 0.3};
  const auto batch = together(jitter, x);
  CHECK(torch::allclose(batch, one_by_one(jitter, x), 0, 1e-6));
  const auto gray = [](const at::Tensor& y) { return 0.299 * y[0] + 0.587 * y[1] + 0.114 * y[2]; };
  for (std::int64_t i = 0; i < 5; ++i) {
    KeyedGenerator random(5, 1, i);
    auto y = (x[i] * random.uniform(0.5, 1.5)).clamp(0, 1);
    const double contrast = random.uniform(0.6, 1.4);
    y = (contrast * y + (1 - contrast) * gray(y).mean()).clamp(0, 1);
    const double saturation = random.uniform(0.7, 1.3);
    y = (saturation * y + (1 - saturation) * gray(y)).clamp(0, 1);
    CHECK(torch::allclose(batch[i], y, 1e-5, 1e-6));
  }
  CHECK((together(jitter, images(5)).scalar_type() == torch::kByte));
  CHECK((together(jitter, images(5)).to(torch::kFloat) / 255 - batch).abs().max().item<float>() < 0.004);
  CHECK(torch::equal(together(td::data::ColorJitter{}, images(5)), images(5)));
  CHECK_SAYS(td::DataError, "images have 2 channels", together(jitter, images(5, 2)));
}

TEST_CASE("MixUp mixes rows and targets by the same parts, drawn from Beta") {
  const auto x = torch::rand({6, 2, 3});
  const auto target = torch::tensor({0, 1, 2, 0, 1, 2});
  auto random = generators(6);
  const auto mixed = td::data::MixUp{.alpha = 0.4, .classes = 3}({x, target}, std::span<KeyedGenerator>(random));
  CHECK(torch::allclose(mixed.target.sum(1), torch::ones({6})));
  bool found = false;
  for (std::int64_t on = 1; on < 6 && !found; ++on) {
    // The parts, from what became of the data; then the targets must have the same.
    const auto other = x.roll({on}, {0});
    const auto part = ((mixed.data - other) / (x - other)).flatten(1).mean(1).to(torch::kFloat);
    if (!torch::allclose(mixed.data, other + (x - other) * part.view({6, 1, 1}), 1e-4, 1e-5)) continue;
    found = true;
    const auto hot = torch::one_hot(target, 3).to(torch::kFloat);
    CHECK(torch::allclose(mixed.target, part.view({6, 1}) * hot + (1 - part).view({6, 1}) * hot.roll({on}, {0}), 1e-3,
                          1e-4));
  }
  CHECK(found);
  for (const double alpha : {0.2, 1.0, 3.0}) {  // Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1))
    CAPTURE(alpha);
    double sum = 0;
    double squares = 0;
    for (std::int64_t i = 0; i < 5'000; ++i) {
      std::vector<KeyedGenerator> two{KeyedGenerator(1, 0, 2 * i), KeyedGenerator(1, 0, 2 * i + 1)};
      const auto pair = td::data::MixUp{.alpha = alpha, .classes = 2}(
          {torch::tensor({0.0, 1.0}), torch::tensor({0, 1})}, std::span<KeyedGenerator>(two));
      const double first = 1 - pair.data[0].item<double>();
      const double second = pair.data[1].item<double>();
      sum += first + second;
      squares += (first - 0.5) * (first - 0.5) + (second - 0.5) * (second - 0.5);
    }
    CHECK(sum / 10'000 == doctest::Approx(0.5).epsilon(0.03));
    CHECK(squares / 10'000 == doctest::Approx(1 / (4 * (2 * alpha + 1))).epsilon(0.05));
  }
  auto single = generators(1);
  const auto one =
      td::data::MixUp{.classes = 3}({x.slice(0, 0, 1), target.slice(0, 0, 1)}, std::span<KeyedGenerator>(single));
  CHECK(torch::allclose(one.data, x.slice(0, 0, 1)));
  CHECK_SAYS(td::ConfigError, "classes at least 1", td::data::MixUp{}({x, target}, std::span<KeyedGenerator>(random)));
  CHECK_SAYS(td::DataError, "a batch of floats",
             td::data::MixUp{.classes = 3}({x.to(torch::kByte), target}, std::span<KeyedGenerator>(random)));
}

TEST_CASE("functions of samples run in workers, and change nothing else") {
  const auto data = classes(50);
  const auto augmented = td::data::map(td::data::Tensors(data), td::data::RandomCrop{.height = 8, .padding = 2},
                                       td::data::RandomFlip{}, td::data::Normalize{{0.5}, {0.5}}, [](td::Batch sample) {
                                         return td::data::Example{sample.data, sample.target.item<std::int64_t>()};
                                       });
  td::data::Loader plain{augmented, {.batch_size = 7, .shuffle = true, .seed = 3}};
  const auto first = all(plain);
  const auto second = all(plain);
  CHECK(!torch::equal(first[0].data, second[0].data));
  for (const int workers : {1, 2, 4}) {
    td::data::Loader loader{augmented, {.batch_size = 7, .shuffle = true, .seed = 3, .workers = workers}};
    CHECK(same(all(loader), first));
    CHECK(same(all(loader), second));
  }
  // By hand, for one sample of the second epoch.
  const auto sample = second[1].target[3].item<std::int64_t>();
  for (std::int64_t i = 0; i < 50; ++i) {
    if (!torch::equal(data.target[i], second[1].target[3])) continue;
    KeyedGenerator random(3, 1, i);
    const auto cropped = td::data::RandomCrop{.height = 8, .padding = 2}(data.data[i], random);
    const auto flipped = random.happens(0.5) ? cropped.flip(2) : cropped;
    if (torch::allclose(second[1].data[3], (flipped.to(torch::kFloat) / 255 - 0.5) / 0.5, 1e-5, 1e-6)) return;
  }
  FAIL("no sample of class " << sample << " gives what the loader gave");
}

TEST_CASE("functions of batches have random numbers by sample: workers, ranks and batches do not matter") {
  const auto data = classes(40);
  const auto make = [&](td::data::LoaderOptions options) {
    options.shuffle = true;
    options.seed = 8;
    return td::data::map_batches(td::data::TensorLoader{data, options}, td::data::RandomCrop{.height = 8, .padding = 1},
                                 td::data::RandomFlip{}, td::data::Normalize{});
  };
  using Mapped = decltype(make({}));
  static_assert(std::ranges::input_range<Mapped> && td::sized_loader<Mapped> && td::reseedable_loader<Mapped> &&
                td::data::resumable<Mapped>);
  auto plain = make({.batch_size = 12});
  const auto want = all(plain);
  CHECK((plain.position() == td::data::Position{1, 0}));
  const auto next = all(plain);
  CHECK(!torch::equal(want[0].data, next[0].data));
  for (const int workers : {1, 2, 4}) {
    auto loader = make({.batch_size = 12, .workers = workers});
    loader.seek({0, 2});
    CHECK(same(all(loader), {want[2], want[3]}));
    CHECK(same(all(loader), next));
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto part = all(make({.batch_size = 4, .workers = 1, .rank = rank, .world_size = 3}));
    for (std::size_t k = 0; k < part.size(); ++k)
      CHECK(torch::equal(part[k].data, want[k].data.index({torch::indexing::Slice(rank, torch::indexing::None, 3)})));
  }
  // They are others than the sample's own.
  td::data::Loader own{td::data::map(td::data::Tensors(data), td::data::RandomCrop{.height = 8, .padding = 1},
                                     td::data::RandomFlip{}, td::data::Normalize{}),
                       {.batch_size = 12, .shuffle = true, .seed = 8}};
  CHECK(!torch::equal(all(own)[0].data, want[0].data));
  // A loader with a name stays where it is.
  td::data::TensorLoader named{data, {.batch_size = 20}};
  auto doubled = td::data::map_batches(named, [](td::Batch batch) {
    return td::Batch{batch.data.to(torch::kInt) * 2, batch.target};
  });
  CHECK(torch::equal(all(doubled)[1].data, data.data.narrow(0, 20, 20).to(torch::kInt) * 2));
  CHECK((named.position() == td::data::Position{1, 0}));
  std::vector<td::Batch> vector{data};  // any range of batches, without random numbers
  auto mapped = td::data::map_batches(vector, td::data::Normalize{});
  CHECK(mapped.size() == 1);
  CHECK(torch::equal(all(mapped)[0].data, td::data::Normalize{}(data.data)));
}

TEST_CASE("functions of batches: over a torch::data loader, and what they throw is named") {
  const auto data = classes(20);
  struct Rows : torch::data::datasets::Dataset<Rows> {
    td::Batch all;
    explicit Rows(td::Batch batch) : all(std::move(batch)) {}
    torch::data::Example<> get(std::size_t i) override {
      return {all.data[static_cast<std::int64_t>(i)], all.target[static_cast<std::int64_t>(i)]};
    }
    std::optional<std::size_t> size() const override { return all.data.size(0); }
  };
  auto theirs = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Rows(data).map(torch::data::transforms::Stack<>()), 6);
  auto mapped = td::data::map_batches(*theirs, td::data::Normalize{});
  static_assert(td::loader<decltype(mapped)>);
  for (int pass = 0; pass < 2; ++pass) {
    std::int64_t row = 0;
    for (const auto& batch : mapped) {
      CHECK(torch::equal(batch.data, td::data::Normalize{}(data.data.narrow(0, row, batch.data.size(0)))));
      row += batch.data.size(0);
    }
    CHECK(row == 20);
  }

  const auto picky = [](td::Batch batch) {
    if (batch.target.eq(9).any().item<bool>()) throw std::runtime_error("nine is too much.");
    return batch;
  };
  auto faulty = td::data::map_batches(td::data::TensorLoader{data, {.batch_size = 4}}, picky);
  for (int epoch = 0; epoch < 2; ++epoch) {
    auto it = faulty.begin();
    ++it;
    std::string nested;
    try {
      ++it;
    } catch (const td::DataError& error) {
      CHECK(std::string(error.what()) == "data::map_batches: a function of batch 2 of epoch " + std::to_string(epoch) +
                                             " failed: nine is too much.");
      try {
        std::rethrow_if_nested(error);
      } catch (const std::runtime_error& original) {
        nested = original.what();
      }
    }
    CHECK(nested == "nine is too much.");
    CHECK(it == faulty.end());
  }
  std::vector<td::Batch> list{data};
  CHECK_SAYS(td::DataError, "a function of batch 0 of this pass failed: nine is too much.",
             td::data::map_batches(list, picky).begin());
}

TEST_CASE("an iterator over mapped batches needs its loader's own pass and nothing else") {
  const auto data = classes(12);
  const auto begin = [&] {
    auto loader =
        td::data::map_batches(td::data::TensorLoader{data, {.batch_size = 4, .workers = 1}},
                              [offset = torch::full({1}, 7, torch::kByte)](at::Tensor x) { return x + offset; });
    return loader.begin();
  };
  auto it = begin();
  for (int k = 0; k < 3; ++k, ++it) CHECK(torch::equal(it->data, data.data.narrow(0, 4 * k, 4) + 7));
  CHECK(it == std::default_sentinel);
}

TEST_CASE("what is done on a device is begun where a batch is used, and once") {
  int calls = 0;
  const auto count = [&](td::Batch batch) { return ++calls, batch; };
  std::vector<td::Batch> there(3, td::Batch{torch::empty({2, 1}, torch::kMeta), torch::empty({2}, torch::kMeta)});
  auto mapped = td::data::map_batches(there, count);
  auto it = mapped.begin();
  CHECK(calls == 0);
  CHECK(it->data.size(0) == 2);
  CHECK((*it).data.is_meta());
  CHECK(calls == 1);
  ++it;
  ++it;
  CHECK(calls == 1);
  CHECK(it->data.is_meta());
  CHECK(calls == 2);
  ++it;
  CHECK(it == mapped.end());
  std::vector<td::Batch> here{classes(3)};
  CHECK(td::data::map_batches(here, count).begin() != std::default_sentinel);
  CHECK(calls == 3);  // on a CPU it takes the time of who asks for the batch
}

TEST_CASE("pictures with their channels last stay so, with the same values") {
  const auto last = [](const at::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); };
  for (const auto& x : {images(6), images(6).to(torch::kFloat) / 255}) {
    const auto check = [&](const auto& transform) {
      const auto want = together(transform, x);
      const auto got = together(transform, last(x));
      CHECK(want.is_contiguous());
      CHECK(got.is_contiguous(at::MemoryFormat::ChannelsLast));
      CHECK(torch::allclose(got.to(torch::kFloat), want.to(torch::kFloat), 0, x.is_floating_point() ? 1e-5 : 1));
      KeyedGenerator random(5, 1, 0);
      const auto one = transform(last(x)[0], random);
      CHECK(one.unsqueeze(0).is_contiguous(at::MemoryFormat::ChannelsLast));
      CHECK(torch::allclose(one.to(torch::kFloat), want[0].to(torch::kFloat), 0, x.is_floating_point() ? 1e-5 : 1));
    };
    check(td::data::RandomCrop{.height = 8, .padding = 2});
    check(td::data::RandomFlip{.probability = 1});
    check(td::data::RandomFlip{.probability = 1, .vertical = true});
    check(td::data::RandomRotate{});
    check(td::data::ColorJitter{.brightness = 0.1, .contrast = 0.1, .saturation = 0.1});
    CHECK(td::data::Normalize{}(last(x)).is_contiguous(at::MemoryFormat::ChannelsLast));
    CHECK(td::data::Resize{.height = 6}(last(x)).is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

namespace {
struct Counting {
  std::int64_t count = 0;
  struct Reader {
    std::int64_t left;
    std::optional<std::int64_t> next() { return left > 0 ? std::optional(left--) : std::nullopt; }
  };
  Reader open(std::int64_t) const { return {count}; }
  td::data::Example prepare(std::int64_t number, KeyedGenerator& random) const {
    return {torch::full({1, 4, 4}, static_cast<double>(number) + random.uniform()), number};
  }
};
}  // namespace

TEST_CASE("streams and clouds go through functions too") {
  const auto twice =
      td::data::map(Counting{9}, [](at::Tensor data, KeyedGenerator& random) { return data * random.uniform(); });
  const auto want = all(td::data::StreamLoader{twice, {.batch_size = 4, .seed = 2}});
  KeyedGenerator random(2, 0, 4);
  const double own = 5 + random.uniform();
  CHECK(want[1].data[0][0][0][0].item<double>() == doctest::Approx(own * random.uniform()));
  for (const int workers : {1, 3})
    CHECK(same(all(td::data::StreamLoader{twice, {.batch_size = 4, .seed = 2, .workers = workers}}), want));
  auto flipped = td::data::map_batches(td::data::StreamLoader{Counting{9}, {.batch_size = 4, .seed = 2}},
                                       td::data::RandomCrop{.height = 2});
  CHECK((all(flipped)[2].data.sizes() == at::IntArrayRef{1, 1, 2, 2}));
  const td::data::PointClouds clouds({torch::zeros({1000, 3}), torch::tensor({0, 400, 1000}), torch::tensor({1, 2})});
  td::data::Loader jittered{td::data::map(clouds, td::data::PointJitter{.deviation = 0.1, .most = 0.2}),
                            {.batch_size = 2, .workers = 1}};
  const auto batch = *jittered.begin();
  CHECK((batch.offsets.equal(torch::tensor({0, 400, 1000}))));
  CHECK(batch.points.abs().max().item<float>() == doctest::Approx(0.2));
  CHECK(batch.points.mean().item<float>() == doctest::Approx(0).epsilon(0.01));
  CHECK(batch.points.std().item<float>() == doctest::Approx(0.096).epsilon(0.1));
}
