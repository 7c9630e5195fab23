#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/put_stream.h"
#include "server/rpc_metrics.h"
#include "server/service_context.h"
#include "server/stream_registry.h"

namespace kvtrie {

// Puts of services: blocking calls go through the engine's threads.
class EnginePutHost final : public PutHost {
 public:
  explicit EnginePutHost(ServiceContext& context) : context_(context) {}

  void BeginPut(const PutAnnouncement& put, BeginCallback on_begun) override;
  ByteBudget& block_budget() override { return context_.engine.put_budget(); }
  ByteBudget& announce_budget() override { return context_.stream_budget; }
  void Post(std::function<void()> work) override { context_.timer.Post(std::move(work)); }

 private:
  ServiceContext& context_;
};

// One Put call: gRPC's side of a PutStream. At most one read and one write are in flight, and no
// message is read while an earlier one waits.
//
// Owns itself from Start until OnDone.
class PutCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                      public TrackedStream,
                      public std::enable_shared_from_this<PutCall> {
 public:
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      ServiceContext& context, PutHost& host, grpc::CallbackServerContext* call);

  void Abort(const absl::Status& status) override;
  void OnDrain() override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  PutCall(ServiceContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call), probe_(context.metrics, RpcMethod::kPut) {}

  // A writer that makes less progress than this within the stall limit stalls.
  static constexpr std::size_t kProgressBytes = std::size_t{64} << 10;

  void Pump();
  void WatchForStall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status);

  ServiceContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;
  std::shared_ptr<PutStream> stream_;

  absl::Mutex mutex_;
  std::shared_ptr<PutCall> self_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_buffer_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer write_buffer_ ABSL_GUARDED_BY(mutex_);
  v1::PutResponse response_ ABSL_GUARDED_BY(mutex_);
  // The stall limit runs from when these bytes were last counted from 0.
  std::size_t progress_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
