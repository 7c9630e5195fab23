#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "client/worker_backend.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "storage/engine/engine_stats.h"

namespace kvtrie {

// What the server itself counts, beside its calls.
struct ServerGauges {
  std::uint64_t open_streams = 0;
  std::uint64_t stalled_streams_total = 0;
  std::uint64_t refused_streams_total = 0;
  std::uint64_t stream_memory_bytes = 0;
  std::uint64_t lane_connections = 0;
  bool ready = false;
  double uptime_seconds = 0;
};

// All names of metrics of the store, in one place: kvtrie_<subject>_<unit>[_total].
std::vector<prometheus::MetricFamily> ToMetrics(const EngineStats& stats);
std::vector<prometheus::MetricFamily> ToMetrics(const ServerGauges& gauges);
// Of the workers that code for it.
std::vector<prometheus::MetricFamily> ToMetrics(const WorkerBackendStats& workers);

// The counters of the store by name, as GetStatus shows them.
std::vector<std::pair<std::string, std::uint64_t>> CountersByName(const EngineStats& stats);

}  // namespace kvtrie
