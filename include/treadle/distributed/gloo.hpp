// SPDX-License-Identifier: Apache-2.0
// Gloo, which moves CPU tensors between processes.
//
// LibTorch contains Gloo and exports ProcessGroupGloo, but its header includes Gloo's own headers, which LibTorch does
// not ship. `treadle/shims` declares the few names that it refers to, by pointer only: nothing is ever made of them
// here, so their layout does not matter. The folder is on the include path of the CMake target treadle::distributed,
// and only where LibTorch brings no Gloo headers.
#pragma once

#if !__has_include(<gloo/transport/device.h>)
#error \
    "treadle: Gloo's headers were not found; link the CMake target treadle::distributed, which brings what is needed."
#endif

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A Gloo backend for `world_size` ranks that meet in `store`.
inline c10::intrusive_ptr<c10d::Backend> make_gloo(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                                                   std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create_default(timeout);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, world_size, std::move(options));
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
