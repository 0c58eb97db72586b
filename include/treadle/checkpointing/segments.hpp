// SPDX-License-Identifier: Apache-2.0
// What the policies that recompute blocks have in common: which blocks make one checkpoint, in each thread of its own.
#pragma once

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "treadle/checkpointing/frame_backward.hpp"
#include "treadle/checkpointing/hook_engine.hpp"
#include "treadle/checkpointing/subject.hpp"
#include "treadle/invoke_block.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// A forward pass of one thread.
struct ForwardPass {
  std::weak_ptr<Frame> open;  // which takes further blocks
  std::weak_ptr<Frame> last;  // that saved something
  std::size_t blocks = 0;
  int depth = 0;                              // blocks within blocks
  bool scoped = false;                        // whether the objective is known to run
  std::shared_ptr<const ModelFacts> model{};  // that it runs with
};

/// Checkpoints of `length` blocks each; 0 stands for the square root of how many blocks the pass before had.
class Segments {
 public:
  Segments(const char* policy, std::int64_t length) : subject_(policy), length_(static_cast<std::size_t>(length)) {}
  /// A fresh one: a copied model's passes are its own.
  Segments(const Segments& other) : subject_(other.subject_.policy()), length_(other.length_) {}
  Segments& operator=(const Segments&) = delete;

  /// The block's result. Its activations are dropped, and computed again in the backward pass.
  template <class Block, class... Inputs>
  auto operator()(Block&& block, Inputs&&... inputs) {
    if (!at::GradMode::is_enabled()) return invoke_block(block, std::forward<Inputs>(inputs)...);
    subject_.note_use();
    auto& pass = passes_.here();
    const bool nested = pass.depth > 0 || is_recomputing();
    if (!nested && !pass.scoped && (pass.last.expired() || pass.last.lock()->closed())) end(pass);
    auto frame = nested ? nullptr : pass.open.lock();
    if (!frame || frame->closed())
      frame = std::make_shared<Frame>(subject_.policy(), pass.model ? pass.model : subject_.attached());
    if (!nested) pass.open = frame, ++pass.blocks;
    std::shared_ptr<BlockCall> call;
    const DepthScope deeper(pass.depth);
    try {
      auto result =
          frame->forward(call, pass.blocks, subject_, std::forward<Block>(block), std::forward<Inputs>(inputs)...);
      if (!nested && frame->calls() >= length()) pass.open.reset();
      if (!nested && frame->saved_anything()) pass.last = frame;
      return result;
    } catch (...) {
      frame->close();  // what it saved is of no use to a next block
      throw;
    }
  }
  template <class Region, class... Inputs>
  decltype(auto) cheap(std::string_view /*name*/, Region&& region, Inputs&&... inputs) {
    return invoke_block(std::forward<Region>(region), std::forward<Inputs>(inputs)...);
  }

  template <class Model>
  void attach(Model& model, at::Device device, const BufferList& buffers) {
    subject_.attach(model, device, buffers);
  }
  /// Held over an objective that is called with `model`.
  template <class Model>
  [[nodiscard]] auto pass(Model& model) {
    struct Scope {
      Segments& segments;
      ForwardPass& pass;
      Scope(Segments& s, std::shared_ptr<const ModelFacts> facts) : segments(s), pass(s.passes_.here()) {
        s.end(pass);
        s.subject_.note_pass();
        pass.scoped = true;
        pass.model = std::move(facts);
      }
      Scope(const Scope&) = delete;
      Scope& operator=(const Scope&) = delete;
      ~Scope() {
        segments.end(pass);
        pass.scoped = false;
        pass.model.reset();
      }
    };
    return Scope(*this, subject_.facts_of(model));
  }
  /// Whether what runs now has run before, and must leave no second trace.
  static bool is_repeating() { return is_recomputing(); }
  void begin_step() const {}
  void end_step() const { subject_.require_use("step.checkpoint(block, x)"); }
  void reset() {
    passes_.for_each([](ForwardPass& pass) { pass.open.reset(); });
  }

 private:
  void end(ForwardPass& pass) {
    pass.open.reset();
    if (pass.blocks > 0) blocks_ = pass.blocks;
    pass.blocks = 0;
  }
  std::size_t length() const {
    return length_ > 0 ? length_ : static_cast<std::size_t>(std::ceil(std::sqrt(static_cast<double>(blocks_.load()))));
  }

  CheckpointSubject subject_;
  std::size_t length_;
  std::atomic<std::size_t> blocks_ = 0;
  EachThread<ForwardPass> passes_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
