// SPDX-License-Identifier: Apache-2.0
// Must be refused: the control does not compile, although case 1 fails as it should.
static_assert(sizeof(int) == 1, "the control is broken on purpose");
#if CASE == 1  // expect: case one
static_assert(sizeof(int) == 1, "case one");
#endif
