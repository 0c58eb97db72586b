// SPDX-License-Identifier: Apache-2.0
// JPEG and PNG pictures, through libjpeg-turbo and libpng where the build found them.
#pragma once

#if TREADLE_HAS_JPEG
#include <csetjmp>
#include <cstdio>
// libjpeg's header needs stdio's before it.
#include <jpeglib.h>
// After it: the numbers of its messages.
#include <jerror.h>
#endif
#if TREADLE_HAS_PNG
#include <png.h>
#endif

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "treadle/data/file_bytes.hpp"
#include "treadle/error.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

struct ImageOptions {
  int channels = 3;                                  ///< 3: RGB, 1: gray; pictures of the other kind are converted
  std::int64_t most_pixels = std::int64_t{1} << 26;  ///< larger ones are refused, whatever their file's size
};

}  // namespace data

namespace detail {

/// A row of inks into one of interleaved colors, in place, or of gray. `inverted`: 255 is no ink.
inline void to_colors(unsigned char* row, std::int64_t width, int channels, bool inverted) {
  const auto light = [&](int ink) { return inverted ? ink : 255 - ink; };
  for (std::int64_t x = 0; x < width; ++x) {
    const unsigned char* inks = row + 4 * x;
    const int paper = light(inks[3]);
    const auto color = [&](int i) { return (light(inks[i]) * paper + 127) / 255; };
    const int red = color(0);
    const int green = color(1);
    const int blue = color(2);
    if (channels == 1) {
      row[x] = static_cast<unsigned char>((299 * red + 587 * green + 114 * blue + 500) / 1000);
    } else {
      row[3 * x] = static_cast<unsigned char>(red);
      row[3 * x + 1] = static_cast<unsigned char>(green);
      row[3 * x + 2] = static_cast<unsigned char>(blue);
    }
  }
}

/// Rows of interleaved samples into planes.
inline void to_planes(const unsigned char* row, std::int64_t y, std::int64_t width, std::int64_t plane, int channels,
                      std::uint8_t* image) {
  std::uint8_t* to = image + y * width;
  if (channels == 1) {
    std::memcpy(to, row, static_cast<std::size_t>(width));
    return;
  }
  for (std::int64_t x = 0; x < width; ++x) {
    to[x] = row[3 * x];
    to[plane + x] = row[3 * x + 1];
    to[2 * plane + x] = row[3 * x + 2];
  }
}

inline at::Tensor empty_image(std::int64_t height, std::int64_t width, const data::ImageOptions& options) {
  if (height < 1 || width < 1 || height > options.most_pixels / width)
    throw DataError("is " + std::to_string(width) + "x" + std::to_string(height) + ", and " +
                    std::to_string(options.most_pixels) + " pixels are the most");
  return at::empty({options.channels, height, width}, at::kByte);
}

#if TREADLE_HAS_JPEG
/// libjpeg's own way out of an error is a longjmp. It may pass over no C++ object, so what needs one is done between
/// the calls, and each of these functions holds none.
struct JpegReader {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  std::jmp_buf out{};
  char message[JMSG_LENGTH_MAX]{};

  explicit JpegReader(std::span<const unsigned char> bytes) {
    info.err = jpeg_std_error(&errors);
    info.client_data = this;
    errors.error_exit = [](j_common_ptr common) {
      auto* self = static_cast<JpegReader*>(common->client_data);
      common->err->format_message(common, self->message);
      std::longjmp(self->out, 1);  // NOLINT: libjpeg's interface
    };
    errors.emit_message = [](j_common_ptr common, int level) {
      auto* self = static_cast<JpegReader*>(common->client_data);
      const int code = common->err->msg_code;  // of what may be wrong beside the picture
      if (code == JWRN_EXTRANEOUS_DATA || code == JWRN_ADOBE_XFORM || code == JWRN_JFIF_MAJOR) return;
      if (level < 0 && common->err->num_warnings++ == 0) common->err->format_message(common, self->message);
    };
    if (!create(bytes)) fail();
  }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;
  ~JpegReader() { jpeg_destroy_decompress(&info); }

  bool create(std::span<const unsigned char> bytes) {
    if (setjmp(out) != 0) return false;  // NOLINT
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, bytes.data(), static_cast<unsigned long>(bytes.size()));  // NOLINT: libjpeg's type
    return true;
  }
  bool read_header() {
    if (setjmp(out) != 0) return false;  // NOLINT
    jpeg_read_header(&info, TRUE);
    return true;
  }
  bool start() {
    if (setjmp(out) != 0) return false;  // NOLINT
    jpeg_start_decompress(&info);
    return true;
  }
  bool read_row(unsigned char* row) {
    if (setjmp(out) != 0) return false;  // NOLINT
    return jpeg_read_scanlines(&info, &row, 1) == 1;
  }
  [[noreturn]] void fail() const { throw DataError(std::string("is no JPEG picture that can be read: ") + message); }
};

inline at::Tensor decode_jpeg(std::span<const unsigned char> bytes, const data::ImageOptions& options) {
  JpegReader jpeg(bytes);
  if (!jpeg.read_header()) jpeg.fail();
  const bool inks = jpeg.info.jpeg_color_space == JCS_CMYK || jpeg.info.jpeg_color_space == JCS_YCCK;
  jpeg.info.out_color_space = inks ? JCS_CMYK : options.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  at::Tensor image = empty_image(jpeg.info.image_height, jpeg.info.image_width, options);
  const std::int64_t width = jpeg.info.image_width;
  const std::int64_t height = jpeg.info.image_height;
  if (!jpeg.start()) jpeg.fail();
  std::vector<unsigned char> row(static_cast<std::size_t>(width * (inks ? 4 : options.channels)));
  for (std::int64_t y = 0; y < height; ++y) {
    if (!jpeg.read_row(row.data()) || jpeg.errors.num_warnings > 0) jpeg.fail();
    if (inks) to_colors(row.data(), width, options.channels, jpeg.info.saw_Adobe_marker == TRUE);
    to_planes(row.data(), y, width, width * height, options.channels, image.mutable_data_ptr<std::uint8_t>());
  }
  return image;
}
#endif

#if TREADLE_HAS_PNG
inline at::Tensor decode_png(std::span<const unsigned char> bytes, const data::ImageOptions& options) {
  struct Reader {
    png_image info{};
    ~Reader() { png_image_free(&info); }
    void fail() const { throw DataError(std::string("is no PNG picture that can be read: ") + info.message); }
  } png;
  png.info.version = PNG_IMAGE_VERSION;
  if (png_image_begin_read_from_memory(&png.info, bytes.data(), bytes.size()) == 0) png.fail();
  png.info.format = options.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  at::Tensor image = empty_image(png.info.height, png.info.width, options);
  const std::int64_t width = png.info.width;
  const std::int64_t height = png.info.height;
  std::vector<unsigned char> rows(static_cast<std::size_t>(width * height * options.channels));
  const png_color black{};
  if (png_image_finish_read(&png.info, &black, rows.data(), 0, nullptr) == 0 || PNG_IMAGE_FAILED(png.info)) png.fail();
  for (std::int64_t y = 0; y < height; ++y)
    to_planes(rows.data() + y * width * options.channels, y, width, width * height, options.channels,
              image.mutable_data_ptr<std::uint8_t>());
  return image;
}
#endif

}  // namespace detail

namespace data {

/// The picture in `bytes`, a JPEG or PNG file: uint8 `[channels, height, width]`. What is transparent is put on black,
/// and a JPEG picture in inks (CMYK) becomes what they look like on white paper, without a color profile.
///
/// Throws `DataError` for what is damaged, truncated or too large, or of a kind that the build cannot read. `name` is
/// what it is called in the sentence.
inline at::Tensor decode_image(std::span<const unsigned char> bytes, const std::string& name,
                               const ImageOptions& options = {}) {
  if (options.channels != 1 && options.channels != 3)
    throw ConfigError("data::decode_image: channels must be 1 or 3, and is " + std::to_string(options.channels) + ".");
  const auto begins = [&](std::initializer_list<unsigned char> magic) {
    return bytes.size() >= magic.size() && std::equal(magic.begin(), magic.end(), bytes.begin());
  };
  try {
    if (begins({0xFF, 0xD8, 0xFF})) {
#if TREADLE_HAS_JPEG
      return treadle::detail::decode_jpeg(bytes, options);
#else
      throw DataError("is a JPEG picture, which this build cannot read; build Treadle with libjpeg-turbo");
#endif
    }
    if (begins({0x89, 'P', 'N', 'G'})) {
#if TREADLE_HAS_PNG
      return treadle::detail::decode_png(bytes, options);
#else
      throw DataError("is a PNG picture, which this build cannot read; build Treadle with libpng");
#endif
    }
    throw DataError("is neither a JPEG nor a PNG picture");
  } catch (const DataError& error) {
    throw DataError("'" + name + "' " + error.what() + ".");
  }
}

/// The picture in a file, as `decode_image` gives it.
inline at::Tensor read_image(const std::filesystem::path& path, const ImageOptions& options = {}) {
  constexpr std::int64_t largest = std::int64_t{1} << 30;
  const treadle::detail::FileBytes file(path);
  if (file.size() > largest) file.fail("has more than 1 GB, and is no picture to be read");
  return decode_image(file.read_all(), path.string(), options);
}

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
