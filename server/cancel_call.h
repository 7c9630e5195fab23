#pragma once

#include <grpc/grpc.h>
#include <grpcpp/server_context.h>

#include "absl/status/status.h"
#include "server/status_translation.h"

namespace kvtrie {

// Ends a call at once, with our status instead of CANCELLED, whatever waits to be sent.
// (TryCancel says CANCELLED only.)
inline void CancelCall(grpc::ServerContextBase& call, const absl::Status& status) {
  const grpc::Status translated = ToGrpc(status);
  grpc_call_cancel_with_status(call.c_call(),
                               static_cast<grpc_status_code>(translated.error_code()),
                               translated.error_message().c_str(), nullptr);
}

}  // namespace kvtrie
