#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvtrie::gpu {

// What a call of CUDA came to; the message says what was being done. Unavailable: there is no
// usable device or driver, it is lost, or out of memory; the processor can do the work. Internal:
// the call was wrong.
absl::Status CudaStatus(cudaError_t error, absl::string_view doing);
absl::Status CublasStatus(cublasStatus_t status, absl::string_view doing);

}  // namespace kvtrie::gpu
