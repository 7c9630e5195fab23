#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "storage/codec/codec_kernel_table.h"

namespace kvtrie {

// Instruction sets that the inner loops of the codecs are built for. All of them give the same
// bytes.
enum class KernelSet : std::uint8_t { kBaseline = 1, kAvx2 = 2, kAvx512 = 3 };
inline constexpr KernelSet kKernelSets[] = {KernelSet::kBaseline, KernelSet::kAvx2,
                                            KernelSet::kAvx512};
const char* KernelSetName(KernelSet set);

// Whether this machine can run the set.
bool HasKernelSet(KernelSet set);

// The set in use: the best that the machine has, unless another one was chosen.
KernelSet UsedKernelSet();
const CodecKernels& Kernels();

// Takes another set from the next call of a codec on. FailedPrecondition when the machine has it
// not. Thread-safe.
absl::Status UseKernelSet(KernelSet set);

}  // namespace kvtrie
