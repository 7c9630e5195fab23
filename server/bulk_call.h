#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/bulk_stream.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"

namespace kvtrie {

// One call of a method: gRPC's side of a BulkStream. At most one read and one write are in flight,
// and no message is read while an earlier one waits. A peer that does not read, or whose turn it is
// and who sends nothing, stalls.
//
// Owns itself from Start until OnDone.
class BulkCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                       public TrackedStream,
                       public std::enable_shared_from_this<BulkCall> {
 public:
  // Both outlive the call.
  struct Host {
    StreamRegistry& streams;
    RpcMetrics& metrics;
  };
  // `on_change` may be called on any thread, without locks, until the stream is gone.
  using MakeStream = std::function<std::shared_ptr<BulkStream>(std::function<void()> on_change)>;
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      const Host& host, RpcMethod method, grpc::CallbackServerContext* call,
      const MakeStream& make_stream);

  void Abort(const absl::Status& status) override;
  void OnDrain() override;
  void OnTick() override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  BulkCall(const Host& host, RpcMethod method, grpc::CallbackServerContext* call)
      : host_(host), call_(call), probe_(host.metrics, method) {}

  // A peer that makes less progress than this within the stall limit stalls.
  static constexpr std::size_t kProgressBytes = std::size_t{64} << 10;

  void Pump();
  void WatchForStall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status);

  const Host host_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;
  std::shared_ptr<BulkStream> stream_;

  absl::Mutex mutex_;
  std::shared_ptr<BulkCall> self_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_buffer_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer write_buffer_ ABSL_GUARDED_BY(mutex_);
  // The stall limit runs from when these bytes were last counted from 0.
  std::size_t progress_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
