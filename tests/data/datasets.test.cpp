// SPDX-License-Identifier: Apache-2.0
// Data sets from files and memory: what they hold, compared with what the test wrote; and faults by file and record.
#include <treadle/data/cifar.hpp>
#include <treadle/data/csv.hpp>
#include <treadle/data/image.hpp>
#include <treadle/data/image_folder.hpp>
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/point_clouds.hpp>
#include <treadle/data/prefetch.hpp>
#include <treadle/data/stream_loader.hpp>
#include <treadle/data/tokens.hpp>
#include <treadle/loader.hpp>

#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/doctest.hpp"
#include "support/folder.hpp"
#include "support/throws.hpp"

namespace td = treadle;
namespace fs = std::filesystem;
using td::data::Position;
using treadle_test::Folder;

namespace {

using Numbers = std::vector<std::int64_t>;

/// Demands a DataError that begins with the name of a file, is a sentence, and contains `part`.
#define CHECK_NAMES_FILE(part, ...)                                                              \
  do {                                                                                           \
    const std::string said_ = treadle_test::thrown<td::DataError>([&] { (void)(__VA_ARGS__); }); \
    INFO("it says: " << said_);                                                                  \
    CHECK(said_.find(part) != std::string::npos);                                                \
    CHECK(said_.starts_with('\''));                                                              \
    CHECK(said_.ends_with('.'));                                                                 \
    CHECK(said_.find('\n') == std::string::npos);                                                \
  } while (false)

template <class Integer>
std::string bytes_of(const std::vector<Integer>& numbers) {
  std::string bytes(numbers.size() * sizeof(Integer), '\0');
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}
Numbers numbers_of(const at::Tensor& tensor) {
  const auto flat = tensor.to(torch::kLong).contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}
std::vector<std::uint16_t> text(std::int64_t size) {
  std::vector<std::uint16_t> tokens(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(i % 5 == 4 ? 9 : 100 + i);
  return tokens;
}

}  // namespace

// ---- Tokens.

TEST_CASE("token files are cut into pieces with their targets, and the documents in them are told apart") {
  const Folder folder;
  const auto first = text(23);
  const auto second = text(11);
  const td::data::Tokens tokens({folder.write("a.bin", bytes_of(first)), folder.write("b.bin", bytes_of(second))},
                                {.length = 5, .end_of_document = 9, .vocabulary = 200});
  CHECK(tokens.tokens() == 34);
  CHECK(tokens.size() == 4 + 2);  // 23 tokens make 4 pieces with a target each; 11 make 2
  td::data::Loader loader{tokens, {.batch_size = 6, .workers = 2}};
  const auto batch = *loader.begin();
  for (std::int64_t row = 0; row < 6; ++row) {
    const auto& file = row < 4 ? first : second;
    const std::size_t begin = static_cast<std::size_t>(row < 4 ? row : row - 4) * 5;
    std::int64_t document = 0;
    for (std::size_t t = 0; t < 5; ++t) {
      const auto column = static_cast<std::int64_t>(t);
      CHECK(batch.data[row][column].item<std::int64_t>() == file[begin + t]);
      CHECK(batch.target[row][column].item<std::int64_t>() == file[begin + t + 1]);
      CHECK(batch.document[row][column].item<std::int64_t>() == document);
      document += file[begin + t] == 9;
    }
  }
  const auto part = td::slice_rows(batch, 1, 3);
  CHECK(torch::equal(part.document, batch.document.narrow(0, 1, 2)));
  CHECK(!td::data::Tokens(folder.path / "a.bin", {.length = 5}).get_batch({0, 1}).document.defined());
  // A piece needs one token more for its last target.
  CHECK(td::data::Tokens(folder.write("c.bin", bytes_of(text(10))), {.length = 5}).size() == 1);
  CHECK(td::data::Tokens(folder.write("c.bin", bytes_of(text(11))), {.length = 5}).size() == 2);
}

TEST_CASE("token files of 4 bytes, and with llm.c's headers") {
  const Folder folder;
  const std::vector<std::uint32_t> large{1, 70'000, 4'000'000'000, 3};
  const td::data::Tokens four(folder.write("four", bytes_of(large)), {.length = 3, .bytes = 4});
  CHECK((numbers_of(four.get_batch({0, 1}).data) == Numbers{1, 70'000, 4'000'000'000}));
  const auto header = [](std::int32_t magic, std::int32_t version, std::int32_t count) {
    std::vector<std::int32_t> numbers(256);
    numbers[0] = magic;
    numbers[1] = version;
    numbers[2] = count;
    return bytes_of(numbers);
  };
  const td::data::Tokens gpt2(folder.write("gpt2", header(20240520, 1, 12) + bytes_of(text(12))), {.length = 11});
  CHECK(gpt2.get_batch({0, 1}).data[0][1].item<int>() == 101);
  const td::data::Tokens llama(folder.write("llama", header(20240801, 7, 4) + bytes_of(large)), {.length = 3});
  CHECK((numbers_of(llama.get_batch({0, 1}).target) == Numbers{70'000, 4'000'000'000, 3}));
  CHECK_NAMES_FILE("its header says 13 tokens, and it has 12",
                   td::data::Tokens(folder.write("cut", header(20240520, 1, 13) + bytes_of(text(12))), {.length = 3}));
}

TEST_CASE("token files that cannot be, and that change, are a sentence each") {
  const Folder folder;
  const auto open = [](const fs::path& path, td::data::TokensOptions options) {
    return td::data::Tokens(path, options);
  };
  CHECK_NAMES_FILE("does not hold whole tokens: 5 bytes", open(folder.write("odd", "12345"), {.length = 1}));
  CHECK_NAMES_FILE("is too short: 0 tokens make no piece of length 4", open(folder.write("none", ""), {.length = 4}));
  CHECK_NAMES_FILE("is too short: 4 tokens", open(folder.write("short", bytes_of(text(4))), {.length = 4}));
  CHECK_NAMES_FILE("is not there", open(folder.path / "nothing", {}));
  CHECK_NAMES_FILE("is not a file", open(folder.path, {}));
  CHECK_SAYS(td::ConfigError, "bytes 2 or 4", open(folder.path, {.bytes = 3}));
  CHECK_SAYS(td::ConfigError, "no file was named", td::data::Tokens(std::vector<fs::path>{}));
  const auto path = folder.write("text", bytes_of(text(4000)));
  const auto small = open(path, {.length = 10, .vocabulary = 200});
  static_cast<void>(small.get_batch({0, 2}));
  CHECK_NAMES_FILE("has the token 200 at place 100, and the vocabulary has 200", small.get_batch({9, 1}));

  td::data::Loader loader{open(path, {.length = 10}), {.batch_size = 1, .workers = 2}};
  CHECK(std::distance(fs::directory_iterator(folder.path), {}) > 0);
  std::int64_t given = 0;
  std::string said;
  try {
    for (const auto& batch : loader) {
      CHECK(batch.data[0][0].item<std::int64_t>() == (given * 10 % 5 == 4 ? 9 : 100 + given * 10));
      if (++given == 20) fs::resize_file(path, 100);  // under the loader's hands
    }
  } catch (const td::DataError& error) {
    said = error.what();
  }
  CHECK(given >= 20);
  CHECK(given < 30);
  CHECK(said.find("text' has changed since it was opened") != std::string::npos);
  CHECK(said.find("data::Loader: batch ") == 0);
  // The same without looking first, as when it changes between the look and the reading.
  const td::detail::FileBytes file(path);
  fs::resize_file(path, 50);
  std::array<char, 100> room{};
  CHECK_NAMES_FILE("has become shorter", file.read(room.data(), room.size(), 0));
  // Other content of the same size.
  const auto other = open(folder.write("same", bytes_of(text(50))), {.length = 4});
  static_cast<void>(other.get_batch({0, 1}));
  folder.write("same", std::string(100, 'x'));
  fs::last_write_time(folder.path / "same", fs::last_write_time(folder.path / "same") + std::chrono::seconds(5));
  CHECK_NAMES_FILE("has changed since it was opened", other.get_batch({0, 1}));
}

// ---- CIFAR.

namespace {
std::string cifar_record(std::vector<int> labels, int pixel) {
  std::string record;
  for (const int label : labels) record += static_cast<char>(label);
  for (int i = 0; i < 3072; ++i) record += static_cast<char>(pixel + i / 1024);
  return record;
}
}  // namespace

TEST_CASE("CIFAR's files hold planes and classes, and faults are named by file and record") {
  const Folder folder;
  const auto batch = td::data::read_cifar(folder.write("ten", cifar_record({3}, 10) + cifar_record({9}, 250)));
  CHECK((batch.data.sizes() == at::IntArrayRef{2, 3, 32, 32}));
  CHECK((numbers_of(batch.target) == Numbers{3, 9}));
  for (int channel = 0; channel < 3; ++channel) {
    CHECK(torch::equal(batch.data[0][channel], torch::full({32, 32}, 10 + channel, torch::kByte)));
    CHECK(torch::equal(batch.data[1][channel], torch::full({32, 32}, 250 + channel, torch::kByte)));
  }
  const auto fine = td::data::read_cifar(folder.write("hundred", cifar_record({7, 99}, 1)), 100);
  CHECK((numbers_of(fine.target) == Numbers{99}));
  const std::string good = cifar_record({3}, 10) + cifar_record({9}, 250);
  for (const std::size_t cut : {1, 3072, 3074, 6145})
    CHECK_NAMES_FILE("ends within record " + std::to_string(cut / 3073),
                     td::data::read_cifar(folder.write("cut", good.substr(0, cut))));
  CHECK_NAMES_FILE("cut' is empty", td::data::read_cifar(folder.write("cut", "")));
  CHECK_NAMES_FILE("has the class 10 in record 1",
                   td::data::read_cifar(folder.write("bad", cifar_record({3}, 1) + cifar_record({10}, 1))));
  CHECK_NAMES_FILE("is not there", td::data::read_cifar(folder.path / "nothing"));
  CHECK_SAYS(td::DataError, "no 'data_batch_1.bin'", td::data::cifar(folder.path));
  CHECK_SAYS(td::DataError, "cifar-100-binary.tar.gz", td::data::cifar(folder.path, td::data::Split::Test, 100));
  for (int part = 1; part <= 5; ++part)
    folder.write("data_batch_" + std::to_string(part) + ".bin", cifar_record({part}, part));
  folder.write("test_batch.bin", cifar_record({0}, 0));
  CHECK((numbers_of(td::data::cifar(folder.path).target) == Numbers{1, 2, 3, 4, 5}));
  CHECK((numbers_of(td::data::cifar(folder.path, td::data::Split::Test).target) == Numbers{0}));
}

// ---- CSV.

TEST_CASE("CSV files of numbers: names, line ends, spaces, missing values") {
  const Folder folder;
  const auto table =
      td::data::read_csv(folder.write("a.csv", "x, y ,label\r\n1,2.5,0\r\n-3e2 ,\t+4,1\n\n"), {.header = true});
  CHECK((table.names == std::vector<std::string>{"x", "y", "label"}));
  CHECK(torch::equal(table.values, torch::tensor({{1.0, 2.5, 0.0}, {-300.0, 4.0, 1.0}}, torch::kDouble)));
  CHECK(torch::equal(table.column("y"), torch::tensor({2.5, 4.0}, torch::kDouble)));
  CHECK(torch::equal(table.without("y"), torch::tensor({{1.0, 0.0}, {-300.0, 1.0}}, torch::kDouble)));
  CHECK_SAYS(td::DataError, "there is no column 'z'", table.column("z"));
  const auto gap = td::data::read_csv(folder.write("b.csv", "1;;3\n;5;6"),
                                      {.delimiter = ';', .missing = std::numeric_limits<double>::quiet_NaN()});
  CHECK((gap.values.sizes() == at::IntArrayRef{2, 3}));
  CHECK((numbers_of(gap.values.isnan()) == Numbers{0, 1, 0, 1, 0, 0}));
  CHECK(torch::equal(td::data::read_csv(folder.write("c.csv", "7")).values, torch::full({1, 1}, 7, torch::kDouble)));
  // Longer than the pieces that the reader takes, with a number across each border.
  std::string many;
  for (int i = 0; i < 50'000; ++i) many += std::to_string(i) + "," + std::to_string(i * 2) + "\n";
  const auto long_table = td::data::read_csv(folder.write("d.csv", many)).values;
  CHECK(torch::equal(long_table.select(1, 0), torch::arange(50'000, torch::kDouble)));
  CHECK(torch::equal(long_table.select(1, 1), torch::arange(50'000, torch::kDouble) * 2));
}

TEST_CASE("CSV faults are named by file, line and column") {
  const Folder folder;
  const auto fault = [&](const std::string& content, td::data::CsvOptions options = {}) {
    return treadle_test::thrown<td::DataError>([&] { td::data::read_csv(folder.write("f.csv", content), options); });
  };
  const auto says = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(
      says(fault("1,2\n3,x\n"), "f.csv' has 'x', which is no number (within a double's range), in line 2, column 2."));
  CHECK(says(fault("a,b\n1,2\n"), "in line 1, column 1; if the first line holds names, set CsvOptions::header"));
  CHECK(says(fault("1,2\n", {.header = true}), "holds only numbers in its first line"));
  CHECK(says(fault("1,2\n3\n"), "has 1 fields in line 2 and 2 in the lines before"));
  CHECK(says(fault("a,b\n1,2,3\n", {.header = true}), "has 3 fields in line 2 and 2"));
  CHECK(says(fault("1,\n"), "has nothing in line 1, column 2; say in CsvOptions::missing"));
  CHECK(says(fault("1\n\n2\n"), "has an empty line before line 3"));
  CHECK(says(fault(""), "holds no row of numbers"));
  CHECK(says(fault("a,b\n", {.header = true}), "holds no row of numbers"));
  CHECK(says(fault("1e999\n"), "which is no number"));
  CHECK(says(fault("1 2\n"), "which is no number"));
  CHECK(says(fault("\"1\"\n"), "which is no number"));
  CHECK(says(fault(std::string("\0\xFF\n", 3)), "has '?\?', which is no number"));
  CHECK(says(fault(std::string(20 << 20, '1')), "a line of more than 16 MB"));
}

TEST_CASE("CSV between tabs: a row of nothing but tabs is a row") {
  const Folder folder;
  const auto table =
      td::data::read_csv(folder.write("t.csv", "1\t2\t 3\n\t\t\n4\t\t6\n"), {.delimiter = '\t', .missing = -1});
  CHECK(torch::equal(table.values,
                     torch::tensor({{1.0, 2.0, 3.0}, {-1.0, -1.0, -1.0}, {4.0, -1.0, 6.0}}, torch::kDouble)));
  CHECK_NAMES_FILE("has nothing in line 2, column 1", td::data::read_csv(folder.path / "t.csv", {.delimiter = '\t'}));
}

// ---- Pictures.

namespace {

#if TREADLE_HAS_PNG
std::string png(const at::Tensor& image) {  // uint8 [C, H, W]
  const auto rows = image.permute({1, 2, 0}).contiguous();
  png_image info{};
  info.version = PNG_IMAGE_VERSION;
  info.width = static_cast<png_uint_32>(image.size(2));
  info.height = static_cast<png_uint_32>(image.size(1));
  info.format = image.size(0) == 1 ? PNG_FORMAT_GRAY : image.size(0) == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  std::string bytes(1 << 20, '\0');
  png_alloc_size_t size = bytes.size();
  REQUIRE(png_image_write_to_memory(&info, bytes.data(), &size, 0, rows.const_data_ptr(), 0, nullptr) != 0);
  bytes.resize(size);
  return bytes;
}
#endif
#if TREADLE_HAS_JPEG
std::string jpeg(const at::Tensor& image, bool progressive = false) {  // uint8 [C, H, W]
  auto rows = image.permute({1, 2, 0}).contiguous();
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &memory, &size);
  info.image_width = static_cast<JDIMENSION>(image.size(2));
  info.image_height = static_cast<JDIMENSION>(image.size(1));
  info.input_components = static_cast<int>(image.size(0));
  info.in_color_space = image.size(0) == 1 ? JCS_GRAYSCALE : image.size(0) == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 95, TRUE);
  if (progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  for (std::int64_t y = 0; y < image.size(1); ++y) {
    unsigned char* row = rows.mutable_data_ptr<std::uint8_t>() + y * image.size(2) * image.size(0);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  std::string bytes(reinterpret_cast<char*>(memory), size);
  jpeg_destroy_compress(&info);
  std::free(memory);
  return bytes;
}
#endif
at::Tensor picture(std::int64_t channels, std::int64_t height, std::int64_t width) {  // smooth, as JPEG likes it
  const auto y = torch::arange(height).view({1, height, 1}) * 3;
  const auto x = torch::arange(width).view({1, 1, width}) * 2;
  return (y + x + torch::arange(channels).view({channels, 1, 1}) * 40).clamp(0, 255).to(torch::kByte);
}
at::Tensor decode(const std::string& bytes, td::data::ImageOptions options = {}) {
  return td::data::decode_image({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, "some.picture",
                                options);
}

}  // namespace

TEST_CASE("pictures decode to planes, in color or gray, and what is cut off or damaged is a sentence") {
  CHECK_NAMES_FILE("'some.picture' is neither a JPEG nor a PNG picture", decode("GIF89a, certainly"));
  CHECK_NAMES_FILE("'some.picture' is neither", decode(""));
  CHECK_SAYS(td::ConfigError, "channels must be 1 or 3", decode("", {.channels = 4}));
#if TREADLE_HAS_PNG
  for (const std::int64_t channels : {1, 3}) {
    const auto image = picture(channels, 23, 17);
    const std::string bytes = png(image);
    CHECK(torch::equal(decode(bytes, {.channels = static_cast<int>(channels)}), image));
    for (std::size_t size = 4; size + 13 < bytes.size(); ++size) {
      CAPTURE(size);
      CHECK_NAMES_FILE("is no PNG picture that can be read", decode(bytes.substr(0, size)));
    }
    CHECK_NAMES_FILE("is 17x23, and 390 pixels are the most", decode(bytes, {.most_pixels = 390}));
  }
  CHECK(torch::equal(decode(png(picture(1, 5, 6))), picture(1, 5, 6).expand({3, 5, 6})));
  auto clear = picture(4, 5, 6);
  clear[3].fill_(0);
  CHECK(decode(png(clear)).eq(0).all().item<bool>());  // on black
#endif
#if TREADLE_HAS_JPEG
  for (const bool progressive : {false, true}) {
    const auto image = picture(3, 24, 40);
    const std::string bytes = jpeg(image, progressive);
    const auto decoded = decode(bytes);
    REQUIRE((decoded.sizes() == image.sizes()));
    CHECK((decoded.to(torch::kInt) - image.to(torch::kInt)).abs().max().item<int>() <= 8);
    const auto gray = decode(bytes, {.channels = 1});
    const auto luma = image[0] * 0.299 + image[1] * 0.587 + image[2] * 0.114;
    CHECK((gray[0].to(torch::kFloat) - luma).abs().max().item<float>() <= 4);
    for (std::size_t size = 4; size < bytes.size() - 4; size += 3) {
      CAPTURE(size);
      CHECK_NAMES_FILE("is no JPEG picture that can be read", decode(bytes.substr(0, size)));
    }
    CHECK_NAMES_FILE("is 40x24, and 900 pixels are the most", decode(bytes, {.most_pixels = 900}));
  }
  CHECK((decode(jpeg(picture(1, 9, 8)), {.channels = 1}).to(torch::kInt) - picture(1, 9, 8).to(torch::kInt))
            .abs()
            .max()
            .item<int>() <= 4);
#endif
}

#if TREADLE_HAS_JPEG
TEST_CASE("JPEG pictures in inks, and with harmless bytes between their parts, are read") {
  // Black, half of it, cyan and no ink at all, in blocks of 16x16; the second channel of the picture is magenta.
  auto inks = torch::zeros({4, 16, 64}, torch::kByte);
  inks[3].slice(1, 0, 16).fill_(255);
  inks[3].slice(1, 16, 32).fill_(128);
  inks[0].slice(1, 32, 48).fill_(255);
  const auto check = [&](const std::string& bytes, int slack) {
    const auto color = decode(bytes).to(torch::kInt);
    REQUIRE((color.sizes() == at::IntArrayRef{3, 16, 64}));
    const int want[4][3] = {{0, 0, 0}, {127, 127, 127}, {0, 255, 255}, {255, 255, 255}};
    const auto gray = decode(bytes, {.channels = 1}).to(torch::kInt);
    for (int block = 0; block < 4; ++block) {
      const auto& c = want[block];
      for (int i = 0; i < 3; ++i) CHECK(std::abs(color[i][8][16 * block + 8].item<int>() - c[i]) <= slack);
      CHECK(std::abs(gray[0][8][16 * block + 8].item<int>() - (0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2])) <=
            slack + 1);
    }
  };
  // Adobe's programs, and libjpeg with their marker, store how much light is left.
  check(jpeg(255 - inks), 3);
  std::string plain = jpeg(inks);  // without the marker: how much ink
  const auto adobe = plain.find("Adobe");
  REQUIRE(adobe != std::string::npos);
  plain.erase(adobe - 4, 16);
  check(plain, 3);

  const auto image = picture(3, 24, 40);
  std::string bytes = jpeg(image);
  const auto want = decode(bytes);
  bytes.insert(20, "xyz");  // behind the first marker segment, JFIF's
  CHECK(torch::equal(decode(bytes), want));
  bytes[bytes.size() - 20] = '\xFF';  // within the compressed data
  bytes[bytes.size() - 19] = '\xD9';
  CHECK_NAMES_FILE("is no JPEG picture that can be read", decode(bytes));
}
#endif

#if TREADLE_HAS_PNG && TREADLE_HAS_JPEG
TEST_CASE("a folder of pictures by class, in the order of the names") {
  const Folder folder;
  folder.write("pets/cats/b.PNG", png(picture(3, 4, 4)));
  folder.write("pets/cats/a.jpeg", jpeg(picture(3, 4, 4)));
  folder.write("pets/cats/notes.txt", "no picture");
  folder.write("pets/ants/deep/er/z.jpg", jpeg(picture(1, 4, 4)));
  folder.write("pets/dogs/x.png", "broken");
  folder.write("pets/readme.png", png(picture(3, 4, 4)));
  const td::data::ImageFolder pets(folder.path / "pets");
  CHECK((pets.classes() == std::vector<std::string>{"ants", "cats", "dogs"}));
  REQUIRE(pets.size() == 4);
  CHECK(pets.path(1).filename() == "a.jpeg");
  td::data::Loader loader{pets, {.batch_size = 3, .workers = 2}};
  auto it = loader.begin();
  CHECK((numbers_of(it->target) == Numbers{0, 1, 1}));
  CHECK(torch::equal(it->data[2], picture(3, 4, 4)));
  CHECK_SAYS(td::DataError, "dogs/x.png' is neither a JPEG nor a PNG picture", ++it);
  CHECK_SAYS(td::DataError, "cannot be listed", td::data::ImageFolder(folder.path / "none"));
  CHECK_SAYS(td::DataError, "there is no picture in", td::data::ImageFolder(folder.path / "pets/ants/deep/er"));
}
#endif

// ---- Clouds of points.

TEST_CASE("clouds of points keep their lengths") {
  const auto points = torch::arange(21.0).reshape({7, 3});
  const auto offsets = torch::tensor({0, 3, 3, 7});
  const td::data::PointClouds clouds({points, offsets, torch::tensor({5, 6, 8})});
  CHECK((clouds.lengths() == Numbers{3, 0, 4}));
  for (const int workers : {0, 2}) {
    td::data::Loader loader{clouds, {.batch_size = 3, .workers = workers}};
    const auto batch = *loader.begin();
    CHECK(torch::equal(batch.points, points));
    CHECK(torch::equal(batch.offsets, offsets));
    CHECK((numbers_of(batch.label) == Numbers{5, 6, 8}));
    CHECK(td::rows(batch) == 3);
    CHECK((numbers_of(batch.cloud_of_point()) == Numbers{0, 0, 0, 2, 2, 2, 2}));
  }
  td::data::Loader mixed{clouds, {.batch_size = 2, .seed = 1}, td::data::LengthBuckets(clouds.lengths())};
  auto it = mixed.begin();
  CHECK((numbers_of(it->offsets) == Numbers{0, 4, 7}));
  const auto make = [&](const at::Tensor& o, const at::Tensor& l) { return td::data::PointClouds({points, o, l}); };
  CHECK_SAYS(td::DataError, "2 offsets for 2 labels", make(torch::tensor({0, 7}), torch::tensor({1, 2})));
  CHECK_SAYS(td::DataError, "must go from 0 to the number of points, 7",
             make(torch::tensor({0, 8}), torch::tensor({1})));
  CHECK_SAYS(td::DataError, "fall from 5 to 2 at cloud 1", make(torch::tensor({0, 5, 2, 7}), torch::tensor({1, 2, 3})));
  CHECK_SAYS(td::DataError, "offsets int64", make(torch::tensor({0.F, 7.F}), torch::tensor({1})));
}

// ---- Streams.

namespace {

/// Counts to `size`; each epoch begins at another number.
struct Counting {
  std::int64_t count = 0;
  std::int64_t bad = -1;
  std::shared_ptr<std::int64_t> read = std::make_shared<std::int64_t>(0);
  struct Reader {
    const Counting* all;
    std::int64_t epoch;
    std::int64_t next_one = 0;
    std::optional<std::int64_t> next() {
      ++*all->read;
      if (next_one == all->bad) throw std::runtime_error("the tape is torn.");
      return next_one < all->count ? std::optional(1000 * epoch + next_one++) : std::nullopt;
    }
  };
  Reader open(std::int64_t epoch) const { return {this, epoch}; }
  td::data::Example prepare(std::int64_t number, td::data::KeyedGenerator& random) const {
    return {torch::full({1}, random.uniform()), number};
  }
};
struct Skipping : Counting {
  struct Reader : Counting::Reader {
    void skip(std::int64_t n) { next_one = std::min(next_one + n, all->count); }
  };
  Reader open(std::int64_t epoch) const { return {{this, epoch}}; }
};

template <class Loader>
std::vector<td::Batch> all(Loader&& loader, std::int64_t most = 1000) {
  std::vector<td::Batch> batches;
  for (const auto& batch : loader) {
    batches.push_back(batch);
    if (--most == 0) break;
  }
  return batches;
}
Numbers targets(const std::vector<td::Batch>& batches) {
  Numbers numbers;
  for (const auto& batch : batches)
    for (const auto i : numbers_of(batch.target)) numbers.push_back(i);
  return numbers;
}

}  // namespace

TEST_CASE("a stream gives the same batches for any number of workers and from any batch on, with and without skip") {
  const auto whole = all(td::data::StreamLoader{Counting{23}, {.batch_size = 4, .seed = 6}});
  REQUIRE(whole.size() == 6);
  CHECK(whole.back().target.numel() == 3);
  for (std::int64_t i = 0; i < 23; ++i) {
    td::data::KeyedGenerator random(6, 0, i);
    const auto& batch = whole[static_cast<std::size_t>(i / 4)];
    CHECK(batch.target[i % 4].item<std::int64_t>() == i);
    CHECK(batch.data[i % 4].item<float>() == static_cast<float>(random.uniform()));
  }
  const auto check = [&](auto stream, int workers) {
    for (std::int64_t stop = 0; stop <= 6; ++stop) {
      CAPTURE(stop);
      CAPTURE(workers);
      td::data::StreamLoader loader{stream, {.batch_size = 4, .seed = 6, .workers = workers}};
      loader.seek({0, stop});
      const auto rest = all(loader);
      REQUIRE(rest.size() == static_cast<std::size_t>(6 - stop));
      for (std::size_t k = 0; k < rest.size(); ++k) {
        CHECK(torch::equal(rest[k].data, whole[k + static_cast<std::size_t>(stop)].data));
        CHECK(torch::equal(rest[k].target, whole[k + static_cast<std::size_t>(stop)].target));
      }
      CHECK((loader.position() == Position{1, 0}));
      CHECK(all(loader, 1)[0].target[0].template item<std::int64_t>() == 1000);
      CHECK((loader.position() == Position{1, 1}));
    }
  };
  for (const int workers : {0, 1, 2, 4}) {
    check(Counting{23}, workers);
    check(Skipping{{23}}, workers);
  }
  Skipping skipping{{1'000'000}};
  td::data::StreamLoader far{skipping, {.batch_size = 4}};
  far.seek({0, 200'000});
  CHECK(targets(all(far, 1)).front() == 800'000);
  CHECK(*skipping.read == 4);
}

TEST_CASE("the last batch of a stream is known as the last, and the position does not run ahead of what was given") {
  const auto plain = [](auto&& next) { return next(); };
  const auto check = [&](auto&& loader, std::int64_t batches) {
    for (std::int64_t most = 1; most <= batches; ++most) {
      CAPTURE(most);
      loader.seek({2, 0});
      std::int64_t given = 0;
      td::detail::for_each_batch<true>(
          loader,
          [&](const td::Batch& batch, bool last) {
            CHECK(batch.target[0].item<std::int64_t>() == 2000 + 4 * given);
            ++given;
            CHECK(last == (given == batches));
            CHECK((loader.position() == Position{2, given}));
            return given < most;
          },
          plain);
      CHECK(given == most);
      CHECK((loader.position() == Position{2, most}));
    }
  };
  for (const int workers : {0, 2})
    for (const std::int64_t count : {22, 24}) {
      CAPTURE(workers);
      const td::data::StreamLoader loader{Counting{count}, {.batch_size = 4, .workers = workers}};
      check(td::data::StreamLoader(loader), 6);
      check(td::data::map_batches(td::data::StreamLoader(loader), [](td::Batch batch) { return batch; }), 6);
      check(td::data::prefetch(td::data::StreamLoader(loader), {.device = at::Device(at::kCPU)}), 6);
    }
  // A fault behind the last good batch is thrown in its turn.
  td::data::StreamLoader torn{Counting{20, 9}, {.batch_size = 4, .workers = 1}};
  auto it = torn.begin();
  ++it;
  CHECK(!it.is_last());
  CHECK((targets({*it}) == Numbers{4, 5, 6, 7}));
  CHECK((torn.position() == Position{0, 2}));
  CHECK_SAYS(td::DataError, "the tape is torn", ++it);
  CHECK((torn.position() == Position{0, 2}));
}

TEST_CASE("ranks deal a stream out like cards") {
  for (const std::int64_t count : {0, 1, 7, 8, 12})
    for (const bool drop_last : {false, true})
      for (const auto ends : {td::data::RaggedEnds::Join, td::data::RaggedEnds::Drop}) {
        CAPTURE(count);
        CAPTURE(drop_last);
        const auto whole =
            targets(all(td::data::StreamLoader{Counting{count}, {.batch_size = 6, .drop_last = drop_last}}));
        const std::int64_t used = ends == td::data::RaggedEnds::Drop ? static_cast<std::int64_t>(whole.size()) / 3 * 3
                                                                     : static_cast<std::int64_t>(whole.size());
        for (int rank = 0; rank < 3; ++rank) {
          Numbers want;
          for (std::int64_t i = rank; i < used; i += 3) want.push_back(whole[static_cast<std::size_t>(i)]);
          CHECK(targets(all(td::data::StreamLoader{Counting{count},
                                                   {.batch_size = 2,
                                                    .drop_last = drop_last,
                                                    .workers = 2,
                                                    .rank = rank,
                                                    .world_size = 3,
                                                    .ends = ends}})) == want);
        }
      }
}

TEST_CASE("a stream's faults come in their turn, and what a stream cannot do is refused") {
  for (const int workers : {0, 2}) {
    td::data::StreamLoader loader{Counting{20, 13}, {.batch_size = 4, .workers = workers}};
    Numbers seen;
    std::string said;
    try {
      for (const auto& batch : loader)
        for (const auto i : numbers_of(batch.target)) seen.push_back(i);
    } catch (const td::DataError& error) {
      said = error.what();
    }
    CHECK(seen.size() == 12);
    CHECK(said == "data::Loader: what follows sample 12 of the stream could not be loaded: the tape is torn.");
    CHECK(targets(all(loader, 2)).size() == 8);
  }
  td::data::StreamLoader wide{Counting{3}, {.batch_size = INT64_MAX, .world_size = 2}};
  CHECK_SAYS(td::ConfigError, "batch 1 was sought, before which there would be more than 2^63 samples",
             wide.seek({0, 1}));
  wide.seek({4, 0});
  CHECK((wide.sought() == Position{4, 0}));
  CHECK_SAYS(td::ConfigError, "cannot be shuffled", td::data::StreamLoader{Counting{3}, {.shuffle = true}});
  CHECK_SAYS(td::ConfigError, "RaggedEnds::Pad",
             td::data::StreamLoader{Counting{3}, {.ends = td::data::RaggedEnds::Pad}});
  CHECK_SAYS(td::ConfigError, "rank 1 of a world_size of 1", td::data::StreamLoader{Counting{3}, {.rank = 1}});
}
