// SPDX-License-Identifier: Apache-2.0
// Augmentation of images: each takes one image with its generator, as `data::map` gives it, or a batch of them with a
// generator for each row, as `data::map_batches` does, on whatever device it is. With equal generators both give the
// same.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "treadle/data/random.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/device.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Numbers for each row on the device of `like`, without making the host wait.
template <class T>
at::Tensor row_numbers(std::vector<T> numbers, at::IntArrayRef sizes, const at::Tensor& like) {
  constexpr auto type = c10::CppTypeToScalarType<T>::value;
  return to_device(at::from_blob(numbers.data(), sizes, type).clone(), like.device());
}

inline void check_images(const at::Tensor& images, std::int64_t dimensions, const char* who) {
  if (!images.defined() || images.dim() != dimensions)
    throw DataError(std::string("data::") + who + ": " +
                    (dimensions == 3 ? "an image must have the dimensions [C, H, W]"
                                     : "a batch of images must have the dimensions [N, C, H, W]") +
                    ", and has " + std::to_string(images.defined() ? images.dim() : 0) + ".");
}
inline void check_rows(const at::Tensor& images, std::span<data::KeyedGenerator> random, const char* who) {
  check_images(images, 4, who);
  if (static_cast<std::int64_t>(random.size()) != images.size(0))
    throw DataError(std::string("data::") + who + ": there are " + std::to_string(random.size()) +
                    " generators for a batch of " + std::to_string(images.size(0)) +
                    "; use it behind a data::Loader or data::StreamLoader, whose batches bring one for each row.");
}

/// Whether images `[C, H, W]` or `[N, C, H, W]` have their channels last in memory: then so has what is made of them.
inline bool channels_last(const at::Tensor& images) {
  if (images.is_contiguous()) return false;
  const at::Tensor batch = images.dim() == 3 ? images.unsqueeze(0) : images;
  return batch.dim() == 4 && batch.is_contiguous(at::MemoryFormat::ChannelsLast);
}

/// Of image n the rows `ys[n]` and the columns `xs[n]`, int64 `[N, h]` and `[N, w]`: `[N, C, h, w]`, in one pass.
inline at::Tensor pick(const at::Tensor& images, const at::Tensor& ys, const at::Tensor& xs) {
  const auto options = ys.options();
  const std::int64_t rows = images.size(0);
  c10::List<std::optional<at::Tensor>> places;
  if (channels_last(images)) {
    places.push_back(at::arange(rows, options).view({-1, 1, 1}));
    places.push_back(ys.view({rows, -1, 1}));
    places.push_back(xs.view({rows, 1, -1}));
    return at::index(images.permute({0, 2, 3, 1}), places).permute({0, 3, 1, 2});
  }
  places.push_back(at::arange(rows, options).view({-1, 1, 1, 1}));
  places.push_back(at::arange(images.size(1), options).view({1, -1, 1, 1}));
  places.push_back(ys.view({rows, 1, -1, 1}));
  places.push_back(xs.view({rows, 1, 1, -1}));
  return at::index(images, places);
}

}  // namespace detail

namespace data {

/// Brings each channel to mean 0 and deviation 1: float `(x - mean) / deviation`, where pixels of uint8 count as
/// 0 to 1. `[C, H, W]` or `[N, C, H, W]`; one number for all channels or one for each.
struct Normalize {
  std::vector<double> mean{0.5};
  std::vector<double> deviation{0.5};

  at::Tensor operator()(const at::Tensor& images) const {
    if (images.dim() != 3) treadle::detail::check_images(images, 4, "Normalize");
    const auto channels = static_cast<std::size_t>(images.size(-3));
    if (mean.size() != deviation.size() || mean.empty() || (mean.size() != 1 && mean.size() != channels))
      throw ConfigError("data::Normalize: there are " + std::to_string(mean.size()) + " means and " +
                        std::to_string(deviation.size()) + " deviations for " + std::to_string(channels) +
                        " channels; both need one, or one for each.");
    const double unit = images.scalar_type() == at::kByte ? 255 : 1;
    std::vector<float> numbers(2 * mean.size());
    for (std::size_t i = 0; i < mean.size(); ++i) {
      numbers[i] = static_cast<float>(1 / (unit * deviation[i]));
      numbers[mean.size() + i] = static_cast<float>(-mean[i] / deviation[i]);
    }
    const auto both =
        treadle::detail::row_numbers(std::move(numbers), {2, static_cast<std::int64_t>(mean.size()), 1, 1}, images);
    const at::Tensor x = images.is_floating_point() ? images : images.to(at::kFloat);
    return x.mul(both[0]).add_(both[1]);
  }
};

/// A square, or `height` x `width`, of the image at a random place, after `padding` zeros were put around it.
struct RandomCrop {
  std::int64_t height = 0;
  std::int64_t width = 0;  ///< 0: as high
  std::int64_t padding = 0;

  at::Tensor operator()(const at::Tensor& image, KeyedGenerator& random) const {
    treadle::detail::check_images(image, 3, "RandomCrop");
    const auto [y, x] = draw(image, random);
    if (padding == 0) return image.narrow(1, y, height).narrow(2, x, columns());
    // What lies within the image, put into zeros: a fraction of what padding all of it takes.
    const std::int64_t channels = image.size(0);
    at::Tensor part = treadle::detail::channels_last(image)
                          ? at::zeros({height, columns(), channels}, image.options()).permute({2, 0, 1})
                          : at::zeros({channels, height, columns()}, image.options());
    const auto [top, rows] = overlap(y - padding, height, image.size(1));
    const auto [left, columns_in] = overlap(x - padding, columns(), image.size(2));
    if (rows > 0 && columns_in > 0)
      part.narrow(1, top - (y - padding), rows)
          .narrow(2, left - (x - padding), columns_in)
          .copy_(image.narrow(1, top, rows).narrow(2, left, columns_in));
    return part;
  }
  at::Tensor operator()(const at::Tensor& images, std::span<KeyedGenerator> random) const {
    treadle::detail::check_rows(images, random, "RandomCrop");
    std::vector<std::int64_t> ys;
    std::vector<std::int64_t> xs;
    for (auto& row : random) {
      const auto [y, x] = draw(images, row);
      ys.push_back(y);
      xs.push_back(x);
    }
    const std::int64_t rows = images.size(0);
    const at::Tensor all = padded(images);
    const auto from = [&](std::vector<std::int64_t> begins, std::int64_t size) {
      const auto begin = treadle::detail::row_numbers(std::move(begins), {rows, 1}, images);
      return begin.add(at::arange(size, begin.options()));
    };
    return treadle::detail::pick(all, from(std::move(ys), height), from(std::move(xs), columns()));
  }

 private:
  /// Where what begins at `begin` meets 0 to `limit`, and how much of it does.
  static std::pair<std::int64_t, std::int64_t> overlap(std::int64_t begin, std::int64_t size, std::int64_t limit) {
    const std::int64_t first = std::max<std::int64_t>(begin, 0);
    return {first, std::min(begin + size, limit) - first};
  }
  std::int64_t columns() const { return width == 0 ? height : width; }
  std::pair<std::int64_t, std::int64_t> draw(const at::Tensor& images, KeyedGenerator& random) const {
    const std::int64_t down = images.size(-2) + 2 * padding - height;
    const std::int64_t right = images.size(-1) + 2 * padding - columns();
    if (height < 1 || width < 0 || padding < 0 || down < 0 || right < 0)
      throw DataError("data::RandomCrop: an image of " + std::to_string(images.size(-2)) + "x" +
                      std::to_string(images.size(-1)) + " with a padding of " + std::to_string(padding) +
                      " has no part of " + std::to_string(height) + "x" + std::to_string(columns()) +
                      "; resize it first, or crop to less.");
    const auto y = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(down) + 1));
    return {y, static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(right) + 1))};
  }
  at::Tensor padded(const at::Tensor& images) const {
    return padding == 0 ? images : at::constant_pad_nd(images, {padding, padding, padding, padding});
  }
};

/// The image mirrored, with a probability: left and right, or with `vertical` top and bottom.
struct RandomFlip {
  double probability = 0.5;
  bool vertical = false;

  at::Tensor operator()(const at::Tensor& image, KeyedGenerator& random) const {
    treadle::detail::check_images(image, 3, "RandomFlip");
    return random.happens(probability) ? at::flip(image, {vertical ? 1 : 2}) : image;
  }
  at::Tensor operator()(const at::Tensor& images, std::span<KeyedGenerator> random) const {
    treadle::detail::check_rows(images, random, "RandomFlip");
    std::vector<std::int64_t> flips;
    for (auto& row : random) flips.push_back(row.happens(probability));
    const std::int64_t rows = images.size(0);
    const std::int64_t size = images.size(vertical ? 2 : 3);
    const auto flip = treadle::detail::row_numbers(std::move(flips), {rows, 1}, images);
    const auto along = at::arange(size, flip.options());
    // Position i, or size - 1 - i: without a branch on the device.
    const auto mirrored = along.add(flip.mul(along.mul(-2).add(size - 1)));
    const auto as_it_is = at::arange(images.size(vertical ? 3 : 2), flip.options()).expand({rows, -1});
    return vertical ? treadle::detail::pick(images, mirrored, as_it_is.contiguous())
                    : treadle::detail::pick(images, as_it_is.contiguous(), mirrored);
  }
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
