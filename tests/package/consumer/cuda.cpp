// SPDX-License-Identifier: Apache-2.0
// Uses CUDA graphs, NCCL, the CUDA runtime and NVRTC: all of it must build from LibTorch's wheels without a
// CUDA toolkit.
#include <ATen/cuda/CUDAGraph.h>
#include <cuda_runtime.h>
#include <nvrtc.h>
#include <torch/cuda.h>

#include <cstdio>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <treadle/treadle.hpp>

static_assert(TREADLE_HAS_CUDA == 1 && TREADLE_HAS_NCCL == 1, "the wheels carry CUDA and NCCL");

int main() {
  int runtime = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess || runtime < 13000) return 1;

  // NVRTC compiles for an architecture that this machine need not have.
  nvrtcProgram program = nullptr;
  const char* source = "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }";
  if (nvrtcCreateProgram(&program, source, "twice.cu", 0, nullptr, nullptr) != NVRTC_SUCCESS) return 1;
  const char* options[] = {"--gpu-architecture=sm_90"};
  if (nvrtcCompileProgram(program, 1, options) != NVRTC_SUCCESS) return 1;
  std::size_t size = 0;
  if (nvrtcGetCUBINSize(program, &size) != NVRTC_SUCCESS || size == 0) return 1;
  nvrtcDestroyProgram(&program);

  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  if (nccl == nullptr) return 1;
  if (torch::cuda::is_available()) at::cuda::CUDAGraph graph;
  std::printf("runtime %d, cubin of %zu bytes\n", runtime, size);
  return 0;
}
