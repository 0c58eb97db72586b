// SPDX-License-Identifier: Apache-2.0
// Must be refused: case 1 fails, but with another sentence.
#if CASE == 1  // expect: this sentence is never printed
static_assert(sizeof(int) == 1, "another sentence");
#endif
