#include "storage/codec/codec_kernels.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace kvtrie {

extern const CodecKernels kBaselineKernels;
extern const CodecKernels kAvx2Kernels;
extern const CodecKernels kAvx512Kernels;

namespace {

KernelSet BestKernelSet() {
  if (HasKernelSet(KernelSet::kAvx512)) return KernelSet::kAvx512;
  if (HasKernelSet(KernelSet::kAvx2)) return KernelSet::kAvx2;
  return KernelSet::kBaseline;
}

std::atomic<KernelSet>& UsedSet() {
  static std::atomic<KernelSet> used(BestKernelSet());
  return used;
}

}  // namespace

const char* KernelSetName(KernelSet set) {
  switch (set) {
    case KernelSet::kBaseline:
      return "baseline";
    case KernelSet::kAvx2:
      return "avx2";
    case KernelSet::kAvx512:
      return "avx512";
  }
  CheckFailed(__FILE__, __LINE__, "set is one of the enumeration");
}

bool HasKernelSet(KernelSet set) {
  if (set == KernelSet::kBaseline) return true;
#if defined(__x86_64__)
  // What codec/CMakeLists.txt compiles for. F16C and BMI came with AVX2, on every processor.
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (set == KernelSet::kAvx2) return has_avx2;
  return has_avx2 && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
#else
  return false;
#endif
}

KernelSet UsedKernelSet() { return UsedSet().load(std::memory_order_relaxed); }

const CodecKernels& Kernels() {
  switch (UsedKernelSet()) {
    case KernelSet::kBaseline:
      return kBaselineKernels;
    case KernelSet::kAvx2:
      return kAvx2Kernels;
    case KernelSet::kAvx512:
      return kAvx512Kernels;
  }
  CheckFailed(__FILE__, __LINE__, "the used set is one of the enumeration");
}

absl::Status UseKernelSet(KernelSet set) {
  if (!HasKernelSet(set)) {
    return absl::FailedPreconditionError(
        absl::StrCat("codec kernels: this machine has no ", KernelSetName(set)));
  }
  UsedSet().store(set, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace kvtrie
