#include "client/ctl/exit_code.h"

#include "absl/strings/cord.h"

namespace kvtrie {
namespace {

constexpr char kUsageMark[] = "kvtrie/usage";

}  // namespace

absl::Status UsageError(std::string_view what) {
  absl::Status status = absl::InvalidArgumentError(absl::string_view(what.data(), what.size()));
  status.SetPayload(kUsageMark, absl::Cord());
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.GetPayload(kUsageMark).has_value()) return ExitCode::kUsage;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kNotFound:
      return ExitCode::kNotFound;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return ExitCode::kUnreachable;
    default:
      return ExitCode::kFailed;
  }
}

}  // namespace kvtrie
