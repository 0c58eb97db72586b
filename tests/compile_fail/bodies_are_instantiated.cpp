// SPDX-License-Identifier: Apache-2.0
// The runner stops after -fsyntax-only: sentences inside function bodies must be said all the same.
template <class T>
void body() {
  static_assert(sizeof(T) != sizeof(char), "said when the body is instantiated");
}

#if CASE == 0
inline void control() {
  body<int>();
}
#elif CASE == 1
// expect: said when the body is instantiated
inline void instantiates() {
  body<char>();
}
#endif
