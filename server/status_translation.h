#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvtrie/v1/types.pb.h"

namespace kvtrie {

// The only place where our errors become those of the wire. Codes keep their numbers; a message
// that is not plain ASCII is escaped, since protobuf strings are UTF-8 and stored bytes need not
// be.
grpc::Status ToGrpc(const absl::Status& status);
void ToItemStatus(const absl::Status& status, v1::ItemStatus* item);

// The same error, with the field or item that it is about in front of its message.
absl::Status Within(absl::string_view where, const absl::Status& status);

}  // namespace kvtrie
