// SPDX-License-Identifier: Apache-2.0
// Tensors in a file that Python's `torch.load(path, weights_only=True)` reads, as a dict of tensors by name.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <cstddef>
#include <exception>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/snapshot/durable_file.hpp"
#include "treadle/snapshot/safetensors.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Replaces the file `path` by a `.pt` file of `tensors`, or throws `SnapshotError` and leaves it as it was. All of
/// them are in the host's memory at once.
inline void save_pt(const std::filesystem::path& path, const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  AtomicFile atomic(path);
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  std::vector<at::Tensor> storages;
  std::unordered_map<const void*, std::string> ids;
  for (const auto& [name, tensor] : tensors) {
    if (at::isFloat8Type(tensor.scalar_type()) || at::isBarebonesUnsignedType(tensor.scalar_type()))
      throw SnapshotError("'" + path.string() + "' cannot be written: tensor " + shown(name) + " is of dtype " +
                          c10::toString(tensor.scalar_type()) + ", which has no name in a .pt file; save safetensors.");
    // A copy of exactly its size: the file holds whole storages, of which a view may be a small part.
    auto here = tensor.detach().cpu().contiguous().resolve_neg();
    if (here.storage().nbytes() != here.nbytes()) here = here.clone();
    if (!dict.insert(name, here).second)
      throw SnapshotError("'" + path.string() + "' cannot be written: tensor " + shown(name) +
                          " is there twice; give each a name of its own.");
    if (ids.emplace(here.unsafeGetTensorImpl(), std::to_string(storages.size())).second) storages.push_back(here);
  }
  // Lists and dicts without the tags that TorchScript puts around them, which weights_only refuses.
  std::string pickle;
  const auto id = [&](const at::Tensor& tensor) { return ids.at(tensor.unsafeGetTensorImpl()); };
  torch::jit::Pickler pickler([&](const char* bytes, std::size_t size) { pickle.append(bytes, size); }, nullptr,
                              nullptr, nullptr, id, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  // LibTorch's writer passes through C and ends the program if its destructor cannot write, so that it learns of no
  // error: the first one is kept, and thrown once the writer is gone.
  std::exception_ptr failed;
  const auto sink = [&](const void* bytes, std::size_t size) {
    try {
      if (!failed) atomic.file().write(bytes, size);
    } catch (...) {
      failed = std::current_exception();
    }
    return size;
  };
  {
    caffe2::serialize::PyTorchStreamWriter writer(sink);
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("byteorder", "little", 6);
    for (std::size_t i = 0; i < storages.size(); ++i)
      writer.writeRecord("data/" + std::to_string(i), storages[i].const_data_ptr(), storages[i].nbytes());
    writer.writeEndOfFile();
  }
  if (failed) std::rethrow_exception(failed);
  atomic.commit();
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
