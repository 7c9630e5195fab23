#include "tests/gpu/cuda_baselines.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "gpu/cuda_status.h"
#include "storage/base/status_macros.h"
#include "tests/gpu/cuda_fp8_cast.h"

namespace kvtrie::gpu {
namespace {

constexpr int kRounds = 5;

struct Memory {
  void* first = nullptr;
  void* second = nullptr;
  void* pinned = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  ~Memory() {
    cudaFree(first);
    cudaFree(second);
    cudaFreeHost(pinned);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
  absl::Status Allocate(std::size_t bytes) {
    KV_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&first, bytes), "allocating"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&second, bytes), "allocating"));
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaHostAlloc(&pinned, bytes, cudaHostAllocDefault), "allocating"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&begin), "an event"));
    return CudaStatus(cudaEventCreate(&end), "an event");
  }

  template <typename Call>
  absl::StatusOr<double> Seconds(Call call) {
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin, nullptr), "an event"));
      KV_RETURN_IF_ERROR(CudaStatus(call(), "a baseline"));
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, nullptr), "an event"));
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end), "a baseline"));
      float milliseconds = 0;
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "a clock"));
      best = std::min(best, double{milliseconds} / 1e3);
    }
    return best;
  }
};

}  // namespace

absl::StatusOr<CudaBaselines> MeasureCudaBaselines(std::size_t bytes) {
  KV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(0), "choosing the device"));
  Memory memory;
  KV_RETURN_IF_ERROR(memory.Allocate(bytes));
  const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
    return memory.Seconds([=] { return cudaMemcpyAsync(to, from, bytes, kind, nullptr); });
  };
  CudaBaselines of;
  KV_ASSIGN_OR_RETURN(of.copy_to_device, copy(memory.first, memory.pinned, cudaMemcpyHostToDevice));
  KV_ASSIGN_OR_RETURN(of.copy_on_device,
                      copy(memory.second, memory.first, cudaMemcpyDeviceToDevice));
  KV_ASSIGN_OR_RETURN(of.copy_from_device,
                      copy(memory.pinned, memory.second, cudaMemcpyDeviceToHost));
  KV_ASSIGN_OR_RETURN(of.cast_to_fp8, memory.Seconds([&] {
    return CastToFp8(memory.first, bytes / 2, memory.second, nullptr);
  }));
  return of;
}

}  // namespace kvtrie::gpu
