// SPDX-License-Identifier: Apache-2.0
// Run-time dispatch of every kind, which the check has to find in this object: else it could not find it in Treadle's.
#include <functional>

struct ControlBase {
  virtual ~ControlBase() = default;
  virtual int call(int x) = 0;
};
int control_virtual(ControlBase& object) {
  return object.call(1) + 1;
}
int control_virtual_tail(ControlBase& object) {
  return object.call(2);
}
int control_function(const std::function<int(int)>& f) {
  return f(3) + 1;
}
int control_pointer(int (*f)(int)) {
  return f(4) + 1;
}
int control_member(ControlBase& object, int (ControlBase::*f)(int)) {
  return (object.*f)(5) + 1;
}
