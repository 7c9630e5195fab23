#pragma once

namespace kvtrie {

// Prints where and what, and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);

}  // namespace kvtrie

// Stops the process when a belief about our own code is false. Never for input, disk or network:
// those return absl::Status.
#define KV_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::kvtrie::CheckFailed(__FILE__, __LINE__, #condition))

// The same for checks that cost more than the work they guard.
#ifdef NDEBUG
#define KV_DCHECK(condition) static_cast<void>(sizeof(condition))
#else
#define KV_DCHECK(condition) KV_CHECK(condition)
#endif
