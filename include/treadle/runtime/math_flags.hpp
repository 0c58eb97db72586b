// SPDX-License-Identifier: Apache-2.0
// The process-wide TF32 switches, set for a scope and put back.
#pragma once

#include <ATen/Context.h>

#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// Holds TF32 on or off, for cuBLAS and cuDNN alike, while it lives.
///
/// The switches are process-wide and cuDNN's is on by default, so both ways are set, and only where they differ from
/// what is wanted: two trainers with different precisions may alternate.
class MathFlags {
 public:
  explicit MathFlags(bool tf32) {
    auto& context = at::globalContext();
    matmul_ = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    conv_ = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV);
    rnn_ = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN);
    changed_matmul_ = (matmul_ == at::Float32Precision::TF32) != tf32;
    changed_cudnn_ = (conv_ == at::Float32Precision::TF32) != tf32 || (rnn_ == at::Float32Precision::TF32) != tf32;
    if (changed_matmul_) context.setAllowTF32CuBLAS(tf32);
    if (changed_cudnn_) context.setAllowTF32CuDNN(tf32);
  }
  MathFlags(const MathFlags&) = delete;
  MathFlags& operator=(const MathFlags&) = delete;
  ~MathFlags() {
    if (changed_matmul_) restore_matmul();
    if (changed_cudnn_) restore_cudnn();
  }

 private:
  // LibTorch keeps an old and a new set of switches and throws when they disagree. The old setters keep both in step,
  // so they come first; the new one follows only if it was the new one that the program had used.
  void restore_matmul() const {
    auto& context = at::globalContext();
    context.setAllowTF32CuBLAS(matmul_ == at::Float32Precision::TF32);
    if (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) != matmul_)
      context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, matmul_);
  }
  void restore_cudnn() const {
    auto& context = at::globalContext();
    context.setAllowTF32CuDNN(conv_ == at::Float32Precision::TF32);
    if (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV) != conv_)
      context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV, conv_);
    if (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN) != rnn_)
      context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN, rnn_);
  }

  at::Float32Precision matmul_;
  at::Float32Precision conv_;
  at::Float32Precision rnn_;
  bool changed_matmul_;
  bool changed_cudnn_;
};

}  // namespace v0_1
}  // namespace treadle
