#pragma once

#include <grpcpp/server_context.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cancel_call.h"
#include "server/request_checks.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/timer_thread.h"
#include "storage/base/byte_budget.h"
#include "storage/engine/engine.h"

namespace kvtrie {

// Where layers lie in the blocks of registered models; a model never changes. Thread-safe.
class GeometryCache {
 public:
  explicit GeometryCache(Engine& engine) : engine_(engine) {}
  // NotFound: the model is not registered.
  absl::StatusOr<std::shared_ptr<const KvGeometry>> Get(const ModelId& model);

 private:
  Engine& engine_;
  absl::Mutex mutex_;
  absl::flat_hash_map<ModelId, std::shared_ptr<const KvGeometry>> geometries_
      ABSL_GUARDED_BY(mutex_);
};

// What the services share. Outlives every call.
struct ServiceContext {
  Engine& engine;
  TimerThread& timer;
  StreamRegistry& streams;
  RpcMetrics& metrics;
  GeometryCache& geometries;
  // Frames and announcements that streams hold.
  ByteBudget& stream_budget;
  // The part of it that layer-major fetches may hold on to between their visits. Kept apart:
  // whoever waits for stream_budget must not hold what others wait for.
  ByteBudget& resident_budget;
  RequestLimits limits;
  std::size_t read_ahead_bytes = std::size_t{4} << 20;
};

inline absl::Status BusyError() {
  return absl::UnavailableError("the queue of the store is full; retry with backoff");
}

}  // namespace kvtrie
