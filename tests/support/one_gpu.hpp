// SPDX-License-Identifier: Apache-2.0
// Ranks that share the first GPU: NCCL takes two processes on one device for a mistake, unless each calls itself
// another host.
#pragma once

#include <cstdlib>

namespace treadle_test {

/// Makes a rank, before its first communicator, another host than the other ranks; other processes it leaves alone.
inline const bool hosts_differ = [] {
  const char* rank = std::getenv("RANK");
  if (rank != nullptr) {
    ::setenv("NCCL_HOSTID", rank, 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  }
  return true;
}();

}  // namespace treadle_test
