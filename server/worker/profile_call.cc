#include "server/worker/profile_call.h"

#include <cstdint>
#include <functional>
#include <utility>

#include "server/profile_streams.h"

namespace kvtrie {

grpc::ServerReadReactor<grpc::ByteBuffer>* ProfileCall::Start(WorkerContext& context,
                                                              grpc::CallbackServerContext* call,
                                                              grpc::ByteBuffer* response) {
  ProfilePutHost host{
      .streams = context.streams,
      .metrics = context.metrics,
      .method = RpcMethod::kWorkerPutProfile,
      // Digests of megabytes are not for gRPC's threads.
      .post =
          [&chores = context.chores](std::function<void()> work) {
            chores.Post(std::move(work));
            return true;
          },
      .begin = [&shelf = context.shelf](
                   std::uint64_t total_bytes,
                   const ProfileId& expected) { return shelf.Begin(total_bytes, expected); }};
  return ProfilePutStream::Start(std::move(host), call, response);
}

}  // namespace kvtrie
