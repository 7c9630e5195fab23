#pragma once

#include "absl/status/status.h"

namespace kvtrie {

// What scripts act on; listed in `kvtrie help`.
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kNotFound = 3,
  kUnreachable = 4,
};

ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace kvtrie
