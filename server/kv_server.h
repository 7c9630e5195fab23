#pragma once

#include <grpcpp/server.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/worker_backend.h"
#include "server/admin_service.h"
#include "server/cache_service.h"
#include "server/http_endpoint.h"
#include "server/local_lane_server.h"
#include "server/log.h"
#include "server/rpc_metrics.h"
#include "server/server_config.h"
#include "server/service_context.h"
#include "server/stream_registry.h"
#include "server/timer_thread.h"
#include "server/watchdog.h"
#include "storage/base/byte_budget.h"
#include "storage/base/clock.h"
#include "storage/engine/engine.h"

namespace kvtrie {

// Where a running server is to be found; ports are the bound ones.
struct BoundAddresses {
  std::string listen;
  std::string admin;
  std::string metrics;
  std::string local_socket;  // empty: off
};

// The server in one object: store, services, probes, and the order in which they start and stop.
// `main` and tests of services start the same thing.
//
// Order of the start: probes answer ("starting") -> store opens and recovers -> services listen ->
// health SERVING. Order of the stop: health NOT_SERVING -> no new puts and streams -> running calls
// finish, or are cancelled when half of the grace time is over -> store closes.
class KvServer {
 public:
  // with all codecs. Errors: those of Engine::OpenEmbedded; Unavailable when an address
  // cannot be bound.
  static absl::StatusOr<std::unique_ptr<KvServer>> Start(const ServerConfig& config,
                                                         Clock& clock = SystemClock());
  // `codec` may be null: then coded blocks are served as frames only.
  static absl::StatusOr<std::unique_ptr<KvServer>> Start(const ServerConfig& config, Clock& clock,
                                                         std::shared_ptr<const BlockCodec> codec);
  // Stops at once if Stop was not called.
  ~KvServer();

  const BoundAddresses& addresses() const { return addresses_; }
  Engine& engine() { return *engine_; }
  StreamRegistry& streams() { return streams_; }
  RpcMetrics& metrics() { return rpc_metrics_; }
  ByteBudget& stream_budget() { return stream_budget_; }

  // Health fails, new work is refused, running puts finish. The server still answers. True: all
  // puts finished.
  bool Drain(std::chrono::milliseconds deadline);
  // Drains and ends, within `grace`.
  void Stop(std::chrono::milliseconds grace);

 private:
  KvServer(const ServerConfig& config, Clock& clock);

  std::shared_ptr<const BlockCodec> MakeCodec();
  absl::Status Open(std::shared_ptr<const BlockCodec> codec);
  absl::Status StartHttp();
  absl::Status OpenStore(std::shared_ptr<const BlockCodec> codec);
  absl::Status StartServices();
  absl::Status BuildDataServer();
  absl::Status BuildAdminServer();
  void LogStart();
  void Tick();

  ProbeAnswer Live() const;
  ProbeAnswer Ready() const;
  std::pair<std::string, std::vector<std::string>> State() const;
  std::vector<prometheus::MetricFamily> CollectMetrics() const;
  void SetServing(bool serving);

  const ServerConfig config_;
  Clock& clock_;
  const std::chrono::steady_clock::time_point started_;
  RpcMetrics rpc_metrics_;
  StreamRegistry streams_;
  ByteBudget stream_budget_;
  ByteBudget resident_budget_;
  BoundAddresses addresses_;

  std::atomic<bool> serving_{false};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<std::int64_t> last_tick_ns_{0};
  mutable absl::Mutex mutex_;
  std::string start_progress_ ABSL_GUARDED_BY(mutex_) = "starting";
  std::vector<std::string> last_degraded_ ABSL_GUARDED_BY(mutex_);
  bool last_healthy_ ABSL_GUARDED_BY(mutex_) = true;
  // The store, once it is open; probes ask before that.
  std::atomic<Engine*> open_engine_{nullptr};
  LogLimiter stall_log_;

  std::unique_ptr<TimerThread> timer_;
  std::unique_ptr<HttpEndpoint> http_;
  std::unique_ptr<WorkerBackend> workers_;  // null: the engine's threads code
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<GeometryCache> geometries_;
  std::unique_ptr<ServiceContext> context_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<LocalLaneServer> lane_;
  std::unique_ptr<CacheService> cache_service_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<grpc::Server> data_server_;
  std::unique_ptr<grpc::Server> admin_server_;
};

}  // namespace kvtrie
