#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "kvtrie/v1/types.pb.h"

namespace kvtrie {

// The only places where a status of the wire becomes one of ours. Codes have the same numbers; one
// that is out of range becomes Unknown.
absl::Status FromGrpc(const grpc::Status& status);
absl::Status FromItem(const v1::ItemStatus& status);

}  // namespace kvtrie
