// SPDX-License-Identifier: Apache-2.0
// A translation unit, or a shared object, with a trainer of its own inside.
#include "train.hpp"

#ifndef UNIT
#define UNIT unit
#endif
extern "C" double UNIT() {
  return train();
}
