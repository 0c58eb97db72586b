// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

#include "treadle/batch.hpp"
#include "treadle/data/idx.hpp"
#include "treadle/data/split.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Where the Debian package `dataset-fashion-mnist` puts its files.
inline constexpr const char* fashion_mnist_directory = "/usr/share/datasets/fashion-mnist";

/// Mean and standard deviation of the training images, with pixels in [0, 1].
inline constexpr double fashion_mnist_mean = 0.2860;
inline constexpr double fashion_mnist_std = 0.3530;

/// Fashion-MNIST from its four IDX files, gzip or unpacked: 60000 images of 28x28 to train and 10000 to test.
///
/// `data` is float `[N, 1, 28, 28]`, normalized with the mean and standard deviation above; `target` is int64 `[N]` of
/// the classes 0 to 9; both on the CPU. Throws `DataError`: missing files with how to get them, damaged ones by name.
inline Batch fashion_mnist(const std::filesystem::path& directory = fashion_mnist_directory,
                           Split split = Split::Train) {
  const std::string prefix = split == Split::Train ? "train" : "t10k";
  const auto find = [&](const std::string& name) {
    std::error_code error;
    for (const char* ending : {".gz", ""})
      if (auto path = directory / (name + ending); std::filesystem::exists(path, error)) return path;
    throw DataError(
        "Fashion-MNIST: there is no '" + name + ".gz' in '" + directory.string() +
        "'; install the Debian package dataset-fashion-mnist (apt-get install dataset-fashion-mnist; it puts the "
        "files in " +
        fashion_mnist_directory +
        "), or name the folder that holds train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
        "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz.");
  };
  const auto images_path = find(prefix + "-images-idx3-ubyte");
  const auto labels_path = find(prefix + "-labels-idx1-ubyte");
  const at::Tensor images = read_idx(images_path);
  const at::Tensor labels = read_idx(labels_path);
  if (images.scalar_type() != at::kByte || images.dim() != 3 || images.size(1) != 28 || images.size(2) != 28)
    throw DataError("'" + images_path.string() +
                    "' does not hold the images of Fashion-MNIST: bytes of shape Nx28x28.");
  if (labels.scalar_type() != at::kByte || labels.dim() != 1 || labels.size(0) != images.size(0))
    throw DataError("'" + labels_path.string() + "' does not hold one label for each of the " +
                    std::to_string(images.size(0)) + " images.");
  if (labels.max().item<std::int64_t>() > 9)  // sync: labels lie on the host
    throw DataError("'" + labels_path.string() + "' holds a label above 9; Fashion-MNIST has the classes 0 to 9.");
  return {.data = images.unsqueeze(1).to(at::kFloat).div_(255.0).sub_(fashion_mnist_mean).div_(fashion_mnist_std),
          .target = labels.to(at::kLong)};
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
