// SPDX-License-Identifier: Apache-2.0
// Must be refused: case 1 compiles.
#if CASE == 1  // expect: anything
int one = 1;
#endif
