#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/worker/codec_stream.h"
#include "server/worker/worker_context.h"

namespace kvtrie {

// One Encode or Decode call: gRPC's side of a CodecStream. At most one read and one write are in
// flight.
//
// Owns itself from Start until OnDone.
class CodecCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                        public TrackedStream,
                        public std::enable_shared_from_this<CodecCall> {
 public:
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      WorkerContext& context, CodecOp op, grpc::CallbackServerContext* call);

  void Abort(const absl::Status& status) override;
  void OnDrain() override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  CodecCall(WorkerContext& context, CodecOp op, grpc::CallbackServerContext* call)
      : context_(context),
        call_(call),
        probe_(context.metrics, op == CodecOp::kEncode ? RpcMethod::kEncode : RpcMethod::kDecode) {}

  // A caller that makes less progress than this within the stall limit stalls.
  static constexpr std::size_t kProgressBytes = std::size_t{64} << 10;

  void Pump();
  void WatchForStall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status);

  WorkerContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;
  std::shared_ptr<CodecStream> stream_;

  absl::Mutex mutex_;
  std::shared_ptr<CodecCall> self_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer read_buffer_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer write_buffer_ ABSL_GUARDED_BY(mutex_);
  std::size_t progress_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
