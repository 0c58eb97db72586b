// SPDX-License-Identifier: Apache-2.0
// Data in memory: IDX files, hostile ones included, Fashion-MNIST, and the loader's order.
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <ranges>
#include <set>
#include <string>
#include <vector>

#include <treadle/data/fashion_mnist.hpp>
#include <treadle/data/idx.hpp>
#include <treadle/data/permutation.hpp>
#include <treadle/data/tensor_loader.hpp>
#include <treadle/loader.hpp>

#include "support/doctest.hpp"
#include "support/folder.hpp"
#include "support/skip.hpp"

namespace td = treadle;
namespace fs = std::filesystem;
using treadle_test::Folder;

namespace {

std::string big_endian(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string idx(char type, const std::vector<std::uint32_t>& sizes, const std::string& content) {
  std::string bytes{'\0', '\0', type, static_cast<char>(sizes.size())};
  for (const auto size : sizes) bytes += big_endian(size);
  return bytes + content;
}

/// The message of the DataError that reading `path` throws; empty if it throws none.
std::string fault(const fs::path& path) {
  try {
    td::data::read_idx(path);
  } catch (const td::DataError& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#if TREADLE_HAS_ZLIB
std::string gzip(const std::string& bytes) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string in = bytes;
  std::string out(deflateBound(&stream, in.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
#endif

td::Batch numbered(std::int64_t rows) {
  return {.data = torch::arange(rows * 3).reshape({rows, 3}).to(torch::kFloat), .target = torch::arange(rows)};
}

/// The targets of one pass, batch by batch.
template <class Loader>
std::vector<std::vector<std::int64_t>> pass(Loader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (const auto& batch : loader) {
    const auto target = batch.target.to(torch::kCPU).contiguous();
    batches.emplace_back(target.template data_ptr<std::int64_t>(),
                         target.template data_ptr<std::int64_t>() + target.numel());
    CHECK(torch::equal(batch.data.select(1, 0).to(torch::kCPU).to(torch::kLong), target * 3));
  }
  return batches;
}

}  // namespace

TEST_CASE("read_idx reads every element type, big endian") {
  const Folder folder;
  const auto bytes =
      td::data::read_idx(folder.write("u8", idx(0x08, {2, 3}, std::string("\x00\x01\x02\x7F\x80\xFF", 6))));
  CHECK(torch::equal(bytes, torch::tensor({{0, 1, 2}, {127, 128, 255}}, torch::kByte)));
  CHECK(torch::equal(td::data::read_idx(folder.write("i8", idx(0x09, {2}, "\xFF\x05"))),
                     torch::tensor({-1, 5}, torch::kChar)));
  CHECK(torch::equal(td::data::read_idx(folder.write("i16", idx(0x0B, {2}, std::string("\xFF\xFE\x01\x00", 4)))),
                     torch::tensor({-2, 256}, torch::kShort)));
  CHECK(torch::equal(td::data::read_idx(folder.write("i32", idx(0x0C, {1, 1}, big_endian(0x01020304)))),
                     torch::tensor({{0x01020304}}, torch::kInt)));
  CHECK(torch::equal(td::data::read_idx(folder.write("f32", idx(0x0D, {1}, std::string("\x3F\xC0\x00\x00", 4)))),
                     torch::tensor({1.5F})));
  CHECK(torch::equal(
      td::data::read_idx(folder.write("f64", idx(0x0E, {1}, std::string("\xC0\x04\x00\x00\x00\x00\x00\x00", 8)))),
      torch::tensor({-2.5}, torch::kDouble)));
  auto survives = td::data::read_idx(folder.write("u8", idx(0x08, {1}, "\x07")));
  survives += 1;  // the tensor owns its memory
  CHECK(survives.item<int>() == 8);
}

TEST_CASE("read_idx names the file and the fault of hostile files") {
  const Folder folder;
  const std::string good = idx(0x0B, {2, 3}, std::string(12, '\x01'));
  CHECK(fault(folder.write("good", good)).empty());

  SUBCASE("truncated anywhere") {
    for (std::size_t length = 0; length < good.size(); ++length) {
      const auto message = fault(folder.write("cut", good.substr(0, length)));
      CAPTURE(length);
      CHECK(has(message, "is truncated"));
      CHECK(has(message, (folder.path / "cut").string()));
    }
    CHECK(has(fault(folder.write("cut", good.substr(0, good.size() - 1))), "2x3, which is 12 bytes, but it has 11"));
  }
  SUBCASE("trailing bytes") {
    CHECK(has(fault(folder.write("long", good + "x")), "trailing bytes after the 2x3"));
  }
  SUBCASE("wrong magic, for each value of each byte") {
    for (int at = 0; at < 4; ++at) {
      for (int value = 0; value < 256; ++value) {
        std::string bad = good;
        if (bad[static_cast<std::size_t>(at)] == static_cast<char>(value)) continue;
        bad[static_cast<std::size_t>(at)] = static_cast<char>(value);
        CHECK_MESSAGE(!fault(folder.write("magic", bad)).empty(), "byte " << at << " = " << value);
      }
    }
    CHECK(has(fault(folder.write("magic", "PNG, certainly not IDX")), "is not an IDX file"));
    CHECK(has(fault(folder.write("magic", idx(0x0A, {2}, "ab"))), "is not an IDX file"));
    CHECK(has(fault(folder.write("magic", idx(0x08, {}, "a"))), "has 0 dimensions"));
    CHECK(has(fault(folder.write("magic", idx(0x08, std::vector<std::uint32_t>(9, 1), "a"))), "has 9 dimensions"));
  }
  SUBCASE("sizes") {
    CHECK(has(fault(folder.write("size", idx(0x08, {2, 0}, ""))), "size 0"));
    CHECK(has(fault(folder.write("size", idx(0x08, {0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}, "a"))),
              "sizes that do not fit"));
    CHECK(has(fault(folder.write("size", idx(0x0E, {0x80000000, 0x20000000}, "a"))), "sizes that do not fit"));
    // A claim of 2^62 bytes: refused by what is there, without taking memory for the claim.
    CHECK(has(fault(folder.write("size", idx(0x08, {0x80000000, 0x80000000}, "abc"))), "but it has 3"));
  }
  SUBCASE("not a file") {
    CHECK(has(fault(folder.path / "nothing"), "is not there"));
    CHECK(has(fault(folder.path), "is not a file"));
    CHECK(has(fault("/dev/zero"), "is not a file"));
  }
#if TREADLE_HAS_ZLIB
  SUBCASE("gzip") {
    std::string content(200000, '\0');
    for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>((i * i) >> 7);
    const std::string packed = gzip(idx(0x08, {200, 1000}, content));
    const auto tensor = td::data::read_idx(folder.write("good.gz", packed));
    REQUIRE(tensor.numel() == 200000);
    CHECK(std::equal(content.begin(), content.end(), reinterpret_cast<const char*>(tensor.data_ptr<std::uint8_t>())));
    for (std::size_t length = 2; length < packed.size();
         length += length < 40 || length + 40 > packed.size() ? 1 : 997) {
      CAPTURE(length);
      CHECK(has(fault(folder.write("cut.gz", packed.substr(0, length))), "is truncated"));
    }
    CHECK(has(fault(folder.write("long.gz", packed + "x")), "trailing bytes after its gzip data"));
    CHECK(has(fault(folder.write("inner.gz", gzip(idx(0x08, {2}, "abc")))), "trailing bytes after the 2 elements"));
    CHECK(has(fault(folder.write("short.gz", gzip(idx(0x08, {2}, "a")))), "is truncated: its header says 2"));
    std::string damaged = packed;
    damaged[damaged.size() - 8] ^= 1;  // in the checksum
    CHECK(has(fault(folder.write("sum.gz", damaged)), "is damaged"));
    for (std::size_t at = 2; at < packed.size(); at += at < 40 ? 1 : 501) {  // some flips are in fields without meaning
      damaged = packed;
      damaged[at] ^= 0x55;
      static_cast<void>(fault(folder.write("flip.gz", damaged)));
    }
    // Several members are one file, as gzip has it, wherever they meet.
    const std::string all = idx(0x08, {200, 1000}, content);
    for (const std::size_t at : {std::size_t{1}, std::size_t{12}, std::size_t{99'999}, all.size()})
      CHECK(torch::equal(td::data::read_idx(folder.write("two.gz", gzip(all.substr(0, at)) + gzip(all.substr(at)))),
                         tensor));
    CHECK(has(fault(folder.write("half.gz", gzip(all.substr(0, 12)) + "\x1F\x8B")), "is truncated"));
    CHECK(has(fault(folder.write("odd.gz", gzip(all.substr(0, 12)) + "\x1F and more")), "is damaged"));
    // 100 MB of zeros in 100 kB, which the header says: as much memory is taken as is allowed, and a piece.
    std::string zeros;
    for (int i = 0; i < 100; ++i) zeros += gzip(std::string(1'000'000, '\0'));
    const auto bomb = folder.write("bomb.gz", gzip(idx(0x08, {100, 1000, 1000}, "")) + zeros);
    const auto peak = [] {
      rusage used{};
      REQUIRE(::getrusage(RUSAGE_SELF, &used) == 0);
      return used.ru_maxrss;  // kB
    };
    folder.write("warm.gz", gzip(idx(0x08, {1000, 1000}, std::string(1'000'000, '\0'))));
    static_cast<void>(fault(folder.path / "warm.gz"));
    const auto before = peak();
    try {
      td::data::read_idx(bomb, 1'000'000);
      FAIL("a bomb must not be unpacked");
    } catch (const td::DataError& error) {
      CHECK(has(error.what(), "unpacks to more than 1000000 bytes"));
    }
    CHECK(peak() - before < 10'000);
    CHECK(td::data::read_idx(bomb).numel() == 100'000'000);
    CHECK(peak() - before > 50'000);  // the measure sees what the bound spares
    CHECK_THROWS_AS(td::data::read_idx(bomb, 0), td::ConfigError);
  }
#else
  SUBCASE("gzip without zlib") {
    CHECK(has(fault(folder.write("a.gz", "\x1F\x8B\x08")), "build Treadle with zlib"));
  }
#endif
}

TEST_CASE("fashion_mnist normalizes, and says how to get what is missing") {
  const Folder folder;
  try {
    td::data::fashion_mnist(folder.path);
    FAIL("a missing data set must throw");
  } catch (const td::DataError& error) {
    for (const char* part : {"dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist", "train-images-idx3-ubyte.gz",
                             "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"})
      CHECK(has(error.what(), part));
  }

  std::string images(2 * 28 * 28, '\0');
  images[0] = static_cast<char>(255);
  folder.write("t10k-images-idx3-ubyte", idx(0x08, {2, 28, 28}, images));
  folder.write("t10k-labels-idx1-ubyte", idx(0x08, {2}, std::string("\x09\x00", 2)));
  const auto batch = td::data::fashion_mnist(folder.path, td::data::Split::Test);
  CHECK((batch.data.sizes() == at::IntArrayRef{2, 1, 28, 28}));
  CHECK((batch.data.scalar_type() == torch::kFloat));
  CHECK(batch.data[0][0][0][0].item<float>() == doctest::Approx((1 - 0.2860) / 0.3530));
  CHECK(batch.data[1][0][27][27].item<float>() == doctest::Approx(-0.2860 / 0.3530));
  CHECK(torch::equal(batch.target, torch::tensor({9, 0})));

  const auto refused = [&](const std::string& part) {
    try {
      td::data::fashion_mnist(folder.path, td::data::Split::Test);
      return false;
    } catch (const td::DataError& error) {
      return has(error.what(), part);
    }
  };
  folder.write("t10k-labels-idx1-ubyte", idx(0x08, {2}, "\x0A\x01"));
  CHECK(refused("label above 9"));
  folder.write("t10k-labels-idx1-ubyte", idx(0x08, {3}, "\x01\x01\x01"));
  CHECK(refused("one label for each of the 2 images"));
  folder.write("t10k-images-idx3-ubyte", idx(0x08, {56, 28}, images));
  CHECK(refused("images of Fashion-MNIST"));
}

TEST_CASE("the permutation is fixed for ever, fair, and differs by seed and epoch") {
  // From an independent program: a change of these numbers changes everyone's runs.
  CHECK((td::data::permutation(10, 1, 0) == std::vector<std::int64_t>{4, 7, 5, 3, 8, 1, 0, 6, 9, 2}));
  CHECK((td::data::permutation(10, 1, 1) == std::vector<std::int64_t>{4, 8, 7, 5, 2, 9, 0, 3, 1, 6}));
  CHECK((td::data::permutation(10, 2, 0) == std::vector<std::int64_t>{7, 6, 3, 2, 4, 0, 1, 8, 5, 9}));
  CHECK(td::data::permutation(0, 1, 0).empty());
  std::map<std::vector<std::int64_t>, int> seen;
  for (int epoch = 0; epoch < 24000; ++epoch) ++seen[td::data::permutation(4, 5, epoch)];
  REQUIRE(seen.size() == 24);
  double chi_squared = 0;
  for (const auto& [order, times] : seen) chi_squared += (times - 1000.0) * (times - 1000.0) / 1000.0;
  CHECK(chi_squared < 49.7);  // 0.1 % of fair generators would exceed this
}

TEST_CASE("TensorLoader gives each row once an epoch, in an order of (seed, epoch) alone") {
  using Loader = td::data::TensorLoader<td::Batch>;
  static_assert(std::ranges::input_range<Loader> && td::loader<Loader> && td::sized_loader<Loader> &&
                td::reseedable_loader<Loader>);
  torch::manual_seed(3);
  const auto generator_before = at::detail::getDefaultCPUGenerator().get_state();

  td::data::TensorLoader plain{numbered(7), {.batch_size = 3}};
  CHECK(plain.size() == 3);
  CHECK(plain.rows() == 7);
  CHECK((pass(plain) == std::vector<std::vector<std::int64_t>>{{0, 1, 2}, {3, 4, 5}, {6}}));
  td::data::TensorLoader dropping{numbered(7), {.batch_size = 3, .drop_last = true}};
  CHECK(dropping.size() == 2);
  CHECK((pass(dropping) == std::vector<std::vector<std::int64_t>>{{0, 1, 2}, {3, 4, 5}}));
  td::data::TensorLoader exact{numbered(6), {.batch_size = 3}};
  CHECK(pass(exact).size() == 2);
  td::data::TensorLoader empty{numbered(0), {.batch_size = 3}};
  CHECK(empty.size() == 0);
  CHECK(pass(empty).empty());

  td::data::TensorLoader loader{numbered(103), {.batch_size = 10, .shuffle = true, .seed = 11}};
  td::data::TensorLoader same{numbered(103), {.batch_size = 10, .shuffle = true, .seed = 11}};
  td::data::TensorLoader other{numbered(103), {.batch_size = 10, .shuffle = true, .seed = 12}};
  const auto first = pass(loader);
  const auto second = pass(loader);
  CHECK(first.size() == 11);
  CHECK(first.back().size() == 3);
  std::set<std::int64_t> rows;
  for (const auto& batch : first) rows.insert(batch.begin(), batch.end());
  CHECK(rows.size() == 103);
  CHECK(first != second);
  CHECK(first != pass(other));

  for (const auto& batch : same) {  // left early: the next pass is a whole epoch again
    CHECK(batch.target.size(0) == 10);
    break;
  }
  CHECK(pass(same) == second);
  same.set_epoch(0);
  CHECK(pass(same) == first);
  auto one = same.begin();  // two passes at once do not disturb each other
  auto two = same.begin();
  ++one;
  ++one;
  ++two;
  CHECK(torch::equal((*one).target, same.order(1).narrow(0, 20, 10)));
  CHECK(torch::equal(two->target, same.order(2).narrow(0, 10, 10)));
  CHECK(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), generator_before));
}

TEST_CASE("TensorLoader takes any batch type and refuses what does not fit together") {
  struct Pair {
    torch::Tensor left, right;
    std::vector<torch::Tensor> more;
  };
  td::data::TensorLoader loader{Pair{torch::arange(5), torch::arange(5) + 10, {torch::arange(5) + 20}},
                                {.batch_size = 2, .shuffle = true, .seed = 4}};
  std::int64_t count = 0;
  for (const Pair& pair : loader) {
    count += pair.left.size(0);
    CHECK(torch::equal(pair.left + 10, pair.right));
    CHECK(torch::equal(pair.left + 20, pair.more.at(0)));
  }
  CHECK(count == 5);
  CHECK_THROWS_AS((td::data::TensorLoader{numbered(5), {.batch_size = 0}}), td::ConfigError);
  td::data::TensorLoader whole{numbered(5), {.batch_size = INT64_MAX}};  // all rows, whatever they are
  CHECK(whole.size() == 1);
  for (const auto& batch : whole) CHECK(td::rows(batch) == 5);
  CHECK_THROWS_WITH_AS((td::data::TensorLoader{td::Batch{torch::zeros({3, 2}), torch::zeros({4})}}),
                       doctest::Contains("different numbers of rows (3 and 4)"), td::DataError);
  CHECK_THROWS_AS((td::data::TensorLoader{td::Batch{torch::zeros({}), torch::zeros({1})}}), td::DataError);
  CHECK_THROWS_AS((td::data::TensorLoader{td::Batch{}}), td::DataError);
  const auto mixed = td::Batch{torch::zeros({3}), torch::zeros({3}, torch::kMeta)};
  CHECK_THROWS_WITH_AS((td::data::TensorLoader{mixed}), doctest::Contains("put all on one device"), td::DataError);
}

TEST_CASE("TensorLoader gives the same batches on a CUDA device") {
  TREADLE_REQUIRE_CUDA();
  const auto data = numbered(103);
  td::data::TensorLoader host{data, {.batch_size = 10, .shuffle = true, .seed = 11}};
  td::data::TensorLoader device{td::Batch{data.data.cuda(), data.target.cuda()},
                                {.batch_size = 10, .shuffle = true, .seed = 11}};
  CHECK((*device.begin()).data.is_cuda());
  device.set_epoch(0);
  CHECK(pass(device) == pass(host));
}
