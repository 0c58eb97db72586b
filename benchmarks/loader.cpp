// SPDX-License-Identifier: Apache-2.0
// Samples a second of loaders, with two workers: Treadle's and torch::data's, over images in memory and a folder of
// JPEG pictures, both of Fashion-MNIST. loader.py runs it beside Python's DataLoader; by hand:
//   benchmark_loader --make FOLDER [COUNT]     writes the folder of pictures: COUNT of the training images (10000)
//   benchmark_loader --serve FOLDER            reads lines "NAME WORKERS" and answers "SAMPLES SECONDS", for one epoch
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <treadle/data/fashion_mnist.hpp>
#include <treadle/data/image_folder.hpp>
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/data/transforms.hpp>
#include <utility>

namespace td = treadle;

namespace {

constexpr std::int64_t batch_size = 128;

/// Images in memory, one at a time: what a data set does that knows nothing of batches.
struct Samples {
  td::Batch all;
  std::int64_t size() const { return all.data.size(0); }
  td::data::Example get(std::int64_t i) const { return {all.data[i], all.target.const_data_ptr<std::int64_t>()[i]}; }
};

struct TorchSamples : torch::data::datasets::Dataset<TorchSamples> {
  explicit TorchSamples(td::Batch batch) : all(std::move(batch)) {}
  torch::data::Example<> get(std::size_t i) override {
    return {all.data[static_cast<std::int64_t>(i)], all.target[static_cast<std::int64_t>(i)]};
  }
  std::optional<std::size_t> size() const override { return all.data.size(0); }
  td::Batch all;
};
struct TorchFolder : torch::data::datasets::Dataset<TorchFolder> {
  explicit TorchFolder(td::data::ImageFolder files) : folder(std::move(files)) {}
  torch::data::Example<> get(std::size_t i) override {
    auto [data, target] = folder.get(static_cast<std::int64_t>(i));
    return {data, torch::tensor(target)};
  }
  std::optional<std::size_t> size() const override { return folder.size(); }
  td::data::ImageFolder folder;
};

template <class Loader>
std::pair<std::int64_t, double> epoch(Loader&& loader) {
  const auto begin = std::chrono::steady_clock::now();
  std::int64_t samples = 0;
  for (const auto& batch : loader) samples += batch.data.size(0);
  return {samples, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}
template <class Dataset>
std::pair<std::int64_t, double> torch_epoch(Dataset dataset, int workers) {
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      std::move(dataset).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(batch_size).workers(static_cast<std::size_t>(workers)));
  return epoch(*loader);
}

void make(const std::filesystem::path& folder, std::int64_t count) {
#if TREADLE_HAS_JPEG
  const auto images =
      td::data::read_idx(std::filesystem::path(TREADLE_FASHION_MNIST_DIR) / "train-images-idx3-ubyte.gz");
  const auto labels =
      td::data::read_idx(std::filesystem::path(TREADLE_FASHION_MNIST_DIR) / "train-labels-idx1-ubyte.gz");
  for (std::int64_t i = 0; i < count; ++i) {
    jpeg_compress_struct info{};
    jpeg_error_mgr errors{};
    info.err = jpeg_std_error(&errors);
    jpeg_create_compress(&info);
    unsigned char* memory = nullptr;
    unsigned long size = 0;  // NOLINT: libjpeg's type
    jpeg_mem_dest(&info, &memory, &size);
    info.image_width = info.image_height = 28;
    info.input_components = 1;
    info.in_color_space = JCS_GRAYSCALE;
    jpeg_set_defaults(&info);
    jpeg_set_quality(&info, 90, TRUE);
    jpeg_start_compress(&info, TRUE);
    auto image = images[i].contiguous();
    for (int y = 0; y < 28; ++y) {
      unsigned char* row = image.mutable_data_ptr<std::uint8_t>() + y * 28;
      jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    const auto own = folder / std::to_string(labels[i].item<int>());
    std::filesystem::create_directories(own);
    std::ofstream(own / (std::to_string(i) + ".jpg"), std::ios::binary)
        .write(reinterpret_cast<const char*>(memory), static_cast<std::streamsize>(size));
    jpeg_destroy_compress(&info);
    std::free(memory);  // NOLINT: libjpeg took it with malloc
  }
#else
  std::fprintf(stderr, "this build has no libjpeg-turbo\n");
  std::exit(2);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode == "--make") {
    make(argv[2], argc > 3 ? std::atoll(argv[3]) : 10'000);
    return 0;
  }
  if (mode != "--serve") {
    std::fprintf(stderr, "benchmark_loader --make FOLDER [COUNT] | --serve FOLDER\n");
    return 2;
  }
  const td::Batch images = td::data::fashion_mnist(TREADLE_FASHION_MNIST_DIR);
  const td::data::ImageFolder folder(argv[2], {.channels = 1});
  const td::data::RandomCrop crop{.height = 28, .padding = 2};
  std::cout << "ready" << std::endl;
  std::string name;
  int workers = 0;
  std::int64_t turn = 0;
  while (std::cin >> name >> workers) {
    td::data::LoaderOptions options{.batch_size = batch_size, .shuffle = true, .seed = 1, .workers = workers};
    const auto run = [&](auto loader) {
      loader.set_epoch(turn++);
      return epoch(loader);
    };
    std::pair<std::int64_t, double> result;
    if (name == "memory")
      result = run(td::data::TensorLoader{images, options});
    else if (name == "memory-by-sample")
      result = run(td::data::Loader{Samples{images}, options});
    else if (name == "memory-augmented")
      result = run(td::data::Loader{td::data::map(Samples{images}, crop, td::data::RandomFlip{}), options});
    else if (name == "torch-memory")
      result = torch_epoch(TorchSamples(images), workers);
    else if (name == "jpeg")
      result = run(td::data::Loader{folder, options});
    else if (name == "torch-jpeg")
      result = torch_epoch(TorchFolder(folder), workers);
    else
      return 2;
    std::cout << result.first << " " << result.second << std::endl;
  }
  return 0;
}
