// SPDX-License-Identifier: Apache-2.0
#include <treadle/version.hpp>
#if CASE == 1
// expect: the minor version is not 99
static_assert(treadle::version_minor == 99, "the minor version is not 99");
template <typename T>
void late(T) {
  static_assert(sizeof(T) == 0, "late");
}
#elif CASE == 2
// expect: found when the body is instantiated
template <typename T>
auto late(T) {
  static_assert(sizeof(T) == 0, "found when the body is instantiated");
}
inline void call() { late(1); }
#endif
