#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "storage/codec/block_coder.h"

namespace kvtrie::gpu {

// What mains take for --backend: "cpu"; "cuda", the first CUDA device; or "auto", which is cuda
// where there is a usable device, and cpu elsewhere. InvalidArgument: another name. Unavailable:
// there is no usable device; the message says why.
absl::StatusOr<std::unique_ptr<const CodecBackend>> MakeBackend(std::string_view name);

}  // namespace kvtrie::gpu
