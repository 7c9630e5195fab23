#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "kvtrie/v1/codec.grpc.pb.h"
#include "server/worker/worker_context.h"

namespace kvtrie {

using CodecServiceBase =
    v1::Codec::WithCallbackMethod_Describe<v1::Codec::WithRawCallbackMethod_Encode<
        v1::Codec::WithRawCallbackMethod_Decode<v1::Codec::WithRawCallbackMethod_FitProfile<
            v1::Codec::WithRawCallbackMethod_PutProfile<v1::Codec::Service>>>>>;

// What a worker serves: which call is which.
class CodecService final : public CodecServiceBase {
 public:
  explicit CodecService(WorkerContext& context) : context_(context) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Encode(
      grpc::CallbackServerContext* call) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Decode(
      grpc::CallbackServerContext* call) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* FitProfile(
      grpc::CallbackServerContext* call) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* PutProfile(grpc::CallbackServerContext* call,
                                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext* call,
                                     const v1::DescribeRequest* request,
                                     v1::DescribeResponse* response) override;

 private:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      RpcMethod method, CodecOp op, grpc::CallbackServerContext* call);

  WorkerContext& context_;
};

}  // namespace kvtrie
