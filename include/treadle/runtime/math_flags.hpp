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
    // The state in which LibTorch starts and most programs stay: TF32 for cuDNN and not for cuBLAS.
    usual_ = matmul_ == at::Float32Precision::NONE && conv_ == at::Float32Precision::TF32 &&
             rnn_ == at::Float32Precision::TF32 && !tf32;
    if (usual_) [[likely]]
      context.setAllowTF32CuDNN(false);
    else
      set(tf32);
  }
  MathFlags(const MathFlags&) = delete;
  MathFlags& operator=(const MathFlags&) = delete;
  ~MathFlags() {
    if (usual_) [[likely]]
      at::globalContext().setAllowTF32CuDNN(true);
    else
      restore();
  }

 private:
  [[gnu::noinline]] void set(bool tf32) {
    auto& context = at::globalContext();
    changed_matmul_ = (matmul_ == at::Float32Precision::TF32) != tf32;
    changed_cudnn_ = (conv_ == at::Float32Precision::TF32) != tf32 || (rnn_ == at::Float32Precision::TF32) != tf32;
    if (changed_matmul_) context.setAllowTF32CuBLAS(tf32);
    if (changed_cudnn_) context.setAllowTF32CuDNN(tf32);
  }
  [[gnu::noinline]] void restore() const {
    if (changed_matmul_) restore_matmul();
    if (changed_cudnn_) restore_cudnn();
  }
  [[gnu::cold]] void restore_matmul() const {
    auto& context = at::globalContext();
    context.setAllowTF32CuBLAS(matmul_ == at::Float32Precision::TF32);
    if (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) != matmul_)
      context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, matmul_);
  }
  void restore_cudnn() const {
    const bool tf32 = conv_ == at::Float32Precision::TF32;
    at::globalContext().setAllowTF32CuDNN(tf32);
    if (conv_ != rnn_ || (!tf32 && conv_ != at::Float32Precision::NONE)) [[unlikely]]
      restore_cudnn_apart();
  }
  [[gnu::cold]] void restore_cudnn_apart() const {
    at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV, conv_);
    at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::RNN, rnn_);
  }

  at::Float32Precision matmul_;
  at::Float32Precision conv_;
  at::Float32Precision rnn_;
  bool usual_;
  bool changed_matmul_ = false;
  bool changed_cudnn_ = false;
};

}  // namespace v0_1
}  // namespace treadle
