#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"

namespace kvtrie::gpu {

struct CublasLt;

// The matrix products of one stream, by cuBLASLt, which is loaded when it is first needed: a
// machine without it can run what was built with it. Not thread-safe.
class CudaProducts {
 public:
  // Unavailable: no cuBLASLt of this version, or it does not start.
  static absl::StatusOr<std::unique_ptr<CudaProducts>> Create();
  ~CudaProducts();
  CudaProducts(const CudaProducts&) = delete;
  CudaProducts& operator=(const CudaProducts&) = delete;

  // Ask for them on `stream` and return at once. `scratch`: memory of the device that nothing else
  // uses meanwhile. Unavailable: cuBLASLt has no algorithm for it.
  absl::Status Multiply(const IntegerProductArgs& args, void* scratch, std::size_t scratch_bytes,
                        cudaStream_t stream);
  absl::Status Multiply(const FloatProductArgs& args, void* scratch, std::size_t scratch_bytes,
                        cudaStream_t stream);

 private:
  // Of one shape: integers or not, batch, rows, in, out, bytes of scratch.
  using Key = std::array<std::size_t, 6>;
  struct Plan;
  // A product of column-major matrices, as cuBLASLt has them.
  struct Description;

  explicit CudaProducts(const CublasLt& library);
  absl::StatusOr<const Plan*> PlanOf(const Key& key, const Description& description);

  const CublasLt& library_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace kvtrie::gpu
