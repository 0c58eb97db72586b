// SPDX-License-Identifier: Apache-2.0
// Waiting until somebody listens on a port. No torch here.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Whether a connection to `address` comes about within `limit`; `reason` says why not.
inline bool connects(const addrinfo& address, std::chrono::milliseconds limit, std::string& reason) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int error = fd < 0 || ::connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (fd < 0) error = errno;
  if (error == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(limit.count()));
    error = ready == 0 ? ETIMEDOUT : errno;
    socklen_t size = sizeof(error);
    if (ready > 0) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (fd >= 0) ::close(fd);
  if (error != 0) reason = std::strerror(error);
  return error == 0;
}

/// Waits until something listens on `host`:`port`; returns "" then, and at `deadline` the reason of the last failure.
///
/// LibTorch's own client waits too, but writes pages of warnings while it does, and waits for twice its time limit.
inline std::string wait_until_reachable(const std::string& host, std::uint16_t port,
                                        std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  std::string reason = "there was no time to try";
  for (auto pause = milliseconds(5);; pause = std::min(2 * pause, milliseconds(250))) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status != 0) reason = ::gai_strerror(status);
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
    for (const auto* address = found; status == 0 && address != nullptr; address = address->ai_next) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left <= milliseconds(0)) break;
      if (connects(*address, std::min(left, milliseconds(5000)), reason)) return "";
    }
    if (std::chrono::steady_clock::now() + pause > deadline) return reason;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
