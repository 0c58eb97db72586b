// SPDX-License-Identifier: Apache-2.0
// What an observer may offer, in the order in which `fit` calls it, and how a near miss is caught.
#pragma once

#include <concepts>
#include <tuple>
#include <type_traits>
#include <utility>

#include "treadle/observe/events.hpp"

namespace treadle {
inline namespace v0_1 {
namespace observe {
namespace detail {

// Whether T has a member of this name, of whatever signature: a second base with the same name makes it ambiguous.
template <class T>
struct named_fit_begin {
  struct Other {
    int on_fit_begin;
  };
  struct Both : T, Other {};
  static constexpr bool value = !requires { &Both::on_fit_begin; };
};
template <class T>
struct named_step {
  struct Other {
    int on_step;
  };
  struct Both : T, Other {};
  static constexpr bool value = !requires { &Both::on_step; };
};
template <class T>
struct named_log {
  struct Other {
    int on_log;
  };
  struct Both : T, Other {};
  static constexpr bool value = !requires { &Both::on_log; };
};
template <class T>
struct named_epoch {
  struct Other {
    int on_epoch;
  };
  struct Both : T, Other {};
  static constexpr bool value = !requires { &Both::on_epoch; };
};
template <class T>
struct named_fit_end {
  struct Other {
    int on_fit_end;
  };
  struct Both : T, Other {};
  static constexpr bool value = !requires { &Both::on_fit_end; };
};

template <class T>
concept takes_fit_begin = requires(T& t, const RunInfo& info) {
  t.on_fit_begin(info);
};
template <class T>
concept takes_step = requires(T& t, const StepEvent& event) {
  t.on_step(event);
};
template <class T>
concept takes_log = requires(T& t, const LogEvent& event) {
  t.on_log(event);
};
template <class T>
concept takes_epoch = requires(T& t, const EpochEvent& event) {
  t.on_epoch(event);
};
template <class T>
concept takes_fit_end = requires(T& t, const FitResult& result) {
  t.on_fit_end(result);
};

template <class Result>
concept hook_result = std::is_void_v<Result> || std::same_as<Result, bool>;
/// Whether each hook that T has returns what a hook may.
template <class T>
concept gives_good_results = (!takes_fit_begin<T> ||
                              requires(T & t, const RunInfo& info) {
                                { t.on_fit_begin(info) } -> hook_result;
                              }) &&
                             (!takes_step<T> ||
                              requires(T & t, const StepEvent& event) {
                                { t.on_step(event) } -> hook_result;
                              }) &&
                             (!takes_log<T> ||
                              requires(T & t, const LogEvent& event) {
                                { t.on_log(event) } -> hook_result;
                              }) &&
                             (!takes_epoch<T> ||
                              requires(T & t, const EpochEvent& event) {
                                { t.on_epoch(event) } -> hook_result;
                              }) &&
                             (!takes_fit_end<T> || requires(T & t, const FitResult& result) {
                               { t.on_fit_end(result) } -> hook_result;
                             });

/// Checks one observer type: every member that is named like a hook must be callable as one.
template <class T>
struct check_observer {
  static_assert(std::is_class_v<T> && !std::is_final_v<T>,
                "treadle::observers: an observer must be a class that is not final; its hooks are looked up by name.");
  static_assert(!named_fit_begin<T>::value || takes_fit_begin<T>,
                "treadle::observers: on_fit_begin has the wrong signature or is not public; it is public and void "
                "on_fit_begin(const treadle::observe::RunInfo&), or bool to ask fit to go on (true) or stop (false).");
  static_assert(
      !named_step<T>::value || takes_step<T>,
      "treadle::observers: on_step has the wrong signature or is not public; it is public and void on_step(const "
      "treadle::observe::StepEvent&), or bool to ask fit to go on (true) or stop (false).");
  static_assert(
      !named_log<T>::value || takes_log<T>,
      "treadle::observers: on_log has the wrong signature or is not public; it is public and void on_log(const "
      "treadle::observe::LogEvent&), or bool to ask fit to go on (true) or stop (false).");
  static_assert(
      !named_epoch<T>::value || takes_epoch<T>,
      "treadle::observers: on_epoch has the wrong signature or is not public; it is public and void on_epoch(const "
      "treadle::observe::EpochEvent&), or bool to ask fit to go on (true) or stop (false).");
  static_assert(
      !named_fit_end<T>::value || takes_fit_end<T>,
      "treadle::observers: on_fit_end has the wrong signature or is not public; it is public and void on_fit_end(const "
      "treadle::FitResult&).");
  static_assert(gives_good_results<T>,
                "treadle::observers: a hook returns neither void nor bool; return bool to ask fit to go on (true) or "
                "stop (false), else void.");
  static_assert(takes_fit_begin<T> || takes_step<T> || takes_log<T> || takes_epoch<T> || takes_fit_end<T>,
                "treadle::observers: a type without any hook; an observer has at least one of on_fit_begin, on_step, "
                "on_log, on_epoch, on_fit_end.");
  static constexpr bool value = true;
};

template <class T>
concept asks_for_gradients = requires {
  requires T::wants_gradients;
};

template <class T>
concept asks_for_every_rank = requires {
  requires std::remove_reference_t<T>::every_rank;
};

}  // namespace detail

/// A fixed set of observers, called in order after what they observe.
///
/// Of several ranks only rank 0 calls them, unless an observer has a member `static constexpr bool every_rank = true`.
/// A hook that returns bool stops `fit` with false. With a member `static constexpr bool wants_gradients = true` an
/// observer finds true (unscaled, averaged, with `ClipValue` already clamped) gradients in its `on_step`.
template <class... Observers>
class Set {
  static_assert((detail::check_observer<Observers>::value && ...));

 public:
  static constexpr bool wants_gradients = (detail::asks_for_gradients<Observers> || ...);

  Set() = default;
  explicit Set(Observers... observers) requires(sizeof...(Observers) > 0) : observers_(std::move(observers)...) {}

  /// Each returns false if an observer asks `fit` to stop.
  bool on_fit_begin(const RunInfo& info, int rank = 0) {
    return each(rank, [&](auto& o) {
      if constexpr (requires { o.on_fit_begin(info); })
        return go_on([&] { return o.on_fit_begin(info); });
      else
        return true;
    });
  }
  bool on_step(const StepEvent& event, int rank = 0) {
    return each(rank, [&](auto& o) {
      if constexpr (requires { o.on_step(event); })
        return go_on([&] { return o.on_step(event); });
      else
        return true;
    });
  }
  bool on_log(const LogEvent& event, int rank = 0) {
    return each(rank, [&](auto& o) {
      if constexpr (requires { o.on_log(event); })
        return go_on([&] { return o.on_log(event); });
      else
        return true;
    });
  }
  bool on_epoch(const EpochEvent& event, int rank = 0) {
    return each(rank, [&](auto& o) {
      if constexpr (requires { o.on_epoch(event); })
        return go_on([&] { return o.on_epoch(event); });
      else
        return true;
    });
  }
  bool on_fit_end(const FitResult& result, int rank = 0) {
    return each(rank, [&](auto& o) {
      if constexpr (requires { o.on_fit_end(result); })
        return go_on([&] { return o.on_fit_end(result); });
      else
        return true;
    });
  }

  /// The observer of type `Observer`.
  template <class Observer>
  Observer& get() {
    return std::get<Observer>(observers_);
  }

 private:
  template <class Call>
  static bool go_on(Call&& call) {
    if constexpr (std::is_same_v<decltype(call()), bool>)
      return call();
    else {
      call();
      return true;
    }
  }
  template <class F>
  bool each(int rank, F&& f) {
    bool go_on = true;  // every observer is told, whatever the one before said
    const auto tell = [&](auto& o) { return (rank != 0 && !detail::asks_for_every_rank<decltype(o)>) || f(o); };
    std::apply([&](auto&... o) { ((go_on = tell(o) && go_on), ...); }, observers_);
    return go_on;
  }

  [[no_unique_address]] std::tuple<Observers...> observers_;
};

}  // namespace observe

/// A set of observers for a `Trainer`, from values.
template <class... Observers>
observe::Set<Observers...> observers(Observers... given) {
  return observe::Set<Observers...>(std::move(given)...);
}

}  // namespace v0_1
}  // namespace treadle
