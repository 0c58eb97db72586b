// SPDX-License-Identifier: Apache-2.0
// The one way in which Treadle writes text. No torch here.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// What a text is. A `Progress` text replaces the one before it, and an empty one removes it; the others are whole
/// lines or blocks of lines, without a final newline.
enum class Severity { Info, Warning, Progress };

/// Takes every text that Treadle writes. Calls are serialized, so a sink needs no lock of its own.
using Sink = std::function<void(Severity, std::string_view)>;

namespace detail {

/// Info to standard output, warnings to standard error, progress rewritten in place on standard output.
class ConsoleSink {
 public:
  void operator()(Severity severity, std::string_view text) {
    if (severity == Severity::Progress) {
      if (text.empty() && !progress_shown_) return;
      write(stdout, "\r", text, "\x1b[K");
      progress_shown_ = !text.empty();
      return;
    }
    // A line that arrives while progress is shown takes its place; the next update draws the progress below it.
    if (std::exchange(progress_shown_, false)) write(stdout, "\r", "", "\x1b[K");
    write(severity == Severity::Warning ? stderr : stdout, "", text, "\n");
  }

 private:
  static void write(std::FILE* file, std::string_view before, std::string_view text, std::string_view after) {
    std::string whole;  // in one piece, so that lines of other processes do not fall into it
    whole.reserve(before.size() + text.size() + after.size());
    whole.append(before).append(text).append(after);
    std::fwrite(whole.data(), 1, whole.size(), file);
    std::fflush(file);
  }

  bool progress_shown_ = false;
};

struct SinkSlot {
  std::recursive_mutex mutex;  // recursive: a sink may call say() for the sink that it wraps
  std::shared_ptr<Sink> sink = std::make_shared<Sink>(ConsoleSink{});
  bool replaced = false;  // by the program
  bool speaks = true;     // of several ranks only one writes to the console
  std::string who;        // what the others begin with where they have to
};

inline SinkSlot& sink_slot() {
  static auto* slot = new SinkSlot;  // never destroyed: destructors of static objects may still write
  return *slot;
}

}  // namespace detail

/// Replaces the sink and returns the one before it; an empty function brings the console back.
inline Sink set_sink(Sink sink) {
  auto& slot = detail::sink_slot();
  const std::scoped_lock lock(slot.mutex);
  slot.replaced = static_cast<bool>(sink);
  if (!sink) sink = detail::ConsoleSink{};
  return *std::exchange(slot.sink, std::make_shared<Sink>(std::move(sink)));
}

/// Whether this process is the one that writes to the console, as rank 0 is; a sink of the program's own hears all.
/// `who` is what texts of another begin with that are written all the same: "rank 1 of 2: ".
inline void set_speaker(bool speaks, std::string who = {}) {
  auto& slot = detail::sink_slot();
  const std::scoped_lock lock(slot.mutex);
  slot.speaks = speaks;
  slot.who = std::move(who);
}

/// Gives `text` to the sink.
inline void write_text(Severity severity, std::string_view text) {
  auto& slot = detail::sink_slot();
  const std::scoped_lock lock(slot.mutex);
  if (!slot.speaks && !slot.replaced) return;
  const auto sink = slot.sink;  // stays alive if the call replaces the sink
  (*sink)(severity, text);
}

/// Writes a line, or a block of lines, for the user to read.
inline void say(std::string_view text) {
  write_text(Severity::Info, text);
}

/// Writes a sentence about something that the user should change.
inline void warn(std::string_view text) {
  write_text(Severity::Warning, text);
}

/// `warn` of what concerns this process alone, and is written whichever of several it is.
inline void warn_of_this_rank(std::string_view text) {
  auto& slot = detail::sink_slot();
  const std::scoped_lock lock(slot.mutex);
  const auto sink = slot.sink;
  (*sink)(Severity::Warning, slot.speaks ? std::string(text) : slot.who + std::string(text));
}

}  // namespace v0_1
}  // namespace treadle
