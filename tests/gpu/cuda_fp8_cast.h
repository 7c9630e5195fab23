#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace kvtrie::gpu {

// Casts so many bfloat16 to float8 e4m3 on `stream`, and returns at once.
cudaError_t CastToFp8(const void* from, std::size_t count, void* to, cudaStream_t stream);

}  // namespace kvtrie::gpu
