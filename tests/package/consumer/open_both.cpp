// SPDX-License-Identifier: Apache-2.0
// Links one shared object and opens the other: both carry Treadle, and one LibTorch serves them.
#include <dlfcn.h>

#include <cstdio>

#include "one_torch.hpp"

extern "C" double first();

int main() {
  const double linked = first();
  void* handle = dlopen(SECOND, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  auto* second = reinterpret_cast<double (*)()>(dlsym(handle, "second"));
  if (second == nullptr) return 1;
  const double opened = second();
  std::printf("losses %.9g %.9g\n", linked, opened);
  return linked == opened && linked > 0 && one_torch() ? 0 : 1;
}
