#pragma once

#include <cstddef>
#include <memory>

#include "gpu/device.h"

namespace kvtrie::gpu {

// The host twin: the processor as a device, which runs the kernels' bodies in loops, one call after
// the other. It is for tests, which have no other device everywhere; ResidualCodec does the same
// several times as fast.
//
// Memory beyond `memory_bytes`, all together, is Unavailable.
std::unique_ptr<Device> MakeHostDevice(std::size_t memory_bytes);

}  // namespace kvtrie::gpu
