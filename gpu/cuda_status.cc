#include "gpu/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace kvtrie::gpu {

absl::Status CudaStatus(cudaError_t error, absl::string_view doing) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat("CUDA: ", doing, ": ", cudaGetErrorString(error), " (",
                                           cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidResourceHandle:
      return absl::InternalError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status CublasStatus(cublasStatus_t status, absl::string_view doing) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message =
      absl::StrCat("cuBLASLt: ", doing, ": status ", static_cast<int>(status));
  return status == CUBLAS_STATUS_INVALID_VALUE ? absl::InternalError(message)
                                               : absl::UnavailableError(message);
}

}  // namespace kvtrie::gpu
