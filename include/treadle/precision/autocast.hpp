// SPDX-License-Identifier: Apache-2.0
// LibTorch has no RAII autocast in C++; this is it, with its opposite.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace precision {

/// Runs autocast on `device` to `dtype` while it lives, and restores enabled, dtype and cache flags whatever happens.
///
/// The cast cache is cleared at both ends, whatever region the guard stands in, so that no weight cast before an
/// update, under no-grad or to another dtype is used after it. State is thread-local, the cache is the process's;
/// `backward()` belongs outside the guard.
class Autocast {
 public:
  Autocast(at::DeviceType device, at::ScalarType dtype, bool cache = true)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device)),
        cache_(at::autocast::is_autocast_cache_enabled()),
        dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(cache);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
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

/// Keeps autocast off, on every kind of device, while it lives, and turns on again what a caller had turned on; the
/// cast cache is then empty, since weights may have changed meanwhile.
///
/// Costs one look at a thread-local word where nothing is on.
class AutocastOff {
 public:
  AutocastOff() : on_(!c10::impl::tls_is_dispatch_keyset_excluded(c10::autocast_dispatch_keyset)) {
    if (on_) [[unlikely]]
      turn_off();
  }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;
  ~AutocastOff() {
    if (on_) [[unlikely]]
      restore();
  }

 private:
  [[gnu::cold, gnu::noinline]] void turn_off() { std::construct_at(&off_, c10::autocast_dispatch_keyset); }
  [[gnu::cold, gnu::noinline]] void restore() {
    std::destroy_at(&off_);
    at::autocast::clear_cache();
  }

  bool on_;
  union {
    c10::impl::ExcludeDispatchKeyGuard off_;  // lives if `on_`; an optional would be looked at twice
  };
};

}  // namespace precision
}  // namespace v0_1
}  // namespace treadle
