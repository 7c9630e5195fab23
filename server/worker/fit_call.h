#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/codec.pb.h"
#include "proto/bulk_message.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/worker/worker_context.h"
#include "storage/base/clock.h"
#include "storage/base/shared_bytes.h"
#include "storage/codec/residual_fit.h"
#include "storage/kv/model_spec.h"

namespace kvtrie {

// What came for one fit, and what comes of it. Not thread-safe.
class FitRequest {
 public:
  explicit FitRequest(const CodecLimits& limits) : limits_(limits) {}

  // InvalidArgument names the field. ResourceExhausted: fitting takes more than the limit.
  absl::Status Add(const v1::FitProfileRequest& request, const BulkPayload& payload);

  bool opened() const { return opened_; }
  std::uint64_t held_bytes() const { return held_bytes_; }

  // A draft (profile_draft.h). Takes minutes. `tell` is called at each hundredth; Cancelled soon
  // after `is_cancelled` has become true.
  using Tell = std::function<void(double done_share, std::string_view doing)>;
  absl::StatusOr<std::string> Fit(const Tell& tell,
                                  const std::function<bool()>& is_cancelled) const;

 private:
  struct Sample {
    std::vector<TokenId> tokens;
    AlignedBuffer raw;
    std::size_t raw_bytes = 0;
    std::size_t received_bytes = 0;
  };

  absl::Status Open(const v1::FitOpen& open);
  absl::Status Begin(const v1::FitSample& sample);
  absl::Status CheckComplete() const;
  ResidualFitOptions Options() const;

  const CodecLimits& limits_;
  bool opened_ = false;
  v1::FitOpen open_;
  ModelSpec spec_;
  std::size_t token_bytes_ = 0;
  // Of all that is here, and that fitting it takes.
  std::uint64_t held_bytes_ = 0;
  std::uint64_t working_bytes_per_token_ = 0;
  std::string material_;
  std::vector<Sample> samples_;
};

// One FitProfile call: gathers texts, fits on a thread of its own, tells how far it is. Ends when
// the worker drains: another one is as good.
//
// Owns itself from Start until OnDone, and until the fit has ended.
class FitCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                      public TrackedStream,
                      public std::enable_shared_from_this<FitCall> {
 public:
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(
      WorkerContext& context, grpc::CallbackServerContext* call);
  void Abort(const absl::Status& status) override;
  void OnDrain() override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  FitCall(WorkerContext& context, grpc::CallbackServerContext* call)
      : context_(context),
        call_(call),
        probe_(context.metrics, RpcMethod::kFitProfile),
        request_(context.host.limits) {}

  void ReadNext();
  absl::Status Take();
  void Fit();
  absl::StatusOr<std::string> FitTexts();
  void Tell(double done_share, std::string_view doing);
  // Writes what there is: progress, or the next piece of the draft.
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status);
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Once neither texts come nor a fit runs: whoever sees the end of this one may begin the next.
  void GiveBackTurn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  WorkerContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;

  // Of gRPC's thread while texts come, and then of the fit's.
  Clock::Duration texts_until_{};
  grpc::ByteBuffer message_;
  FitRequest request_;

  absl::Mutex mutex_;
  std::shared_ptr<FitCall> self_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer write_buffer_ ABSL_GUARDED_BY(mutex_);
  v1::FitProfileResponse progress_ ABSL_GUARDED_BY(mutex_);
  bool has_progress_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const std::string> draft_ ABSL_GUARDED_BY(mutex_);
  std::size_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool holds_turn_ ABSL_GUARDED_BY(mutex_) = false;
  bool fits_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // gRPC's call is gone
};

}  // namespace kvtrie
