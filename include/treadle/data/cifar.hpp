// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "treadle/batch.hpp"
#include "treadle/data/byte_source.hpp"
#include "treadle/data/split.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// The images and classes in one file of CIFAR's binary version, plain or gzip: `data` is uint8 `[N, 3, 32, 32]`,
/// `target` int64 `[N]`, both on the CPU.
///
/// `classes` is 10, or 100 for CIFAR-100, whose fine classes are taken. Throws `DataError` that names the file and the
/// record.
inline Batch read_cifar(const std::filesystem::path& path, int classes = 10) {
  constexpr std::size_t pixels = 3 * 32 * 32;
  constexpr std::size_t most = 100'000;  // the largest file has 50000: more is no CIFAR, whatever it unpacks to
  if (classes != 10 && classes != 100) throw ConfigError("data::read_cifar: classes must be 10 or 100.");
  const std::size_t labels = classes == 10 ? 1 : 2;  // of CIFAR-100 the coarse class comes first
  const std::size_t record = labels + pixels;
  treadle::detail::ByteSource source(path);
  const std::vector<unsigned char> bytes = source.read_up_to(most * record + 1);
  if (bytes.empty()) source.fail("is empty; a file of CIFAR holds records of " + std::to_string(record) + " bytes");
  if (bytes.size() > most * record)
    source.fail("is no file of CIFAR: it has more than " + std::to_string(most) + " records");
  if (bytes.size() % record != 0)
    source.fail("is truncated or no file of CIFAR-" + std::to_string(classes) + ": it ends within record " +
                std::to_string(bytes.size() / record) + " of " + std::to_string(record) + " bytes each");
  const auto count = static_cast<std::int64_t>(bytes.size() / record);
  Batch batch{.data = at::empty({count, 3, 32, 32}, at::kByte), .target = at::empty({count}, at::kLong)};
  auto* images = batch.data.mutable_data_ptr<std::uint8_t>();
  auto* targets = batch.target.mutable_data_ptr<std::int64_t>();
  const unsigned char* from = bytes.data();
  for (std::int64_t i = 0; i < count; ++i, from += record, images += pixels) {
    targets[i] = from[labels - 1];
    if (targets[i] >= classes)
      source.fail("has the class " + std::to_string(targets[i]) + " in record " + std::to_string(i) + "; CIFAR-" +
                  std::to_string(classes) + " has 0 to " + std::to_string(classes - 1));
    std::memcpy(images, from + labels, pixels);
  }
  return batch;
}

/// CIFAR-10 or CIFAR-100 from the unpacked folder of its binary version (`cifar-10-batches-bin`, `cifar-100-binary`),
/// as `read_cifar` gives it: 50000 images to train, 10000 to test.
///
/// Throws `DataError`: missing files with how to get them, damaged ones by name and record.
inline Batch cifar(const std::filesystem::path& folder, Split split = Split::Train, int classes = 10) {
  std::vector<std::string> names;
  if (classes == 100)
    names = {split == Split::Train ? "train.bin" : "test.bin"};
  else if (split == Split::Test)
    names = {"test_batch.bin"};
  else
    for (const char part : {'1', '2', '3', '4', '5'}) names.push_back(std::string("data_batch_") + part + ".bin");
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
  for (const auto& name : names) {
    std::error_code error;
    if (!std::filesystem::exists(folder / name, error))
      throw DataError("CIFAR-" + std::to_string(classes) + ": there is no '" + name + "' in '" + folder.string() +
                      "'; unpack the binary version there, cifar-" + std::to_string(classes) +
                      "-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html.");
    const Batch part = read_cifar(folder / name, classes);
    data.push_back(part.data);
    target.push_back(part.target);
  }
  return {.data = at::cat(data), .target = at::cat(target)};
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
