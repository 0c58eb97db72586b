// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {
namespace data {

/// Which part of a data set.
enum class Split { Train, Test };

}  // namespace data
}  // namespace v0_1
}  // namespace treadle
