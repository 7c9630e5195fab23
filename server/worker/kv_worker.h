#pragma once

#include <grpcpp/server.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/http_endpoint.h"
#include "server/log.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/timer_thread.h"
#include "server/watchdog.h"
#include "server/worker/codec_queue.h"
#include "server/worker/codec_service.h"
#include "server/worker/codec_work.h"
#include "server/worker/profile_shelf.h"
#include "server/worker/worker_config.h"
#include "server/worker/worker_context.h"
#include "server/worker/worker_metrics.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"
#include "storage/codec/block_coder.h"

namespace kvtrie {

// Where a running worker is to be found; ports are the bound ones.
struct WorkerAddresses {
  std::string listen;
  std::string metrics;
};

// The worker in one object: queue, service, probes, and the order in which they start and stop.
// `main` and tests start the same thing.
//
// Order of the stop: health NOT_SERVING -> no new items and streams -> what is here is coded and
// answered, or cancelled when three quarters of the grace time are over.
class KvWorker {
 public:
  // Errors: Unavailable when an address cannot be bound.
  static absl::StatusOr<std::unique_ptr<KvWorker>> Start(
      const WorkerConfig& config, std::unique_ptr<const CodecBackend> backend,
      Clock& clock = SystemClock());
  // Stops at once if Stop was not called.
  ~KvWorker();

  const WorkerAddresses& addresses() const { return addresses_; }
  const CodecQueue& queue() const { return *queue_; }
  StreamRegistry& streams() { return streams_; }
  ByteBudget& memory() { return memory_; }
  const RpcMetrics& rpc_metrics() const { return rpc_metrics_; }
  // Of the profile that is being fitted, with what fitting takes.
  std::size_t fit_bytes() const { return fit_turn_.held_bytes(); }

  // Health fails, new items are refused, those that are here are coded. It still answers.
  void Drain();
  // True: no profile is being fitted, or none any more within the time. Destruction waits for it.
  bool AwaitFit(std::chrono::milliseconds timeout) {
    return fit_turn_.AwaitFree(absl::FromChrono(timeout));
  }
  // Drains and ends, within `grace`.
  void Stop(std::chrono::milliseconds grace);

 private:
  KvWorker(const WorkerConfig& config, std::unique_ptr<const CodecBackend> backend, Clock& clock);

  absl::Status StartHttp();
  absl::Status StartServices();
  void Tick();
  void SetServing(bool serving);
  // Empty: all is well.
  std::string Complaint() const;
  ProbeAnswer Live() const;
  ProbeAnswer Ready() const;
  WorkerGauges Gauges() const;
  v1::DescribeResponse Describe() const;
  std::vector<prometheus::MetricFamily> CollectMetrics() const;

  const WorkerConfig config_;
  Clock& clock_;
  const std::chrono::steady_clock::time_point started_;
  const std::unique_ptr<const CodecBackend> backend_;
  RpcMetrics rpc_metrics_{RpcMethod::kEncode, RpcMethod::kDescribe};
  StreamRegistry streams_;
  ByteBudget memory_;
  ProfileShelf shelf_;
  CodecWork work_;
  FitTurn fit_turn_;
  WorkerAddresses addresses_;

  std::atomic<bool> serving_{false};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<std::int64_t> last_tick_ns_{0};
  mutable absl::Mutex mutex_;
  bool last_healthy_ ABSL_GUARDED_BY(mutex_) = true;
  std::string device_fault_ ABSL_GUARDED_BY(mutex_);
  LogLimiter stall_log_;

  // Destroyed from the last one to the first: nothing outlives what it calls.
  std::unique_ptr<TimerThread> timer_;
  std::unique_ptr<TimerThread> chores_;
  std::unique_ptr<TimerThread> prober_;  // waits for the device
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<CodecQueue> queue_;
  std::unique_ptr<HttpEndpoint> http_;
  std::unique_ptr<WorkerContext> context_;
  std::unique_ptr<CodecService> service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvtrie
