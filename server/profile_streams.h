#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/cache.pb.h"
#include "proto/bulk_message.h"
#include "server/profile_upload.h"
#include "server/rpc_metrics.h"
#include "server/service_context.h"
#include "server/stream_registry.h"

namespace kvtrie {

// What a PutProfile call needs of the process around it. What it refers to outlives the call.
struct ProfilePutHost {
  StreamRegistry& streams;
  RpcMetrics& metrics;
  RpcMethod method;
  // Runs work that may block on another thread. False: too much of it waits.
  std::function<bool(std::function<void()> work)> post;
  ProfileUpload::Begin begin;
};

// One PutProfile call, of a server or a worker: a message is read, its bytes are taken by a thread
// that may block, and only then the next one is read.
//
// Owns itself from Start until OnDone.
class ProfilePutStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                               public TrackedStream,
                               public std::enable_shared_from_this<ProfilePutStream> {
 public:
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(ProfilePutHost host,
                                                          grpc::CallbackServerContext* call,
                                                          grpc::ByteBuffer* response);
  // Of a server: into its store.
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(ServiceContext& context,
                                                          grpc::CallbackServerContext* call,
                                                          grpc::ByteBuffer* response);

  void Abort(const absl::Status& status) override;
  void OnDrain() override {}  // goes on until the end of the grace time

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  ProfilePutStream(ProfilePutHost host, grpc::CallbackServerContext* call,
                   grpc::ByteBuffer* response)
      : host_(std::move(host)),
        call_(call),
        response_(response),
        probe_(host_.metrics, host_.method),
        upload_(host_.begin) {}

  void ReadNext();
  // Both run on a thread of the host's, one at a time.
  void TakeMessage();
  void Commit();
  void FinishWith(const absl::Status& status);

  const ProfilePutHost host_;
  grpc::CallbackServerContext* const call_;
  grpc::ByteBuffer* const response_;
  RpcProbe probe_;

  Clock::Duration upload_until_{};
  // Of whoever works on the message: gRPC while it is read, a thread of the host's after that.
  grpc::ByteBuffer message_;
  ProfileUpload upload_;

  absl::Mutex mutex_;
  std::shared_ptr<ProfilePutStream> self_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

// One GetProfile call: a piece is read by a thread of the engine once the one before it was taken.
//
// Owns itself from Start until OnDone.
class ProfileGetStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                               public TrackedStream,
                               public std::enable_shared_from_this<ProfileGetStream> {
 public:
  static grpc::ServerWriteReactor<grpc::ByteBuffer>* Start(ServiceContext& context,
                                                           grpc::CallbackServerContext* call,
                                                           const grpc::ByteBuffer& request);

  void Abort(const absl::Status& status) override;
  void OnDrain() override {}

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

  ProfileGetStream(ServiceContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call), probe_(context.metrics, RpcMethod::kGetProfile) {}

  void PostNext();
  void SendNext(const ProfileId& id);
  absl::Status ReadPiece(const ProfileId& id);
  void FinishWith(const absl::Status& status);

  ServiceContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;

  // Of whoever works on the next piece.
  ProfileId id_;
  std::unique_ptr<ProfileStore::Reader> reader_;
  std::uint64_t sent_bytes_ = 0;
  grpc::ByteBuffer buffer_;

  absl::Mutex mutex_;
  std::shared_ptr<ProfileGetStream> self_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
