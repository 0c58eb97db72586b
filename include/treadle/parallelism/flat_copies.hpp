// SPDX-License-Identifier: Apache-2.0
// Many tensors between devices, in few copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "treadle/runtime/flat_layout.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Copies a fixed list of tensors into twins of them, as often as asked: packed into chunks of one dtype, each of which
/// is one copy a target. The tensors' memory must stay where it is.
class FlatBroadcast {
 public:
  FlatBroadcast() = default;
  explicit FlatBroadcast(std::vector<at::Tensor> sources, std::int64_t chunk_bytes = 32 << 20) {
    std::map<at::ScalarType, Chunk*> open;
    chunks_.reserve(sources.size());  // pointers into it must stay
    for (auto& given : sources) {
      auto source = given.detach();
      const bool dense = source.layout() == at::kStrided && source.is_non_overlapping_and_dense();
      const auto bytes = static_cast<std::int64_t>(source.nbytes());
      Chunk* chunk = open[source.scalar_type()];
      if (!dense || bytes >= chunk_bytes || chunk == nullptr || chunk->bytes + bytes > chunk_bytes) {
        chunk = &chunks_.emplace_back();
        if (dense && bytes < chunk_bytes) open[source.scalar_type()] = chunk;
      }
      places_.emplace_back(chunk - chunks_.data(), chunk->sources.size());
      chunk->sources.push_back(std::move(source));
      chunk->bytes += bytes;
    }
    for (auto& chunk : chunks_) lay_out(chunk);
  }

  bool empty() const { return chunks_.empty(); }

  /// Makes twins of the tensors on `device`, in the list's order, which hold what `run` has copied.
  std::vector<at::Tensor> add_target(at::Device device) {
    std::vector<std::vector<at::Tensor>> twins;
    for (auto& chunk : chunks_) {
      auto& mine = twins.emplace_back();
      if (chunk.sources.size() == 1) {
        mine.push_back(at::empty_like(chunk.sources[0], at::TensorOptions().device(device)));
        chunk.targets.push_back(mine[0]);
        continue;
      }
      const auto flat = at::empty({chunk.size}, chunk.sources[0].options().device(device));
      for (std::size_t i = 0; i < chunk.sources.size(); ++i)
        mine.push_back(flat.as_strided(chunk.sources[i].sizes(), chunk.sources[i].strides(), chunk.offsets[i]));
      chunk.targets.push_back(flat);
    }
    std::vector<at::Tensor> all;
    for (const auto& [chunk, place] : places_) all.push_back(twins[static_cast<std::size_t>(chunk)][place]);
    return all;
  }

  /// Copies everything to every target, on the current streams.
  void run() {
    const at::NoGradGuard no_grad;
    for (auto& chunk : chunks_) {
      if (chunk.targets.empty()) continue;
      at::Tensor packed = chunk.sources[0];
      if (chunk.sources.size() > 1) {
        auto& staging = staging_[chunk.sources[0].scalar_type()];
        if (!staging.defined()) staging = at::empty({largest(chunk)}, chunk.sources[0].options());
        packed = staging.narrow(0, 0, chunk.size);
        at::cat_out(packed, chunk.pieces);
      }
      for (auto& target : chunk.targets) target.copy_(packed, /*non_blocking=*/true);
    }
  }

 private:
  struct Chunk {
    std::vector<at::Tensor> sources;
    std::vector<at::Tensor> pieces;  // flat views of them in the order of their memory, with what fills the gaps
    std::vector<std::int64_t> offsets;
    std::int64_t bytes = 0;
    std::int64_t size = 0;
    std::vector<at::Tensor> targets;
  };

  static void lay_out(Chunk& chunk) {
    if (chunk.sources.size() == 1) return;
    const auto gap = at::zeros({flat_alignment}, chunk.sources[0].options());
    for (const auto& source : chunk.sources) {
      chunk.offsets.push_back(chunk.size);
      chunk.pieces.push_back(source.as_strided({source.numel()}, {1}, source.storage_offset()));
      const auto room = flat_room(source.numel());
      if (room > source.numel()) chunk.pieces.push_back(gap.narrow(0, 0, room - source.numel()));
      chunk.size += room;
    }
  }
  std::int64_t largest(const Chunk& like) const {
    std::int64_t size = 0;
    for (const auto& chunk : chunks_)
      if (chunk.sources[0].scalar_type() == like.sources[0].scalar_type()) size = std::max(size, chunk.size);
    return size;
  }

  std::vector<Chunk> chunks_;
  std::vector<std::pair<std::ptrdiff_t, std::size_t>> places_;  // chunk and position of each tensor of the list
  std::map<at::ScalarType, at::Tensor> staging_;
};

/// Adds each of `parts`, all on one device, to its of `sums`, all on another, packed as above.
inline void add_packed(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& parts,
                       std::int64_t chunk_bytes = 32 << 20) {
  std::map<at::ScalarType, std::vector<std::size_t>> by_dtype;
  for (std::size_t i = 0; i < parts.size(); ++i) by_dtype[parts[i].scalar_type()].push_back(i);
  for (const auto& [dtype, indices] : by_dtype) {
    for (std::size_t begin = 0, end = 0; begin < indices.size(); begin = end) {
      std::vector<at::Tensor> pieces;
      std::vector<at::Tensor> targets;
      for (std::int64_t bytes = 0; end < indices.size() && (bytes == 0 || bytes < chunk_bytes); ++end) {
        pieces.push_back(parts[indices[end]].reshape({-1}));
        targets.push_back(sums[indices[end]]);
        bytes += static_cast<std::int64_t>(pieces.back().nbytes());
      }
      const auto packed =
          (pieces.size() == 1 ? pieces[0] : at::cat(pieces)).to(sums.front().device(), /*non_blocking=*/true);
      std::int64_t offset = 0;
      for (std::size_t k = 0; k < pieces.size(); ++k) {
        const auto size = targets[k].numel();
        pieces[k] = packed.narrow(0, offset, size).view(targets[k].sizes());
        offset += size;
      }
      at::_foreach_add_(targets, pieces);
    }
  }
}

/// Adds each of `parts`, all on one device, to its of `sums`, all on one device.
inline void add_pairwise(const std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& parts) {
  if (parts.empty()) return;
  if (parts.front().device() == sums.front().device())
    at::_foreach_add_(sums, parts);
  else
    add_packed(sums, parts);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
