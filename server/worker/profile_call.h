#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/cache.pb.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/worker/worker_context.h"

namespace kvtrie {

// One PutProfile call to a worker: gathers a profile, and puts it on the shelf.
//
// Owns itself from Start until OnDone.
class ProfileCall final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                          public TrackedStream,
                          public std::enable_shared_from_this<ProfileCall> {
 public:
  static grpc::ServerReadReactor<grpc::ByteBuffer>* Start(WorkerContext& context,
                                                          grpc::CallbackServerContext* call,
                                                          grpc::ByteBuffer* response);

  void Abort(const absl::Status& status) override { FinishWith(status); }
  void OnDrain() override {}

  void OnReadDone(bool ok) override;
  void OnCancel() override { FinishWith(absl::CancelledError("cancelled by the client")); }
  void OnDone() override;

 private:
  ProfileCall(WorkerContext& context, grpc::ByteBuffer* response)
      : context_(context),
        response_(response),
        probe_(context.metrics, RpcMethod::kWorkerPutProfile) {}

  void ReadNext();
  absl::Status Append();
  void Commit();
  absl::StatusOr<v1::PutProfileResponse> Shelve();
  void FinishWith(const absl::Status& status);

  WorkerContext& context_;
  grpc::ByteBuffer* const response_;
  RpcProbe probe_;

  // Of gRPC's thread, and after the last message of the chores'.
  grpc::ByteBuffer message_;
  bool is_first_ = true;
  std::size_t total_bytes_ = 0;
  ProfileId expected_id_;
  std::vector<std::byte> profile_;

  absl::Mutex mutex_;
  std::shared_ptr<ProfileCall> self_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
