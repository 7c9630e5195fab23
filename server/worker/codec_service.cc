#include "server/worker/codec_service.h"

#include "server/bulk_call.h"
#include "server/rpc_metrics.h"
#include "server/worker/codec_stream.h"
#include "server/worker/fit_call.h"
#include "server/worker/profile_call.h"

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
  return ProfileCall::Start(context_, call, response);
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
