// SPDX-License-Identifier: Apache-2.0
// Must be refused: there is no case.
int control = 1;
