#pragma once

#include <string>
#include <utility>
#include <vector>

#include "prometheus/metric_family.h"
#include "server/worker/codec_queue.h"
#include "server/worker/profile_shelf.h"
#include "storage/codec/codec_cache.h"

namespace kvtrie {

struct WorkerGauges {
  std::string backend;
  bool ready = false;
  std::uint64_t open_streams = 0;
  std::uint64_t stalled_streams_total = 0;
  std::uint64_t refused_streams_total = 0;
  std::uint64_t memory_bytes = 0;
  std::uint64_t waiting_for_memory = 0;
  std::uint64_t fit_bytes = 0;
  ProfileShelfStats shelf;
  double uptime_seconds = 0;
};

// All names of metrics of a worker, in one place: kvtrie_worker_<subject>_<unit>[_total].
std::vector<prometheus::MetricFamily> ToMetrics(const WorkerGauges& gauges,
                                                const CodecQueueStats& queue,
                                                const CodecCacheStats& codecs);

// Its counters by name, as Describe shows them.
std::vector<std::pair<std::string, std::uint64_t>> CountersByName(const WorkerGauges& gauges,
                                                                  const CodecQueueStats& queue,
                                                                  const CodecCacheStats& codecs);

}  // namespace kvtrie
