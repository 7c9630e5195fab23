#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "tests/gpu/cuda_fp8_cast.h"

namespace kvtrie::gpu {
namespace {

// Four numbers per thread: 8 bytes in, 4 out.
__global__ void Cast(const __nv_bfloat162* from, std::size_t quads, __nv_fp8x4_e4m3* to) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < quads) to[i] = __nv_fp8x4_e4m3(from[2 * i], from[2 * i + 1]);
}

}  // namespace

cudaError_t CastToFp8(const void* from, std::size_t count, void* to, cudaStream_t stream) {
  const std::size_t quads = count / 4;
  constexpr unsigned kThreads = 256;
  Cast<<<static_cast<unsigned>((quads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      static_cast<const __nv_bfloat162*>(from), quads, static_cast<__nv_fp8x4_e4m3*>(to));
  return cudaGetLastError();
}

}  // namespace kvtrie::gpu
