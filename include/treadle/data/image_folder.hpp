// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "treadle/data/collate.hpp"
#include "treadle/data/image.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Pictures in a folder for each class, as a map-style data set: `folder/<class>/**/<picture>.{jpg,jpeg,png}`. A
/// sample's data are uint8 `[channels, height, width]`, of the picture's own size; its target is the class.
///
/// Classes are the folders in the order of their names, and pictures those of a class in the order of theirs, byte by
/// byte, so that every machine numbers them alike. Files are listed once and decoded when they are asked for. Throws
/// `DataError` that names the folder or the file.
class ImageFolder {
 public:
  explicit ImageFolder(const std::filesystem::path& folder, ImageOptions options = {}) : options_(options) {
    namespace fs = std::filesystem;
    std::error_code error;
    std::vector<fs::path> folders;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
      std::error_code is_none;
      if (it->is_directory(is_none)) folders.push_back(it->path());
    }
    refuse(folder, error);
    std::ranges::sort(folders, {}, [](const fs::path& p) { return p.native(); });
    for (const auto& own : folders) {
      std::vector<fs::path> pictures;
      for (fs::recursive_directory_iterator it(own, error), end; !error && it != end; it.increment(error)) {
        std::error_code is_none;
        if (is_picture(it->path()) && it->is_regular_file(is_none)) pictures.push_back(it->path());
      }
      refuse(own, error);
      std::ranges::sort(pictures, {}, [](const fs::path& p) { return p.native(); });
      for (auto& picture : pictures)
        files_.emplace_back(std::move(picture), static_cast<std::int64_t>(classes_.size()));
      classes_.push_back(own.filename().string());
    }
    if (files_.empty())
      throw DataError("data::ImageFolder: there is no picture in '" + folder.string() +
                      "'; it needs a folder for each class, with .jpg, .jpeg or .png files in it.");
  }

  std::int64_t size() const { return static_cast<std::int64_t>(files_.size()); }
  Example get(std::int64_t i) const {
    const auto& [path, target] = files_[static_cast<std::size_t>(i)];
    return {read_image(path, options_), target};
  }

  /// Names of the classes: target i is `classes()[i]`.
  const std::vector<std::string>& classes() const { return classes_; }
  /// The file of sample `i`.
  const std::filesystem::path& path(std::int64_t i) const { return files_[static_cast<std::size_t>(i)].first; }

 private:
  static bool is_picture(const std::filesystem::path& path) {
    std::string ending = path.extension().string();
    for (char& c : ending) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return ending == ".jpg" || ending == ".jpeg" || ending == ".png";
  }
  static void refuse(const std::filesystem::path& folder, const std::error_code& error) {
    if (error)
      throw DataError("data::ImageFolder: '" + folder.string() + "' cannot be listed: " + error.message() + ".");
  }

  ImageOptions options_;
  std::vector<std::pair<std::filesystem::path, std::int64_t>> files_;
  std::vector<std::string> classes_;
};

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
