// SPDX-License-Identifier: Apache-2.0
// treadle-test: PYTHON TIMEOUT 300
// Weights in files: of models and trainers, for Python, and back under other names, shapes and dtypes.
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "support/doctest.hpp"
#include "support/folder.hpp"
#include "support/throws.hpp"
#include "support/tiny.hpp"
#include "treadle/snapshot/weights.hpp"
#include "treadle/treadle.hpp"

using namespace treadle_test;

namespace {

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
/// Parameters and buffers.
template <class Net>
State state(Net& net) {
  State all = weights(*net);
  all.merge(buffers(*net));
  return all;
}
State read(const std::filesystem::path& path) {
  State all;
  for (auto& [name, tensor] : td::SafetensorsFile(path).tensors()) all[name] = tensor.to(device());
  return all;
}
using Names = std::vector<std::string>;

/// A layer with a weight of its own or another's.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(at::Tensor shared = {}) {
    weight = register_parameter("weight", shared.defined() ? shared : at::randn({6, 6}));
    bias = register_parameter("bias", at::randn({6}));
  }
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Layer);
/// Two layers that share their weight, and a buffer.
struct TiedNetImpl : torch::nn::Module {
  Layer first = register_module("first", Layer());
  Layer last = register_module("last", Layer(first->weight));
  at::Tensor count = register_buffer("count", at::randint(9, {2}, at::kLong));
};
TORCH_MODULE(TiedNet);

}  // namespace

TEST_CASE("a model's weights go into a file and come back, whoever holds the model") {
  const Folder folder;
  const auto path = folder.path / "net.safetensors";
  auto net = make<TinyNet>(1);
  net->batch_norm->running_mean.fill_(3);
  net->batch_norm->num_batches_tracked.fill_(5);
  td::save_weights(net, path);
  CHECK(td::SafetensorsFile(path).metadata() == td::SafetensorsMetadata{{"format", "pt"}});
  CHECK(difference(read(path), state(net)).empty());
  auto other = make<TinyNet>(2);
  const auto weight = other->first->weight;
  CHECK(!difference(state(other), state(net)).empty());
  const auto report = td::load_weights(*other, path);
  CHECK(difference(state(other), state(net)).empty());
  CHECK(other->first->weight.is_same(weight));  // in place
  CHECK(weight.requires_grad());
  CHECK(report.complete());
  CHECK(report.loaded.size() == state(net).size());
  CHECK(report.text() == "loaded " + std::to_string(state(net).size()));
  auto third = make<TinyNet>(3);
  td::load_weights(third.ptr(), path);
  CHECK(difference(state(third), state(net)).empty());
  // A file of another precision.
  auto wide = make<TinyNet>(4);
  for (auto& parameter : wide->parameters()) parameter.set_data(parameter.to(at::kDouble));  // to() takes counters, too
  td::save_weights(wide, path);
  td::load_weights(net, path);
  CHECK((net->first->weight.scalar_type() == at::kFloat));
  CHECK(same_bits(net->first->weight.detach(), wide->first->weight.detach().to(at::kFloat)));
}

TEST_CASE("what does not fit is reported by name; strict changes nothing then") {
  const Folder folder;
  const auto path = folder.path / "w.safetensors";
  auto net = make<PlainNet>(1);
  const auto before = state(net);
  const auto put = [&](td::NamedTensors tensors) { td::save_safetensors(path, tensors); };
  put({{"first.weight", at::ones({8, 6})},
       {"first.bias", at::ones({7})},
       {"last.bias", at::ones({5}, at::kLong)},
       {"x", at::ones({1})}});
  CHECK_SAYS(
      td::SnapshotError,
      "w.safetensors' does not fit the model: loaded 1; missing 1: 'last.weight'; unexpected 1: 'x'; mismatched 2: "
      "'last.bias' (Long in the file, Float in the model), 'first.bias' ([7] in the file, [8] in the model); rename",
      td::load_weights(net, path));
  CHECK(difference(state(net), before).empty());
  const auto report = td::load_weights(net, path, {.strict = false});
  CHECK(report.loaded == Names{"first.weight"});
  CHECK(report.missing == Names{"last.weight"});
  CHECK(report.unexpected == Names{"x"});
  CHECK(report.mismatched.size() == 2);
  CHECK(report.table().find("missing     'last.weight'\nunexpected  'x'\nmismatched  'last.bias' (") !=
        std::string::npos);
  auto want = before;
  want["first.weight"] = at::ones({8, 6}, device());
  CHECK(difference(state(net), want).empty());

  td::NamedTensors many;
  for (int i = 100; i < 130; ++i) many.emplace_back("x" + std::to_string(i), at::ones({1}));
  put(many);
  CHECK_SAYS(td::SnapshotError, "'x119' and 10 more; rename", td::load_weights(net, path));

  // Other names: one by one, by prefix, and a prefix taken away or put before.
  put({{"module.a.weight", at::full({8, 6}, 2.)},
       {"module.a.bias", at::full({8}, 3.)},
       {"head", at::full({5, 8}, 4.)},
       {"module.last.bias", at::full({5}, 5.)}});
  td::load_weights(net, path, {.rename = {{"head", "last.weight"}, {"module.a.", "first."}, {"module.", ""}}});
  CHECK(difference(state(net), {{"first.weight", at::full({8, 6}, 2., device())},
                                {"first.bias", at::full({8}, 3., device())},
                                {"last.weight", at::full({5, 8}, 4., device())},
                                {"last.bias", at::full({5}, 5., device())}})
            .empty());
  put({{"weight", at::full({8, 6}, 6.)}, {"bias", at::full({8}, 7.)}});
  CHECK(td::load_weights(net, path, {.rename = {{"", "first."}}, .only = {"first.*"}}).loaded.size() == 2);
  CHECK(net->first->bias[0].item<float>() == 7);
  CHECK(net->last->bias[0].item<float>() == 5);
  CHECK_SAYS(td::SnapshotError, "its tensors 'bias' and 'weight' both become 'first.bias'",
             td::load_weights(net, path, {.rename = {{"weight", "first.bias"}, {"bias", "first.bias"}}}));

  // Only a part.
  put({{"first.weight", at::full({8, 6}, 8.)},
       {"first.bias", at::full({8}, 8.)},
       {"last.bias", at::full({5}, 8.)},
       {"y", at::ones({1})}});
  CHECK(td::load_weights(net, path, {.only = {"first.", "last.b?as"}}).loaded.size() == 3);
  CHECK(td::load_weights(net, path, {.strict = false, .only = {"first.bias"}}).complete());
  CHECK_SAYS(td::SnapshotError, "missing 1: 'last.weight'; rename", td::load_weights(net, path, {.only = {"last."}}));
  CHECK_SAYS(td::ConfigError, "LoadOptions::only has 'frist.', which fits no parameter",
             td::load_weights(net, path, {.only = {"frist."}}));
  CHECK_SAYS(td::SnapshotError, "was written by torch.save, and only safetensors files are read",
             td::load_weights(net, folder.write("x.pt", "PK\x03\x04 and so on")));
  // One that cannot be read is known before the first is changed: here a truth value that is neither.
  struct Flags : torch::nn::Module {
    at::Tensor a = register_parameter("a", at::zeros({1}));
    at::Tensor flags = register_buffer("flags", at::zeros({2}, at::kBool));
  } flagged;
  put({{"a", at::ones({1})}, {"flags", at::ones({2}, at::kBool)}});
  std::string bytes = bytes_of(path);
  bytes.back() = '\x02';
  CHECK_SAYS(td::SnapshotError, "holds other bytes than 0 and 1", td::load_weights(flagged, folder.write("y", bytes)));
  CHECK(flagged.a.item<float>() == 0);
}

TEST_CASE("tied weights are saved once, and either name loads them") {
  const Folder folder;
  const auto path = folder.path / "tied.safetensors";
  auto net = make<TiedNet>(1);
  td::save_weights(net, path);
  CHECK(td::SafetensorsFile(path).names() == Names{"count", "first.bias", "first.weight", "last.bias"});
  auto other = make<TiedNet>(2);
  CHECK(td::load_weights(other, path).complete());
  CHECK(difference(state(other), state(net)).empty());
  auto third = make<TiedNet>(3);
  CHECK(td::load_weights(third, path, {.rename = {{"first.weight", "last.weight"}}}).complete());
  CHECK(difference(state(third), state(net)).empty());
}

TEST_CASE("a trainer's file holds its fp32 masters, and loading goes through them to the weights") {
  const Folder folder;
  const auto path = folder.path / "masters.safetensors";
  const td::optim::Sgd rule{.learning_rate = 0.1};
  const auto policies = td::policies(td::precision::Bf16Weights{}, td::averaging::ExponentialAverage{});
  auto net = make<TinyNet>(1);
  td::Trainer trainer{net, CrossEntropy{}, rule, policies};
  trainer.step(make_batches({8, 8}));
  td::save_weights(trainer, path);
  auto saved = read(path);
  CHECK((net->second->weight.scalar_type() == at::kBFloat16));
  CHECK((saved.at("second.weight").scalar_type() == at::kFloat));
  CHECK(!same_bits(saved.at("second.weight"), saved.at("second.weight").to(at::kBFloat16).to(at::kFloat)));
  auto want = masters(trainer);
  want.merge(buffers(*net));
  CHECK(difference(saved, want).empty());

  auto other = make<TinyNet>(2);
  td::Trainer second{other, CrossEntropy{}, rule,
                     td::policies(td::precision::Bf16Weights{}, td::averaging::ExponentialAverage{},
                                  td::accumulation::AccumulateOver{.batches = 4})};
  CHECK(!second.accumulate(make_batch(8, 1)));  // a window is open
  CHECK(td::load_weights(second, path).complete());
  CHECK(!second.flush());
  CHECK(difference(masters(second), masters(trainer)).empty());
  CHECK(difference(weights(*other), weights(*net)).empty());
  CHECK(difference(buffers(*other), buffers(*net)).empty());
  CHECK(difference(state_of(second.averaging()), masters(second)).empty());
  // The file is one of plain models, too.
  auto plain = make<TinyNet>(3);
  td::load_weights(plain, path);
  CHECK(difference(weights(*plain), masters(trainer)).empty());
}

TEST_CASE("Python loads a .pt file with weights_only, and what Python saves so is named") {
  const Folder folder;
  auto net = make<TinyNet>(1);
  net->to(at::kCPU);
  td::save_weights(net, folder.path / "net.pt");
  td::save_weights(net, folder.path / "net.safetensors");
  td::detail::save_pt(folder.path / "odd.pt", {{"view", at::arange(1000).slice(0, 10, 14)},
                                               {"scalar", at::scalar_tensor(2.5)},
                                               {"none", at::empty({0, 3}, at::kHalf)},
                                               {"b", at::ones({3}, at::kBool)},
                                               {"w", at::full({2}, 0.5, at::kBFloat16)}});
  CHECK_SAYS(td::SnapshotError, "is of dtype UInt16, which has no name in a .pt file",
             td::detail::save_pt(folder.path / "odd2.pt", {{"a", at::ones({1}).to(at::kUInt16)}}));
  CHECK_SAYS(td::SnapshotError, "tensor 'a' is there twice",
             td::detail::save_pt(folder.path / "odd2.pt", {{"a", at::ones({1})}, {"a", at::ones({1})}}));
  CHECK(!std::filesystem::exists(folder.path / "odd2.pt"));
  std::ofstream(folder.path / "check.py") << R"py(
import json, os, struct, torch
got = torch.load("net.pt", weights_only=True)
assert type(got) is dict
raw = open("net.safetensors", "rb").read()
length, = struct.unpack("<Q", raw[:8])
header = json.loads(raw[8:8 + length])
assert header.pop("__metadata__") == {"format": "pt"}
assert got.keys() == header.keys()
for name, one in header.items():
    bits = raw[8 + length + one["data_offsets"][0]:8 + length + one["data_offsets"][1]]
    assert list(got[name].shape) == one["shape"] and not got[name].requires_grad
    assert bytes(got[name].contiguous().reshape(-1).view(torch.uint8).tolist()) == bits, name
odd = torch.load("odd.pt", weights_only=True)
assert odd["view"].tolist() == [10, 11, 12, 13] and odd["scalar"].shape == () and odd["scalar"] == 2.5
assert odd["none"].shape == (0, 3) and odd["none"].dtype == torch.float16 and odd["b"].dtype == torch.bool
assert odd["w"].dtype == torch.bfloat16 and odd["w"].tolist() == [0.5, 0.5]
assert os.path.getsize("odd.pt") < 4000
torch.save({"first.weight": torch.ones(1)}, "new.pt")
torch.save({"first.weight": torch.ones(1)}, "old.pt", _use_new_zipfile_serialization=False)
)py";
  const char* python = std::getenv("TREADLE_PYTHON");
  REQUIRE(python != nullptr);
  const int status =
      std::system(("cd '" + folder.path.string() + "' && '" + python + "' -B check.py >check.log 2>&1").c_str());
  INFO(bytes_of(folder.path / "check.log"));
  REQUIRE(status == 0);
  for (const char* name : {"new.pt", "old.pt", "net.pt"})
    CHECK_SAYS(td::SnapshotError, "convert it in Python with safetensors.torch.save_file(torch.load(",
               td::load_weights(net, folder.path / name));
}
