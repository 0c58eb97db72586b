// SPDX-License-Identifier: Apache-2.0
// Observers whose hook is nearly one: never silently ignored.
#include <torch/nn/modules/linear.h>
#include <treadle/treadle.hpp>

#include <string>

namespace td = treadle;
using namespace td::observe;

template <class T>
constexpr auto checked = sizeof(Set<T>);

#if CASE == 0
struct Every {
  void on_fit_begin(const RunInfo&) {}
  void on_step(const StepEvent&) {}
  bool on_log(const LogEvent&) { return true; }
  bool on_epoch(const EpochEvent&) const { return true; }
  void on_fit_end(const td::FitResult&) {}
};
struct Loose {
  void on_log(LogEvent) {}                     // by value
  bool on_epoch(const auto&) { return true; }  // generic
  void on_step(const StepEvent&, int = 0) {}   // with a default
};
inline auto a = checked<Every> + checked<Loose>;
#elif CASE == 1
// expect: treadle::observers: on_fit_begin has the wrong signature
struct A {
  void on_fit_begin() {}
};
inline auto a = checked<A>;
// expect: treadle::observers: on_step has the wrong signature
struct B {
  void on_step(int) {}
};
inline auto b = checked<B>;
// expect: treadle::observers: on_log has the wrong signature
struct C {
  void on_log(const EpochEvent&) {}
};
inline auto c = checked<C>;
// expect: treadle::observers: on_epoch has the wrong signature
struct D {
  void on_epoch(const EpochEvent&, int) {}
};
inline auto d = checked<D>;
// expect: treadle::observers: on_fit_end has the wrong signature
struct E {
  void on_fit_end(td::FitResult&) {}
};
inline auto e = checked<E>;
// expect: treadle::observers: a type without any hook
struct F {
  void on_batch(const StepEvent&) {}
};
inline auto f = checked<F>;
// expect: treadle::observers: an observer must be a class that is not final
struct G final {
  void on_step(const StepEvent&) {}
};
inline auto g = checked<G>;
#elif CASE == 2
// A hook that is no function, beside a good one; one that is private by accident; and one of another observer's event.
// expect: treadle::observers: on_step has the wrong signature
struct A {
  int on_step = 0;
  void on_log(const LogEvent&) {}
};
inline auto a = checked<A>;
// expect: treadle::observers: on_log has the wrong signature or is not public; it is public and void on_log(const
class B {
  void on_log(const LogEvent&) {}

 public:
  void on_step(const StepEvent&) {}
};
inline auto b = checked<B>;
// expect: treadle::observers: on_epoch has the wrong signature
struct C {
  void on_epoch(std::string) {}
  void on_step(const StepEvent&) {}
};
inline auto c = checked<C>;
// expect: treadle::observers: an observer must be a class that is not final
inline auto d = checked<void (*)(const StepEvent&)>;
#elif CASE == 3
// Among good ones, through the function that users call.
// expect: treadle::observers: on_fit_end has the wrong signature
struct Good {
  void on_step(const StepEvent&) {}
};
struct Bad {
  void on_fit_end() {}
};
inline auto set = td::observers(Good{}, Bad{});
#elif CASE == 4
// expect: treadle::observers: a hook returns neither void nor bool
struct Counts {
  int on_log(const LogEvent&) { return 0; }
  void on_step(const StepEvent&) {}
};
inline auto a = checked<Counts>;
#elif CASE == 5
// expect: treadle::observers: a hook returns neither void nor bool
struct Points {
  Points* on_fit_end(const auto&) { return this; }
};
inline auto a = checked<Points>;
#elif CASE == 6
// expect: treadle::observers: a hook returns neither void nor bool
struct Refers {
  bool good = true;
  const bool& on_epoch(const EpochEvent&) { return good; }
};
inline auto a = checked<Refers>;
#endif
