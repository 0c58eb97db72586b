// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

/// The middle one of `values`, of an even number the upper one; there must be at least one.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
