#include "gpu/cuda_device.h"

namespace kvtrie::gpu {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int) {
  return absl::UnavailableError("CUDA: this was built without it");
}

}  // namespace kvtrie::gpu
