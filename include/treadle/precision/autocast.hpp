// SPDX-License-Identifier: Apache-2.0
// LibTorch has no RAII autocast in C++; this is it.
#pragma once

#include <ATen/autocast_mode.h>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Runs autocast on `device` to `dtype` while it lives, and restores enabled, dtype and cache flags whatever happens.
///
/// The cast cache is cleared when the outermost guard ends, so that no weight cast before an update, or under no-grad,
/// is used after it. State is thread-local; `backward()` belongs outside the guard.
class Autocast {
 public:
  Autocast(at::DeviceType device, at::ScalarType dtype, bool cache = true)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device)),
        cache_(at::autocast::is_autocast_cache_enabled()),
        dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(cache);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  at::DeviceType device_;
  bool enabled_;
  bool cache_;
  at::ScalarType dtype_;
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
