// SPDX-License-Identifier: Apache-2.0
// Precompiled for the compile-fail tests. Not torch/torch.h: loading it takes 4.9 s a case, what a model needs
// takes 2.7 s.
#include <torch/nn/modules/linear.h>
#if __has_include(<treadle/treadle.hpp>)
#include <treadle/treadle.hpp>
#endif
