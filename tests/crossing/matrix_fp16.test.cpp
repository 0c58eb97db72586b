// SPDX-License-Identifier: Apache-2.0
// treadle-test: TIMEOUT 1800
#include "crossing/matrix.hpp"

namespace matrix = treadle_test::matrix;

TEST_CASE("the crossing matrix in Fp16") {
  CHECK(matrix::run_precision<matrix::Precision::Fp16>() >= 3);
}
