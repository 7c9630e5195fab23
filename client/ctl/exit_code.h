#pragma once

#include <string_view>

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

// A mistake in the command line: InvalidArgument, marked, so that it is told from one in a file or
// of a server.
absl::Status UsageError(std::string_view what);

ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace kvtrie
