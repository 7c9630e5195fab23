#include "server/worker/worker_metrics.h"

namespace kvtrie {
namespace {

using prometheus::MetricType;

struct Sample {
  const char* name;
  const char* help;
  MetricType type;
  double value;
};

std::vector<Sample> SamplesOf(const WorkerGauges& gauges, const CodecQueueStats& queue,
                              const CodecCacheStats& codecs) {
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  return {
      {"kvtrie_worker_blocks_total", "Blocks that were coded, or failed while they were.",
       MetricType::Counter, number(queue.jobs_total)},
      {"kvtrie_worker_raw_bytes_total", "Raw KV of these blocks.", MetricType::Counter,
       number(queue.bytes_total)},
      {"kvtrie_worker_batches_total", "Times that blocks were coded together.", MetricType::Counter,
       number(queue.batches_total)},
      {"kvtrie_worker_coding_seconds_total", "Time spent in coding, over all threads.",
       MetricType::Counter, queue.coding_seconds_total},
      {"kvtrie_worker_refused_total", "Items refused because too much waits already.",
       MetricType::Counter, number(queue.refused_total)},
      {"kvtrie_worker_expired_total", "Items that waited for longer than they may.",
       MetricType::Counter, number(queue.expired_total)},
      {"kvtrie_worker_codecs_built_total", "Codecs made of profiles.", MetricType::Counter,
       number(codecs.builds_total)},
      {"kvtrie_worker_evicted_profiles_total", "Profiles that went to make room for others.",
       MetricType::Counter, number(gauges.shelf.evicted_total)},
      {"kvtrie_worker_stalled_streams_total", "Streams ended because their caller stalled.",
       MetricType::Counter, number(gauges.stalled_streams_total)},
      {"kvtrie_worker_refused_streams_total", "Calls refused because too many are open.",
       MetricType::Counter, number(gauges.refused_streams_total)},
      {"kvtrie_worker_waiting_items", "Items that wait for their turn.", MetricType::Gauge,
       number(queue.waiting_jobs)},
      {"kvtrie_worker_running_items", "Items that are being coded.", MetricType::Gauge,
       number(queue.running_jobs)},
      {"kvtrie_worker_waiting_tenants", "Tenants that have items waiting.", MetricType::Gauge,
       number(queue.tenants.size())},
      {"kvtrie_worker_expected_wait_seconds", "Of an item that comes now.", MetricType::Gauge,
       std::chrono::duration<double>(queue.expected_wait).count()},
      {"kvtrie_worker_memory_bytes", "Items that are here, with what they become.",
       MetricType::Gauge, number(gauges.memory_bytes)},
      {"kvtrie_worker_streams_waiting_for_memory", "Calls that are slowed down for want of it.",
       MetricType::Gauge, number(gauges.waiting_for_memory)},
      {"kvtrie_worker_fit_bytes", "Memory that is set aside for the profile that is being fitted.",
       MetricType::Gauge, number(gauges.fit_bytes)},
      {"kvtrie_worker_codec_bytes", "Memory of codecs.", MetricType::Gauge, number(codecs.bytes)},
      {"kvtrie_worker_profiles", "Profiles that are kept.", MetricType::Gauge,
       number(gauges.shelf.profiles)},
      {"kvtrie_worker_profile_bytes", "Memory of these.", MetricType::Gauge,
       number(gauges.shelf.bytes)},
      {"kvtrie_worker_upload_bytes", "Announced by uploads of profiles that are under way.",
       MetricType::Gauge, number(gauges.shelf.upload_bytes)},
      {"kvtrie_worker_open_streams", "Calls that are open.", MetricType::Gauge,
       number(gauges.open_streams)},
      {"kvtrie_worker_ready", "1 when the worker serves.", MetricType::Gauge,
       gauges.ready ? 1.0 : 0.0},
      {"kvtrie_worker_uptime_seconds", "Since the start of the process.", MetricType::Gauge,
       gauges.uptime_seconds},
  };
}

}  // namespace

std::vector<prometheus::MetricFamily> ToMetrics(const WorkerGauges& gauges,
                                                const CodecQueueStats& queue,
                                                const CodecCacheStats& codecs) {
  std::vector<prometheus::MetricFamily> families;
  for (const Sample& sample : SamplesOf(gauges, queue, codecs)) {
    prometheus::ClientMetric metric;
    if (sample.type == MetricType::Counter) {
      metric.counter.value = sample.value;
    } else {
      metric.gauge.value = sample.value;
    }
    families.push_back({sample.name, sample.help, sample.type, {std::move(metric)}});
  }
  prometheus::ClientMetric backend;
  backend.label = {{"backend", gauges.backend}};
  backend.gauge.value = 1;
  families.push_back(
      {"kvtrie_worker_backend_info", "What codes.", MetricType::Gauge, {std::move(backend)}});
  return families;
}

std::vector<std::pair<std::string, std::uint64_t>> CountersByName(const WorkerGauges& gauges,
                                                                  const CodecQueueStats& queue,
                                                                  const CodecCacheStats& codecs) {
  std::vector<std::pair<std::string, std::uint64_t>> counters;
  for (const Sample& sample : SamplesOf(gauges, queue, codecs)) {
    if (sample.type != MetricType::Counter) continue;
    counters.emplace_back(sample.name, static_cast<std::uint64_t>(sample.value));
  }
  return counters;
}

}  // namespace kvtrie
