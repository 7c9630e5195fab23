#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kvtrie/v1/cache.pb.h"
#include "server/rpc_metrics.h"
#include "server/service_context.h"
#include "server/stream_registry.h"

namespace kvtrie {

// One Watch call: pages of the event log, one at a time. A watcher that falls behind the log is
// told so and goes on with the oldest event that is left; it never makes the server keep more.
//
// Owns itself from Start until OnDone.
class WatchStream final : public grpc::ServerWriteReactor<v1::WatchResponse>,
                          public TrackedStream,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  static constexpr std::size_t kEventsPerPage = 512;

  static grpc::ServerWriteReactor<v1::WatchResponse>* Start(ServiceContext& context,
                                                            grpc::CallbackServerContext* call,
                                                            const v1::WatchRequest& request);

  void Abort(const absl::Status& status) override;
  void OnDrain() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  WatchStream(ServiceContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call), probe_(context.metrics, RpcMethod::kWatch) {}

  void Pump();
  // True: there is a page to write.
  bool FillPage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishWith(const absl::Status& status);

  ServiceContext& context_;
  grpc::CallbackServerContext* const call_;
  RpcProbe probe_;

  absl::Mutex mutex_;
  std::shared_ptr<WatchStream> self_ ABSL_GUARDED_BY(mutex_);
  ModelId model_filter_ ABSL_GUARDED_BY(mutex_);
  bool want_tokens_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::WatchResponse page_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t notification_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvtrie
