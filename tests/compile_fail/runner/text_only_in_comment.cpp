// SPDX-License-Identifier: Apache-2.0
// Must be refused: the text stands only in the comment on the faulty line, which a compiler may quote.
#if CASE == 1
int one = "text";  // expect: the text of this comment
#endif
