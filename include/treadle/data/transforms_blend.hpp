// SPDX-License-Identifier: Apache-2.0
// Augmentation that computes new values: rotation, resizing, colors, noise on points, mix-up.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/grid_sampler_2d.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/one_hot.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/point_clouds.hpp"
#include "treadle/data/random.hpp"
#include "treadle/data/transforms.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// `f` of the images as floats; what were bytes are rounded to bytes again.
template <class F>
at::Tensor as_floats(const at::Tensor& images, const F& f) {
  at::Tensor made = f(images.is_floating_point() ? images : images.to(at::kFloat));
  if (channels_last(images)) made = made.contiguous(at::MemoryFormat::ChannelsLast);
  return images.is_floating_point() ? made : made.round_().clamp_(0, 255).to(images.scalar_type());
}

/// One image through what takes a batch.
template <class Transform>
at::Tensor alone(const Transform& transform, const at::Tensor& image, data::KeyedGenerator& random, const char* who) {
  check_images(image, 3, who);
  return transform(image.unsqueeze(0), std::span<data::KeyedGenerator>(&random, 1)).squeeze(0);
}

}  // namespace detail

namespace data {

/// Images of `height` x `width`, by linear interpolation; smaller ones without aliasing. `[C, H, W]` or `[N, C, H, W]`.
struct Resize {
  std::int64_t height = 0;
  std::int64_t width = 0;  ///< 0: as high

  at::Tensor operator()(const at::Tensor& images) const {
    if (images.dim() != 3) treadle::detail::check_images(images, 4, "Resize");
    if (height < 1 || width < 0) throw ConfigError("data::Resize: height must be at least 1, and width not negative.");
    const at::Tensor batch = images.dim() == 3 ? images.unsqueeze(0) : images;
    const at::Tensor resized = treadle::detail::as_floats(batch, [&](const at::Tensor& x) {
      return at::_upsample_bilinear2d_aa(x, {height, width == 0 ? height : width}, /*align_corners=*/false);
    });
    return images.dim() == 3 ? resized.squeeze(0) : resized;
  }
};

/// The image turned about its middle by up to `degrees` to either side, by linear interpolation; what comes from
/// outside is 0.
struct RandomRotate {
  double degrees = 15;

  at::Tensor operator()(const at::Tensor& image, KeyedGenerator& random) const {
    return treadle::detail::alone(*this, image, random, "RandomRotate");
  }
  at::Tensor operator()(const at::Tensor& images, std::span<KeyedGenerator> random) const {
    treadle::detail::check_rows(images, random, "RandomRotate");
    const double aspect = static_cast<double>(images.size(2)) / static_cast<double>(images.size(3));
    std::vector<float> turns;
    for (auto& row : random) {
      const double angle = row.uniform(-degrees, degrees) * std::numbers::pi / 180;
      for (const double number :
           {std::cos(angle), -std::sin(angle) * aspect, 0.0, std::sin(angle) / aspect, std::cos(angle), 0.0})
        turns.push_back(static_cast<float>(number));
    }
    return treadle::detail::as_floats(images, [&](const at::Tensor& x) {
      const auto turn = treadle::detail::row_numbers(std::move(turns), {x.size(0), 2, 3}, x).to(x.scalar_type());
      const auto grid = at::affine_grid_generator(turn, x.sizes(), /*align_corners=*/false);
      return at::grid_sampler_2d(x, grid, /*interpolation_mode=*/0, /*padding_mode=*/0, /*align_corners=*/false);
    });
  }
};

/// Brightness, contrast and saturation, in this order, each multiplied by a factor of up to so much above or below 1.
/// The result is cut off at 0 and at the largest value: 1 of floats, 255 of bytes. Saturation needs 3 channels.
struct ColorJitter {
  double brightness = 0;
  double contrast = 0;
  double saturation = 0;

  at::Tensor operator()(const at::Tensor& image, KeyedGenerator& random) const {
    return treadle::detail::alone(*this, image, random, "ColorJitter");
  }
  at::Tensor operator()(const at::Tensor& images, std::span<KeyedGenerator> random) const {
    treadle::detail::check_rows(images, random, "ColorJitter");
    if (images.size(1) != 3 && (saturation != 0 || images.size(1) != 1))
      throw DataError("data::ColorJitter: images have " + std::to_string(images.size(1)) +
                      " channels; it takes 3, or 1 without saturation.");
    const double largest = images.is_floating_point() ? 1 : 255;
    const auto factors = [&](double strength) {
      std::vector<float> each;
      for (auto& row : random) each.push_back(static_cast<float>(1 + row.uniform(-strength, strength)));
      return treadle::detail::row_numbers(std::move(each), {images.size(0), 1, 1, 1}, images);
    };
    const auto gray = [](const at::Tensor& x) {
      if (x.size(1) == 1) return x;
      return x.narrow(1, 0, 1).mul(0.299).add_(x.narrow(1, 1, 1), 0.587).add_(x.narrow(1, 2, 1), 0.114);
    };
    return treadle::detail::as_floats(images, [&](at::Tensor x) {
      if (brightness != 0) x = x.mul(factors(brightness)).clamp_(0, largest);
      if (contrast != 0)
        x = at::lerp(gray(x).mean({1, 2, 3}, true).expand_as(x), x, factors(contrast).expand_as(x)).clamp_(0, largest);
      if (saturation != 0) x = at::lerp(gray(x).expand_as(x), x, factors(saturation).expand_as(x)).clamp_(0, largest);
      return x;
    });
  }
};

/// Normal noise of that deviation on each coordinate of each point; for `data::map` over clouds.
struct PointJitter {
  double deviation = 0.01;
  double most = 0.05;  ///< noise beyond this is cut off

  PointCloud operator()(PointCloud cloud, KeyedGenerator& random) const {
    at::Tensor noise = at::empty(cloud.points.sizes(), at::kFloat);
    auto* to = noise.mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < noise.numel(); ++i)
      to[i] = static_cast<float>(std::min(most, std::max(-most, deviation * random.normal())));
    cloud.points = cloud.points.add(noise.to(cloud.points.scalar_type()));
    return cloud;
  }
};

/// Mix-up: each row of a batch becomes a part of itself and a part of another row of the batch, and its target, one
/// probability for each class, the same parts of both targets. The part is drawn from Beta(alpha, alpha).
///
/// `data` must be floats; `target` int64 classes `[N]`, or floats `[N, classes]` already. For `data::map_batches`.
struct MixUp {
  double alpha = 0.2;
  std::int64_t classes = 0;

  Batch operator()(Batch batch, std::span<KeyedGenerator> random) const {
    const std::int64_t rows = treadle::rows(batch);
    if (!(alpha > 0) || classes < 1) throw ConfigError("data::MixUp: alpha must be above 0, and classes at least 1.");
    if (static_cast<std::int64_t>(random.size()) != rows || !batch.data.is_floating_point())
      throw DataError("data::MixUp: it takes a batch of floats from a data::Loader, normalized before it.");
    std::vector<float> parts;
    for (auto& row : random) {
      const double one = gamma(row);
      const double other = gamma(row);
      parts.push_back(one + other > 0 ? static_cast<float>(one / (one + other)) : 1.0F);
    }
    // The other is the one so many rows on: who comes first decides how many, by numbers of its own.
    const std::int64_t on =
        rows < 2 ? 0 : 1 + static_cast<std::int64_t>(random[0].below(static_cast<std::uint64_t>(rows - 1)));
    at::Tensor target = batch.target;
    if (!target.is_floating_point()) target = at::one_hot(target, classes).to(at::kFloat);
    const auto mix = [&,
                      part = treadle::detail::row_numbers(std::move(parts), {rows}, batch.data)](const at::Tensor& x) {
      std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
      sizes[0] = rows;
      return at::lerp(x.roll({-on}, {0}), x, part.to(x.scalar_type()).view(sizes).expand_as(x));
    };
    return {.data = mix(batch.data), .target = mix(target)};
  }

 private:
  /// Marsaglia and Tsang's; a shape below 1 by way of the one above it.
  double gamma(KeyedGenerator& random) const {
    const double shape = alpha < 1 ? alpha + 1 : alpha;
    const double d = shape - 1.0 / 3;
    const double c = 1 / std::sqrt(9 * d);
    for (;;) {
      const double x = random.normal();
      const double v = std::pow(1 + c * x, 3);
      const double u = 1 - random.uniform();
      if (v > 0 && std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v))
        return d * v * (alpha < 1 ? std::pow(1 - random.uniform(), 1 / alpha) : 1);
    }
  }
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
