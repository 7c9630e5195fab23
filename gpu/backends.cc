#include "gpu/backends.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda_device.h"
#include "gpu/device_coder.h"
#include "storage/base/status_macros.h"

namespace kvtrie::gpu {
namespace {

absl::StatusOr<std::unique_ptr<const CodecBackend>> MakeCudaBackend() {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, MakeCudaDevice(0));
  std::unique_ptr<const CodecBackend> backend = MakeDeviceBackend("cuda", std::move(device));
  // A device that cannot do this much is no choice.
  KV_RETURN_IF_ERROR(backend->Probe());
  return backend;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const CodecBackend>> MakeBackend(std::string_view name) {
  if (name == "cpu") return CpuBackend();
  if (name != "auto" && name != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("backend \"", std::string(name), "\": must be auto, cpu or cuda"));
  }
  absl::StatusOr<std::unique_ptr<const CodecBackend>> cuda = MakeCudaBackend();
  if (!cuda.ok() && name == "auto") return CpuBackend();
  return cuda;
}

}  // namespace kvtrie::gpu
