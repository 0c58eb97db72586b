// SPDX-License-Identifier: Apache-2.0
// Must be refused: nothing is expected of case 1.
#if CASE == 1
int one = "text";
#endif
