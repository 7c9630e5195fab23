#include "server/worker/codec_service.h"

#include <cstdint>
#include <functional>
#include <utility>

#include "server/bulk_call.h"
#include "server/profile_streams.h"
#include "server/rpc_metrics.h"
#include "server/worker/codec_stream.h"
#include "server/worker/fit_call.h"

namespace kvtrie {

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CodecService::Start(
    RpcMethod method, CodecOp op, grpc::CallbackServerContext* call) {
  return BulkCall::Start({context_.streams, context_.metrics}, method, call,
                         [this, op](std::function<void()> on_change) {
                           return CodecStream::Create(context_.host, op, std::move(on_change));
                         });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CodecService::Encode(
    grpc::CallbackServerContext* call) {
  return Start(RpcMethod::kEncode, CodecOp::kEncode, call);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CodecService::Decode(
    grpc::CallbackServerContext* call) {
  return Start(RpcMethod::kDecode, CodecOp::kDecode, call);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* CodecService::FitProfile(
    grpc::CallbackServerContext* call) {
  return FitCall::Start(context_, call);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* CodecService::PutProfile(
    grpc::CallbackServerContext* call, grpc::ByteBuffer* response) {
  ProfilePutHost host{
      .streams = context_.streams,
      .metrics = context_.metrics,
      .method = RpcMethod::kWorkerPutProfile,
      // Digests of megabytes are not for gRPC's threads.
      .post =
          [&chores = context_.chores](std::function<void()> work) {
            chores.Post(std::move(work));
            return true;
          },
      .begin = [&shelf = context_.shelf](
                   std::uint64_t total_bytes,
                   const ProfileId& expected) { return shelf.Begin(total_bytes, expected); }};
  return ProfilePutStream::Start(std::move(host), call, response);
}

grpc::ServerUnaryReactor* CodecService::Describe(grpc::CallbackServerContext* call,
                                                 const v1::DescribeRequest*,
                                                 v1::DescribeResponse* response) {
  RpcProbe probe(context_.metrics, RpcMethod::kDescribe);
  *response = context_.describe();
  probe.Finish(0);
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace kvtrie
