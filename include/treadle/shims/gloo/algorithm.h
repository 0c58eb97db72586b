// SPDX-License-Identifier: Apache-2.0
// A stand-in for the Gloo header of this name: include/treadle/distributed/gloo.hpp says why and what is declared.
#pragma once
