// SPDX-License-Identifier: Apache-2.0
// What every test program would otherwise compile again: 12 s each. Treadle's own headers stay out, so that
// an edit rebuilds only tests.
#pragma once

#include <torch/torch.h>

#include "support/doctest.hpp"
