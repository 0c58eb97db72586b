// SPDX-License-Identifier: Apache-2.0
// Whether all ranks hold the same model.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <c10/util/StringUtil.h>

#include <sstream>
#include <string>
#include <vector>

#include "treadle/distributed/process_group.hpp"
#include "treadle/error.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// One line a tensor: name, dtype, sizes, layout in memory (which buckets follow), whether it is trained.
inline std::string list_shapes(const ParameterList& parameters, const BufferList& buffers) {
  std::ostringstream text;
  for (const auto& p : parameters)
    text << "parameter '" << p.name << "': " << p.model.scalar_type() << ' ' << p.model.sizes()
         << (p.model.is_contiguous() ? "" : c10::str(" with strides ", p.model.strides()))
         << (p.model.requires_grad() ? "" : ", frozen") << '\n';
  for (const auto& b : buffers)
    text << "buffer '" << b.name << "': " << b.tensor.scalar_type() << ' ' << b.tensor.sizes() << '\n';
  return text.str();
}

/// Throws `ConfigError`, on every rank, naming the first line of `options`, or tensor, in which a rank differs from
/// rank 0.
inline void require_same_shapes(ProcessGroup& group, const std::string& options, const ParameterList& parameters,
                                const BufferList& buffers) {
  const auto all = group.gather(options + list_shapes(parameters, buffers));
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    std::istringstream first(all[0]);
    std::istringstream other(all[r]);
    std::string want;
    std::string got;
    do {
      if (!std::getline(first, want)) want = "nothing more";
      if (!std::getline(other, got)) got = "nothing more";
    } while (want == got);
    throw ConfigError("parallelism::DistributedDataParallel: rank 0 has " + want + " where rank " + std::to_string(r) +
                      " has " + got + "; build the same model and policy on all ranks.");
  }
}

/// Throws `DistributedError` if after the broadcast the ranks' tensors are not the same numbers.
inline void require_identical(ProcessGroup& group, const std::vector<at::Tensor>& tensors) {
  if (group.world_size() == 1 || tensors.empty()) return;
  std::vector<at::Tensor> sums;
  for (const auto& tensor : tensors) {
    const auto real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
    sums.push_back(tensor.numel() == 0 ? at::zeros({}, at::kDouble) : real.to(at::kDouble).sum().cpu());
  }
  const auto mine = at::stack(sums).contiguous();
  const std::string bytes(static_cast<const char*>(mine.const_data_ptr()), mine.nbytes());
  for (const auto& other : group.gather(bytes))
    if (other != bytes)  // NaN has the same bits everywhere
      throw DistributedError(
          "parallelism::DistributedDataParallel: the ranks' models differ after rank 0's was broadcast; something else "
          "writes to the parameters while the trainer is made.");
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
