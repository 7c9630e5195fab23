#pragma once

#include <cstddef>

#include "absl/status/statusor.h"

namespace kvtrie::gpu {

// What a device does with the same bytes when it does next to nothing with them: seconds of the
// fastest of some rounds, by the device's own clock. Unavailable: no device, or built without CUDA.
struct CudaBaselines {
  double copy_on_device = 0;    // memory to memory
  double copy_to_device = 0;    // from pinned memory
  double copy_from_device = 0;  // to pinned memory
  double cast_to_fp8 = 0;       // bfloat16 to float8 e4m3, in a plain kernel
};
absl::StatusOr<CudaBaselines> MeasureCudaBaselines(std::size_t bytes);

}  // namespace kvtrie::gpu
