#include "tests/gpu/cuda_baselines.h"

namespace kvtrie::gpu {

absl::StatusOr<CudaBaselines> MeasureCudaBaselines(std::size_t) {
  return absl::UnavailableError("CUDA: this was built without it");
}

}  // namespace kvtrie::gpu
