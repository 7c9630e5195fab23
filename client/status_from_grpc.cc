#include "client/status_from_grpc.h"

#include <string>

namespace kvtrie {
namespace {

absl::Status FromCode(std::int64_t code, const std::string& message) {
  if (code == 0) return absl::OkStatus();
  if (code < 0 || code > 16) return absl::UnknownError(message);
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  return FromCode(status.error_code(), status.error_message());
}

absl::Status FromItem(const v1::ItemStatus& status) {
  return FromCode(status.code(), status.message());
}

}  // namespace kvtrie
