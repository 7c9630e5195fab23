#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "server/worker/worker_context.h"

namespace kvtrie {

// One PutProfile call to a worker: gathers a profile within the shelf's bounds, and puts it there.
class ProfileCall {
 public:
  // The call owns itself from now on.
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(WorkerContext& context,
                                                          grpc::CallbackServerContext* call,
                                                          grpc::ByteBuffer* response);
};

}  // namespace kvtrie
