// SPDX-License-Identifier: Apache-2.0
// treadle-test: PYTHON TIMEOUT 300
// Safetensors files: what is written is what Python reads and the other way round, and no file does harm.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/doctest.hpp"
#include "support/folder.hpp"
#include "support/throws.hpp"
#include "treadle/snapshot/safetensors.hpp"
#include "treadle/testing/report.hpp"

namespace td = treadle;
using td::testing::detail::same_bits;
using treadle_test::Folder;

namespace {

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
/// The bytes of a file with this header and data, nothing checked.
std::string file_of(const std::string& json, const std::string& data = {}) {
  std::string bytes(8, '\0');
  const std::uint64_t length = json.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + data;
}
void run_python(const std::string& script, const std::filesystem::path& folder) {
  const char* python = std::getenv("TREADLE_PYTHON");
  REQUIRE(python != nullptr);
  std::ofstream(folder / "check.py") << script;
  const std::string where = "'" + folder.string() + "'";
  const std::string command = "cd " + where + " && '" + python + "' -B check.py >check.log 2>&1";
  const int status = std::system(command.c_str());
  INFO(bytes_of(folder / "check.log"));
  CHECK(status == 0);
}

const std::vector<std::pair<std::string, at::ScalarType>> dtypes{{"BOOL", at::kBool},
                                                                 {"U8", at::kByte},
                                                                 {"I8", at::kChar},
                                                                 {"F8_E5M2", at::kFloat8_e5m2},
                                                                 {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                 {"I16", at::kShort},
                                                                 {"U16", at::kUInt16},
                                                                 {"F16", at::kHalf},
                                                                 {"BF16", at::kBFloat16},
                                                                 {"I32", at::kInt},
                                                                 {"U32", at::kUInt32},
                                                                 {"F32", at::kFloat},
                                                                 {"F64", at::kDouble},
                                                                 {"I64", at::kLong},
                                                                 {"U64", at::kUInt64}};

/// 0 1 2 ... 14 in 5 rows of 3, of any dtype; parity for truth values.
at::Tensor counted(at::ScalarType dtype) {
  const auto numbers = at::arange(15, at::kFloat).reshape({5, 3});
  return dtype == at::kBool ? numbers.remainder(2).to(dtype) : numbers.to(dtype);
}
/// One tensor a dtype, and the odd ones.
td::NamedTensors all_kinds() {
  td::NamedTensors tensors;
  for (const auto& [name, dtype] : dtypes) tensors.emplace_back("kind." + name, counted(dtype));
  tensors.emplace_back("scalar", at::scalar_tensor(2.5));
  tensors.emplace_back("empty", at::empty({3, 0, 2}, at::kHalf));
  tensors.emplace_back("none", at::empty({0}, at::kLong));
  tensors.emplace_back("transposed", counted(at::kFloat).t());
  tensors.emplace_back("strided", counted(at::kDouble).slice(1, 0, 3, 2));
  tensors.emplace_back("negative", at::_neg_view(at::arange(4, at::kFloat)));
  tensors.emplace_back("trained", at::ones({2, 2}).requires_grad_(true));
  tensors.emplace_back("n\"\\\n\xC3\xA9", at::ones({1}, at::kByte));
  return tensors;
}

}  // namespace

TEST_CASE("what was saved comes back bit by bit, as views that stay alive and leave the file alone") {
  const Folder folder;
  const auto path = folder.path / "all.safetensors";
  const auto tensors = all_kinds();
  td::save_safetensors(path, tensors, {{"format", "pt"}, {"note", "two\nlines"}});
  const std::string written = bytes_of(path);
  {
    td::detail::DurableFile file(folder.path / "again");
    const auto done = td::detail::write_safetensors(file, tensors, {{"format", "pt"}, {"note", "two\nlines"}});
    file.finish();
    CHECK(bytes_of(folder.path / "again") == written);
    CHECK(done.bytes == static_cast<std::int64_t>(written.size()));
    CHECK(done.checksum == td::detail::checksum(written));
  }
  std::map<std::string, at::Tensor> kept;
  {
    const td::SafetensorsFile file(path);
    CHECK(file.metadata() == td::SafetensorsMetadata{{"format", "pt"}, {"note", "two\nlines"}});
    CHECK(file.names().size() == tensors.size());
    CHECK(file.contains("scalar"));
    CHECK(!file.contains("scalars"));
    CHECK(file.info("transposed").shape == std::vector<std::int64_t>{3, 5});
    CHECK((file.info("transposed").dtype == at::kFloat));
    CHECK(file.info("transposed").bytes == 60);
    CHECK_SAYS(td::SnapshotError, "all.safetensors' has no tensor 'scalars': ask for one of its names()",
               file.tensor("scalars"));
    for (auto& [name, tensor] : file.tensors()) kept[name] = tensor;
    // A second opening, and a copy of this one: the first has pages of its own, the second shares them.
    const td::SafetensorsFile other(path);
    const td::SafetensorsFile shared = file;
    kept["kind.F32"].fill_(7);
    CHECK(same_bits(other.tensor("kind.F32"), counted(at::kFloat)));
    CHECK(shared.tensor("kind.F32").data_ptr() == kept["kind.F32"].data_ptr());
    kept["kind.F32"].copy_(counted(at::kFloat));
  }
  for (const auto& one : tensors) {  // clang 14 captures no structured binding
    const auto& tensor = one.second;
    CAPTURE(one.first);
    const auto& got = kept.at(one.first);
    CHECK(got.sizes() == tensor.sizes());
    CHECK(got.is_contiguous());
    CHECK(!got.requires_grad());
    CHECK(same_bits(got, tensor.detach().contiguous().resolve_neg()));
  }
  CHECK(bytes_of(path) == written);
  // A file that was replaced meanwhile is still the old one for who has it open.
  td::save_safetensors(path, {});
  CHECK(same_bits(kept.at("kind.I64"), counted(at::kLong)));
  CHECK(bytes_of(path) == file_of("{}      "));
  CHECK(td::SafetensorsFile(path).names().empty());
  td::save_safetensors(path, {}, {{"a", ""}});
  CHECK(td::SafetensorsFile(path).metadata() == td::SafetensorsMetadata{{"a", ""}});
  // Large enough for several writes of each kind.
  const td::NamedTensors large{{"b", at::rand({1'500'000})}, {"a", at::rand({300'001})}, {"c", at::rand({7})}};
  td::save_safetensors(path, large);
  for (const auto& [name, tensor] : large) CHECK(same_bits(td::SafetensorsFile(path).tensor(name), tensor));
}

TEST_CASE("Python finds the same bytes where the format says, and its files are read") {
  const Folder folder;
  td::save_safetensors(folder.path / "from_cpp", all_kinds(), {{"format", "pt"}});
  run_python(R"py(
import json, struct, torch
KINDS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
         "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
         "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64}
raw = open("from_cpp", "rb").read()
length, = struct.unpack("<Q", raw[:8])
assert length % 8 == 0 and raw[8:9] == b"{"
header = json.loads(raw[8:8 + length])
data = raw[8 + length:]
assert header.pop("__metadata__") == {"format": "pt"}
assert list(header)[0] == "kind.U64" and list(header)[-1] == "kind.BOOL", list(header)
at, widths, got = 0, [], {}
for name, one in header.items():
    begin, end = one["data_offsets"]
    dtype = KINDS[one["dtype"]]
    assert begin == at and begin % dtype.itemsize == 0, name
    widths.append(dtype.itemsize)
    at = end
    empty = begin == end
    got[name] = (torch.empty(0, dtype=dtype) if empty else torch.frombuffer(bytearray(data[begin:end]), dtype=dtype)).reshape(one["shape"])
assert at == len(data) and widths == sorted(widths, reverse=True)
numbers = torch.arange(15, dtype=torch.float32).reshape(5, 3)
want = {"kind." + name: (numbers % 2 if name == "BOOL" else numbers).to(dtype) for name, dtype in KINDS.items()}
want |= {"scalar": torch.tensor(2.5), "empty": torch.empty(3, 0, 2, dtype=torch.float16), "none": torch.empty(0, dtype=torch.int64),
         "transposed": numbers.t(), "strided": numbers[:, ::2].double(), "negative": -torch.arange(4.0), "trained": torch.ones(2, 2),
         'n"\\\n\u00e9': torch.ones(1, dtype=torch.uint8)}
assert got.keys() == want.keys(), got.keys() ^ want.keys()
for name in want:
    assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
    bits = lambda t: t.contiguous().flatten().view(torch.uint8)
    assert torch.equal(bits(got[name]), bits(want[name])), name

# In another order than that of the header, without padding, the second tensor on an odd byte.
pieces = {"b": torch.tensor([7], dtype=torch.uint8), "a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "z": torch.tensor(-3)}
places, at = {}, 0
for name, t in pieces.items():
    places[name] = [at, at := at + t.numel() * t.element_size()]
names = {torch.uint8: "U8", torch.float32: "F32", torch.int64: "I64"}
text = json.dumps({name: {"dtype": names[pieces[name].dtype], "data_offsets": places[name], "shape": list(pieces[name].shape)}
                   for name in sorted(pieces)} | {"__metadata__": {"\u00e9": "\u00e8"}}).encode()
with open("from_python", "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(bytes(t.contiguous().flatten().view(torch.uint8).tolist()) for t in pieces.values()))
)py",
             folder.path);
  const td::SafetensorsFile file(folder.path / "from_python");
  CHECK(file.names() == std::vector<std::string>{"b", "a", "z"});
  CHECK(file.metadata() == td::SafetensorsMetadata{{"\xC3\xA9", "\xC3\xA8"}});
  CHECK(same_bits(file.tensor("a"), at::arange(6, at::kFloat).reshape({2, 3})));
  CHECK(reinterpret_cast<std::uintptr_t>(file.tensor("a").data_ptr()) % 4 == 0);
  CHECK(same_bits(file.tensor("b"), at::full({1}, 7, at::kByte)));
  CHECK(same_bits(file.tensor("z"), at::scalar_tensor(-3, at::kLong)));
}

TEST_CASE("a file that does not add up is refused with a sentence that names it and the tensor") {
  const Folder folder;
  const std::string a = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const std::string b = R"("b":{"dtype":"F32","shape":[],"data_offsets":[4,8]})";
  const auto open = [&](const std::string& bytes) { return td::SafetensorsFile(folder.write("x.st", bytes)); };
  CHECK(open(file_of("{" + a + "," + b + "}", std::string(8, 'x'))).names().size() == 2);
  const auto says = [&](const char* part, const std::string& json, std::size_t bytes = 8) {
    CAPTURE(json);
    CHECK_SAYS(td::SnapshotError, part, open(file_of(json, std::string(bytes, 'x'))));
    CHECK_SAYS(td::SnapshotError, "x.st'", open(file_of(json, std::string(bytes, 'x'))));
  };
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& places) {
    return R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + places + "}}";
  };
  // Where the bytes lie.
  says("its tensor 'b' has the data_offsets 4 and 8, and the file holds 7 bytes", "{" + a + "," + b + "}", 7);
  says("behind its last tensor are 1 bytes that are no tensor's", "{" + a + "," + b + "}", 9);
  says("its tensor 'w' overlaps another one", "{" + a + R"(,"w":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})");
  says("its tensor 'w' overlaps another one", "{" + a + R"(,"w":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4);
  says("its tensor 'w' has a hole of bytes before it",
       "{" + a + R"(,"w":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}})");
  says("its tensor 'w' has a hole of bytes before it", one("\"U8\"", "[7]", "[1,8]"));
  says("its tensor 'w' has the data_offsets 8 and 0", one("\"U8\"", "[8]", "[8,0]"));
  says("its tensor 'w' has 8 bytes, and its shape and dtype need 12", one("\"F32\"", "[3]", "[0,8]"));
  says("its tensor 'w' has 8 bytes, and its shape and dtype need 0", one("\"F32\"", "[3,0]", "[0,8]"));
  for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775807]", "[0,4611686018427387904,4]",
                            "[9223372036854775807,9223372036854775807,0]"})
    says("its tensor 'w' has a shape that no memory holds", one("\"I16\"", shape, "[0,8]"));
  says("its tensor 'a' is there twice", "{" + a + "," + a + "}", 4);
  // What the JSON holds.
  says("the tensor 'w' is of dtype 'C64', which Treadle does not know; convert it to F32 in Python.",
       one("\"C64\"", "[1]", "[0,8]"));
  for (const char* shape : {"[-1]", "[1.0]", "[\"1\"]", "[[1]]", "[null]", "1", "{}", "[18446744073709551615]", "[-0]"})
    says("its JSON has a shape that is none for the tensor 'w'", one("\"U8\"", shape, "[0,8]"));
  for (const char* places : {"[0,-1]", "[0,8.0]", "[0,[8]]", "{}", "8"})
    says("its JSON has a data_offsets that is none for the tensor 'w'", one("\"U8\"", "[8]", places));
  for (const char* places : {"[]", "[8]"})
    says("its JSON has no two data_offsets for the tensor 'w'", one("\"U8\"", "[8]", places));
  says("has more than two data_offsets for the tensor 'w'", one("\"U8\"", "[8]", "[0,8,8]"));
  for (const char* dtype : {"1", "[\"U8\"]", "null"})
    says("its JSON has a dtype that is none for the tensor 'w'", one(dtype, "[8]", "[0,8]"));
  says("has no data_offsets for the tensor 'w'", R"({"w":{"dtype":"U8","shape":[8]}})");
  says("has no dtype for the tensor 'w'", R"({"w":{}})");
  says("has the key 'shape' twice in the tensor 'w'", R"({"w":{"shape":[8],"shape":[8]}})");
  says("has an unknown key 'extra' in the tensor 'w'", R"({"w":{"extra":1}})");
  says("has no object for the tensor 'w'", R"({"w":[]})");
  says("has no object for the tensor 'w'", R"({"w":1})");
  for (const char* metadata : {"1", "[]", R"({"a":1})", R"({"a":[]})", R"({"a":{}})"})
    says("has a __metadata__ that is no object of strings", std::string(R"({"__metadata__":)") + metadata + "}");
  says("has the key '__metadata__' twice", R"({"__metadata__":{},"__metadata__":{}})");
  says("has the key 'a' twice", R"({"__metadata__":{"a":"","a":""}})");
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ",1";
  says("has more than 64 dimensions for the tensor 'w'", one("\"U8\"", "[" + many + "]", "[0,1]"), 1);
  says("cannot be parsed", R"({"w":)");
  says("cannot be parsed", "{} {}");
  says("cannot be parsed", "{}\n\x01");
  says("has a zero byte", std::string("{}\0", 3));
  says("ill-formed UTF-8", "{\"\xFF\":{}}");
  for (const char* deep : {"{\"w\":{\"shape\":[[", "{\"w\":{\"shape\":{", "{\"__metadata__\":{\"a\":[["})
    says("JSON", deep);
  // The first bytes.
  for (const auto& bytes :
       {std::string(), std::string("\x02\0\0\0\0\0\0", 7), file_of(""), file_of(" {}"), file_of("[]"),
        file_of("{}").substr(0, 9), std::string(8, '\xFF') + "{}", "\x03" + std::string(7, '\0') + "{}",
        std::string(6, '\0') + "\x01" + std::string(1, '\0') + "{}"})
    CHECK_SAYS(td::SnapshotError, "x.st' is no safetensors file, or is cut off in its header", open(bytes));
  for (const auto& bytes :
       {std::string("PK\x03\x04 and so on"), std::string("PK\x03\x04"), std::string("\x80\x02}q\0.", 6)})
    CHECK_SAYS(td::SnapshotError,
               "safetensors.torch.save_file(torch.load(\"x.pt\", weights_only=True), \"x.safetensors\")", open(bytes));
  // A header as long as the first bytes of a pickle is none.
  CHECK(open(file_of("{}" + std::string(0x0280 - 2, ' '))).names().empty());
  {
    const auto path = folder.write("x.st", file_of("{" + std::string(99, ' ')));
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).write("\x01\xE1\xF5\x05\0\0\0\0", 8);
    REQUIRE(::truncate(path.c_str(), 200'000'000) == 0);
    CHECK_SAYS(td::SnapshotError, "has a header of 100000001 bytes, and 100000000 are the most",
               td::SafetensorsFile(path));
  }
  CHECK_SAYS(td::SnapshotError, "cannot be read (No such file", td::SafetensorsFile(folder.path / "no"));
  CHECK_SAYS(td::SnapshotError, "its tensor 'w' is of dtype BOOL and holds other bytes than 0 and 1",
             open(file_of(one("\"BOOL\"", "[2]", "[0,2]"), "\x01\x02")).tensor("w"));
  // Empty tensors may share a place, and lie at the end.
  const auto empty = open(file_of(R"({"q":{"dtype":"F64","shape":[0],"data_offsets":[1,1]},
      "p":{"dtype":"F64","shape":[9223372036854775,0],"data_offsets":[1,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                                  "x"));
  CHECK(empty.names() == std::vector<std::string>{"a", "p", "q"});
  CHECK(empty.tensor("p").numel() == 0);
}

TEST_CASE("tensors that the format cannot hold are refused, and a failed save leaves the older file") {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  td::save_safetensors(path, {{"old", at::ones({3})}});
  const std::string before = bytes_of(path);
  const auto save = [&](const std::string& name, const at::Tensor& tensor) {
    td::save_safetensors(path, {{"x", at::ones({2})}, {name, tensor}});
  };
  CHECK_SAYS(td::SnapshotError, "w.safetensors.treadle-tmp' cannot be written: tensor 'x' is there twice",
             save("x", at::ones({2})));
  CHECK_SAYS(td::SnapshotError, "tensor 'y' is undefined; leave it out", save("y", {}));
  CHECK_SAYS(td::SnapshotError, "tensor 'y' is of dtype ComplexFloat, which safetensors does not have",
             save("y", at::zeros({2}, at::kComplexFloat)));
  CHECK_SAYS(td::SnapshotError, "tensor 'y' is sparse, quantized or without memory", save("y", at::eye(3).to_sparse()));
  CHECK_SAYS(td::SnapshotError, "tensor 'y' is sparse, quantized or without memory",
             save("y", at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)));
  CHECK_SAYS(td::SnapshotError, "tensor 'y' is sparse, quantized or without memory",
             save("y", at::ones({2}, at::kMeta)));
  CHECK_SAYS(td::SnapshotError, "tensor '__metadata__' has a name that the format keeps",
             save("__metadata__", at::ones({2})));
  CHECK_SAYS(td::SnapshotError, "is not UTF-8", save("\xFF", at::ones({2})));
  CHECK_SAYS(td::SnapshotError, "is not UTF-8", td::save_safetensors(path, {}, {{"a", "\xFF"}}));
  // A limit that is reached in the middle, in a process that has it for itself.
  // The tensors are made here: a child has none of the threads that would fill them.
  const td::NamedTensors large{{"a", at::ones({1'000'000})}, {"b", at::ones({1'000'000})}};
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{5 << 20, 5 << 20};
    std::string said = "no limit";
    if (::setrlimit(RLIMIT_FSIZE, &limit) == 0)
      said = treadle_test::thrown<td::SnapshotError>([&] { td::save_safetensors(path, large); });
    ::_exit(said.find("cannot be written (File too large): raise the limit") == std::string::npos ? 1 : 0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(bytes_of(path) == before);
  CHECK(td::detail::names_in(td::detail::FileHandle(::open(folder.path.c_str(), O_RDONLY | O_DIRECTORY)),
                             folder.path) == std::vector<std::string>{"w.safetensors"});
}
