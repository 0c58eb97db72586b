// SPDX-License-Identifier: Apache-2.0
// doctest beside LibTorch, whose logging header defines a CHECK of its own that ends the program.
#pragma once

#include <c10/util/Logging.h>
#undef CHECK
#include <doctest/doctest.h>
