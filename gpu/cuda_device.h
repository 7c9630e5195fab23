#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "gpu/device.h"

namespace kvtrie::gpu {

// A CUDA device by its number among those that are visible. Coders may take four fifths of what is
// free of its memory now. Unavailable: this was built without CUDA; or there is no driver, no such
// device, one that kernels were not built for, or no cuBLASLt. The message says which.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int number);

}  // namespace kvtrie::gpu
