// SPDX-License-Identifier: Apache-2.0
// A stand-in for the Gloo header of this name: include/treadle/distributed/gloo.hpp says why and what is declared.
#pragma once

namespace gloo {
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo
