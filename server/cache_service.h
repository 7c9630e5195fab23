#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>

#include "absl/status/status.h"
#include "kvtrie/v1/cache.grpc.pb.h"
#include "server/engine_put_host.h"
#include "server/local_lane_server.h"
#include "server/service_context.h"

namespace kvtrie {

// All methods by callbacks, those with bulk bytes on the wire form of their messages.
using CacheServiceBulk = v1::Cache::WithRawCallbackMethod_Fetch<
    v1::Cache::WithRawCallbackMethod_Put<v1::Cache::WithRawCallbackMethod_PutProfile<
        v1::Cache::WithRawCallbackMethod_GetProfile<v1::Cache::Service>>>>;
using CacheServiceBase = v1::Cache::WithCallbackMethod_RegisterModel<
    v1::Cache::WithCallbackMethod_ListProfiles<v1::Cache::WithCallbackMethod_DeleteProfile<
        v1::Cache::WithCallbackMethod_Similar<v1::Cache::WithCallbackMethod_Lookup<
            v1::Cache::WithCallbackMethod_Touch<v1::Cache::WithCallbackMethod_Pin<
                v1::Cache::WithCallbackMethod_Unpin<v1::Cache::WithCallbackMethod_Delete<
                    v1::Cache::WithCallbackMethod_SetRetention<v1::Cache::WithCallbackMethod_Watch<
                        v1::Cache::WithCallbackMethod_OpenLocalLane<CacheServiceBulk>>>>>>>>>>>>;

// The data plane. Each method is check, call, translate; the streams are in their own files.
// Nothing blocks in a reaction of gRPC: what may wait for the disk runs on the engine's threads.
// The streams with bulk bytes work on the wire form of their messages, so that no byte of a block
// is copied into a protobuf string.
class CacheService final : public CacheServiceBase {
 public:
  // `lane` may be null: the shared-memory lane is off.
  CacheService(ServiceContext& context, LocalLaneServer* lane)
      : context_(context), put_host_(context), lane_(lane) {}

  grpc::ServerUnaryReactor* RegisterModel(grpc::CallbackServerContext* call,
                                          const v1::RegisterModelRequest* request,
                                          v1::RegisterModelResponse* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* PutProfile(grpc::CallbackServerContext* call,
                                                        grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* GetProfile(grpc::CallbackServerContext* call,
                                                         const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* ListProfiles(grpc::CallbackServerContext* call,
                                         const v1::ListProfilesRequest* request,
                                         v1::ListProfilesResponse* response) override;
  grpc::ServerUnaryReactor* DeleteProfile(grpc::CallbackServerContext* call,
                                          const v1::DeleteProfileRequest* request,
                                          v1::DeleteProfileResponse* response) override;
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* call,
                                   const v1::LookupRequest* request,
                                   v1::LookupResponse* response) override;
  grpc::ServerUnaryReactor* Similar(grpc::CallbackServerContext* call,
                                    const v1::SimilarRequest* request,
                                    v1::SimilarResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Fetch(grpc::CallbackServerContext* call,
                                                    const grpc::ByteBuffer* request) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Put(
      grpc::CallbackServerContext* call) override;
  grpc::ServerUnaryReactor* Touch(grpc::CallbackServerContext* call,
                                  const v1::TouchRequest* request,
                                  v1::TouchResponse* response) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext* call, const v1::PinRequest* request,
                                v1::PinResponse* response) override;
  grpc::ServerUnaryReactor* Unpin(grpc::CallbackServerContext* call,
                                  const v1::UnpinRequest* request,
                                  v1::UnpinResponse* response) override;
  grpc::ServerUnaryReactor* Delete(grpc::CallbackServerContext* call,
                                   const v1::DeleteRequest* request,
                                   v1::DeleteResponse* response) override;
  grpc::ServerUnaryReactor* SetRetention(grpc::CallbackServerContext* call,
                                         const v1::SetRetentionRequest* request,
                                         v1::SetRetentionResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* call,
                                                     const v1::WatchRequest* request) override;
  grpc::ServerUnaryReactor* OpenLocalLane(grpc::CallbackServerContext* call,
                                          const v1::OpenLocalLaneRequest* request,
                                          v1::OpenLocalLaneResponse* response) override;

 private:
  ServiceContext& context_;
  EnginePutHost put_host_;
  LocalLaneServer* const lane_;
};

}  // namespace kvtrie
