#include "server/metrics.h"

#include <string>

#include "prometheus/metric_type.h"

namespace kvtrie {
namespace {

struct StatMetric {
  const char* name;
  const char* help;
  std::uint64_t EngineStats::*value;
};

constexpr StatMetric kCounters[] = {
    {"kvtrie_lookup_requests_total", "Lookup queries.", &EngineStats::lookups_total},
    {"kvtrie_lookup_blocks_total", "Blocks that lookups asked for.",
     &EngineStats::lookup_blocks_total},
    {"kvtrie_lookup_hit_blocks_total", "Blocks that lookups found.",
     &EngineStats::lookup_hit_blocks_total},
    {"kvtrie_similar_requests_total", "Searches for similar sessions.",
     &EngineStats::similar_queries_total},
    {"kvtrie_similar_cut_short_total", "Of them, those that reached a bound on work.",
     &EngineStats::similar_cut_short_total},
    {"kvtrie_text_reuse_lookups_total",
     "Lookups that allowed KV of the same text under another prefix.",
     &EngineStats::text_reuse_lookups_total},
    {"kvtrie_text_reuse_forbidden_total",
     "Of them, those of tenants or models that may not have it.",
     &EngineStats::text_reuse_forbidden_total},
    {"kvtrie_text_reuse_offered_tokens_total", "Tokens that were offered so.",
     &EngineStats::text_reuse_offered_tokens_total},
    {"kvtrie_run_index_forgotten_total", "Pieces of text that a full run index forgot.",
     &EngineStats::forgotten_runs_total},
    {"kvtrie_read_memory_frames_total", "Frames read from memory.",
     &EngineStats::memory_reads_total},
    {"kvtrie_read_disk_frames_total", "Frames read from the disk.", &EngineStats::disk_reads_total},
    {"kvtrie_read_disk_bytes_total", "Bytes read from the disk.",
     &EngineStats::disk_read_bytes_total},
    {"kvtrie_prefetched_frames_total", "Frames read from the disk before they were fetched.",
     &EngineStats::prefetched_frames_total},
    {"kvtrie_prefetched_bytes_total", "Bytes of those frames.",
     &EngineStats::prefetched_bytes_total},
    {"kvtrie_prefetch_useful_frames_total", "Of them, those that were then read from memory.",
     &EngineStats::prefetch_useful_frames_total},
    {"kvtrie_prefetch_useful_bytes_total", "Bytes of those.",
     &EngineStats::prefetch_useful_bytes_total},
    {"kvtrie_prefetch_wasted_frames_total", "Of them, those that left memory without a read.",
     &EngineStats::prefetch_wasted_frames_total},
    {"kvtrie_prefetch_wasted_bytes_total", "Bytes of those.",
     &EngineStats::prefetch_wasted_bytes_total},
    {"kvtrie_read_missed_frames_total", "Frames that a client named and that are not stored.",
     &EngineStats::missed_reads_total},
    {"kvtrie_read_corrupt_frames_total", "Frames that failed their check; dropped, never served.",
     &EngineStats::corrupt_frames_total},
    {"kvtrie_read_errors_total", "Reads that the device failed.", &EngineStats::read_errors_total},
    {"kvtrie_decoded_blocks_total", "Coded blocks served as raw KV.",
     &EngineStats::decoded_blocks_total},
    {"kvtrie_undecoded_blocks_total",
     "Coded blocks asked for as raw KV of a server that cannot decode them.",
     &EngineStats::undecoded_blocks_total},
    {"kvtrie_decode_errors_total", "Coded blocks that failed to decode.",
     &EngineStats::decode_errors_total},
    {"kvtrie_codec_hits_total", "Times a codec was wanted that was in memory.",
     &EngineStats::codec_hits_total},
    {"kvtrie_codec_builds_total", "Times a codec was made of its profile.",
     &EngineStats::codec_builds_total},
    {"kvtrie_damaged_profiles_total", "Profiles that failed their check; dropped, never used.",
     &EngineStats::damaged_profiles_total},
    {"kvtrie_put_blocks_total", "Blocks put: stored, duplicate and failed.",
     &EngineStats::put_blocks_total},
    {"kvtrie_put_stored_blocks_total", "Blocks stored.", &EngineStats::stored_blocks_total},
    {"kvtrie_put_duplicate_blocks_total", "Blocks put that were stored already.",
     &EngineStats::duplicate_blocks_total},
    {"kvtrie_put_failed_blocks_total", "Blocks that could not be stored.",
     &EngineStats::failed_blocks_total},
    {"kvtrie_put_stored_bytes_total", "Bytes of frames stored.", &EngineStats::stored_bytes_total},
    {"kvtrie_put_raw_bytes_total", "What the stored frames are raw.",
     &EngineStats::raw_bytes_total},
    {"kvtrie_evicted_blocks_total", "Blocks dropped for space.",
     &EngineStats::evicted_blocks_total},
    {"kvtrie_evicted_frames_total", "Frames dropped for space of blocks that kept another one.",
     &EngineStats::evicted_frames_total},
    {"kvtrie_evicted_bytes_total", "Bytes dropped for space.", &EngineStats::evicted_bytes_total},
    {"kvtrie_expired_blocks_total", "Blocks whose time to live ended.",
     &EngineStats::expired_blocks_total},
    {"kvtrie_deleted_blocks_total", "Blocks deleted by request.",
     &EngineStats::deleted_blocks_total},
    {"kvtrie_put_refused_full_total", "Blocks refused because the store was full.",
     &EngineStats::refused_full_total},
    {"kvtrie_token_cache_misses_total", "Lookups that had to read tokens from the disk.",
     &EngineStats::token_cache_misses_total},
    {"kvtrie_syncs_total", "Syncs of the store.", &EngineStats::syncs_total},
    {"kvtrie_sync_errors_total", "Syncs that failed.", &EngineStats::sync_errors_total},
    {"kvtrie_detached_blocks_total",
     "Blocks coded against others that were coded anew, since those were to go.",
     &EngineStats::detached_blocks_total},
    {"kvtrie_lost_members_total", "Blocks coded against others that were lost with those.",
     &EngineStats::lost_members_total},
    {"kvtrie_recoded_blocks_total", "Exact blocks that got a coded frame in the background.",
     &EngineStats::recoded_blocks_total},
    {"kvtrie_recoded_raw_bytes_total", "What those blocks are raw.",
     &EngineStats::recoded_raw_bytes_total},
    {"kvtrie_recoded_bytes_total", "Bytes of their coded frames.",
     &EngineStats::recoded_bytes_total},
    {"kvtrie_refined_blocks_total",
     "Of those, blocks whose text stands in several places, coded finer to be references.",
     &EngineStats::refined_blocks_total},
    {"kvtrie_recoded_again_blocks_total",
     "Blocks that had been coded alone, and then against one that was made a reference since.",
     &EngineStats::recoded_again_blocks_total},
    {"kvtrie_recode_failed_blocks_total",
     "Blocks that were to be coded in the background and could not be.",
     &EngineStats::recode_failed_blocks_total},
};

constexpr StatMetric kGauges[] = {
    {"kvtrie_models", "Registered models.", &EngineStats::model_count},
    {"kvtrie_blocks", "Stored blocks.", &EngineStats::node_count},
    {"kvtrie_live_bytes", "Frames of stored blocks.", &EngineStats::live_bytes},
    {"kvtrie_live_raw_bytes", "What the stored frames are raw.", &EngineStats::raw_live_bytes},
    {"kvtrie_profiles", "Codec profiles.", &EngineStats::profile_count},
    {"kvtrie_profile_bytes", "Disk space of codec profiles.", &EngineStats::profile_bytes},
    {"kvtrie_codecs", "Codecs in memory, made of profiles.", &EngineStats::codec_count},
    {"kvtrie_codec_bytes", "What they take.", &EngineStats::codec_bytes},
    {"kvtrie_disk_bytes", "What du shows of the data folder.", &EngineStats::disk_bytes},
    {"kvtrie_disk_limit_bytes", "Bound on it.", &EngineStats::disk_limit_bytes},
    {"kvtrie_segments", "Segment files.", &EngineStats::segment_count},
    {"kvtrie_memory_tier_bytes", "Frames in memory.", &EngineStats::memory_tier_bytes},
    {"kvtrie_memory_tier_limit_bytes", "Bound on it.", &EngineStats::memory_tier_limit_bytes},
    {"kvtrie_prefetch_unasked_bytes", "Of it, read ahead and not fetched yet.",
     &EngineStats::prefetch_unasked_bytes},
    {"kvtrie_prefetch_pending_bytes", "About to be read ahead.",
     &EngineStats::prefetch_pending_bytes},
    {"kvtrie_memory_prefaulted_bytes", "Taken from the system at start; grows up to the bound.",
     &EngineStats::prefaulted_bytes},
    {"kvtrie_index_bytes", "Index of blocks.", &EngineStats::index_bytes},
    {"kvtrie_token_cache_bytes", "Tokens in memory.", &EngineStats::token_cache_bytes},
    {"kvtrie_run_index_bytes", "Index of text runs.", &EngineStats::run_index_bytes},
    {"kvtrie_run_index_entries", "Pieces of text in it.", &EngineStats::run_index_entries},
    {"kvtrie_named_sessions", "Sessions with a name.", &EngineStats::named_sessions},
    {"kvtrie_session_groups", "Groups of sessions that share a prefix.", &EngineStats::group_count},
    {"kvtrie_session_group_bytes", "Memory of groups, at most.", &EngineStats::group_bytes},
    {"kvtrie_put_memory_bytes", "Blocks that puts have begun.", &EngineStats::put_memory_bytes},
    {"kvtrie_open_puts", "Puts that are open.", &EngineStats::open_puts},
    {"kvtrie_leases", "Leases.", &EngineStats::lease_count},
    {"kvtrie_references", "Pairs of a block and one that it was coded against.",
     &EngineStats::reference_count},
    {"kvtrie_pins", "Pins.", &EngineStats::pin_count},
    {"kvtrie_pinned_bytes", "Bytes that pins hold.", &EngineStats::pinned_bytes},
    {"kvtrie_recode_waiting_blocks", "Exact blocks that wait to be coded in the background.",
     &EngineStats::recode_waiting_blocks},
    {"kvtrie_pending_free_bytes", "Unlinked, not given back yet.",
     &EngineStats::pending_free_bytes},
    {"kvtrie_io_queue_length", "Requests that wait for the disk.", &EngineStats::io_queue_length},
    {"kvtrie_decode_queue_length", "Groups of blocks that wait to be decoded.",
     &EngineStats::decode_queue_length},
};

const char* NameOf(CodecId codec) {
  switch (codec) {
    case CodecId::kRaw:
      return "raw";
    case CodecId::kLossless:
      return "lossless";
    case CodecId::kResidual:
      return "residual";
    case CodecId::kRotated:
      return "rotated";
    case CodecId::kReferenced:
      return "referenced";
  }
  return "unknown";
}

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type,
                                double value) {
  prometheus::MetricFamily family{name, help, type, {}};
  prometheus::ClientMetric metric;
  metric.counter.value = value;
  metric.gauge.value = value;
  family.metric.push_back(std::move(metric));
  return family;
}

}  // namespace

std::vector<prometheus::MetricFamily> ToMetrics(const EngineStats& stats) {
  std::vector<prometheus::MetricFamily> families;
  for (const StatMetric& metric : kCounters) {
    families.push_back(Family(metric.name, metric.help, prometheus::MetricType::Counter,
                              static_cast<double>(stats.*metric.value)));
  }
  for (const StatMetric& metric : kGauges) {
    families.push_back(Family(metric.name, metric.help, prometheus::MetricType::Gauge,
                              static_cast<double>(stats.*metric.value)));
  }
  prometheus::MetricFamily frames{
      "kvtrie_frames", "Stored frames by rung and codec.", prometheus::MetricType::Gauge, {}};
  prometheus::MetricFamily frame_bytes{"kvtrie_frame_bytes",
                                       "Bytes of stored frames by rung and codec.",
                                       prometheus::MetricType::Gauge,
                                       {}};
  for (const CodecUsage& usage : stats.codecs) {
    prometheus::ClientMetric metric;
    metric.label = {{"rung", RungOf(usage.codec) == Rung::kExact ? "exact" : "coded"},
                    {"codec", NameOf(usage.codec)}};
    metric.gauge.value = static_cast<double>(usage.frames);
    frames.metric.push_back(metric);
    metric.gauge.value = static_cast<double>(usage.bytes);
    frame_bytes.metric.push_back(metric);
  }
  families.push_back(std::move(frames));
  families.push_back(std::move(frame_bytes));
  prometheus::MetricFamily failures{"kvtrie_decode_failures_total",
                                    "Coded blocks that failed to decode, by reason.",
                                    prometheus::MetricType::Counter,
                                    {}};
  for (const auto& [reason, value] :
       {std::pair("damaged", stats.undecodable_frames_total),
        std::pair("profile_missing", stats.missing_profiles_total),
        std::pair("profile_unusable", stats.unusable_profiles_total)}) {
    prometheus::ClientMetric metric;
    metric.label = {{"reason", reason}};
    metric.counter.value = static_cast<double>(value);
    failures.metric.push_back(std::move(metric));
  }
  families.push_back(std::move(failures));
  families.push_back(Family("kvtrie_decode_seconds_total",
                            "Time spent in decoding blocks, over all threads.",
                            prometheus::MetricType::Counter, stats.decode_seconds_total));
  families.push_back(Family("kvtrie_recode_seconds_total",
                            "CPU time spent in coding blocks in the background.",
                            prometheus::MetricType::Counter, stats.recode_seconds_total));
  families.push_back(Family("kvtrie_degraded",
                            "1 when the store does not serve in full (see GetStatus or /readyz).",
                            prometheus::MetricType::Gauge, stats.degraded.empty() ? 0 : 1));
  return families;
}

std::vector<prometheus::MetricFamily> ToMetrics(const ServerGauges& gauges) {
  using prometheus::MetricType;
  return {
      Family("kvtrie_open_streams", "Fetch, Put and Watch calls that are open.", MetricType::Gauge,
             static_cast<double>(gauges.open_streams)),
      Family("kvtrie_stalled_streams_total", "Streams ended because their client stalled.",
             MetricType::Counter, static_cast<double>(gauges.stalled_streams_total)),
      Family("kvtrie_refused_streams_total", "Calls refused because too many are open.",
             MetricType::Counter, static_cast<double>(gauges.refused_streams_total)),
      Family("kvtrie_stream_memory_bytes", "Frames and announcements that streams hold.",
             MetricType::Gauge, static_cast<double>(gauges.stream_memory_bytes)),
      Family("kvtrie_lane_connections", "Connections of the shared-memory lane.", MetricType::Gauge,
             static_cast<double>(gauges.lane_connections)),
      Family("kvtrie_ready", "1 when the server serves.", MetricType::Gauge, gauges.ready ? 1 : 0),
      Family("kvtrie_uptime_seconds", "Since the start of the process.", MetricType::Gauge,
             gauges.uptime_seconds),
  };
}

std::vector<prometheus::MetricFamily> ToMetrics(const WorkerBackendStats& workers) {
  using prometheus::MetricType;
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  return {
      Family("kvtrie_worker_pool_blocks_total", "Blocks that workers coded for this server.",
             MetricType::Counter, number(workers.blocks_total)),
      Family("kvtrie_worker_pool_own_blocks_total",
             "Blocks that this server coded, since no worker did in time or may.",
             MetricType::Counter, number(workers.own_blocks_total)),
      Family("kvtrie_worker_pool_failed_calls_total", "Calls to workers that failed.",
             MetricType::Counter, number(workers.failed_calls_total)),
      Family("kvtrie_worker_pool_sent_profiles_total", "Profiles sent to workers.",
             MetricType::Counter, number(workers.sent_profiles_total)),
      Family("kvtrie_worker_pool_usable_workers", "Workers that are asked now.", MetricType::Gauge,
             number(workers.usable_workers)),
      Family("kvtrie_worker_pool_workers", "Workers that are known.", MetricType::Gauge,
             number(workers.workers)),
  };
}

std::vector<std::pair<std::string, std::uint64_t>> CountersByName(const EngineStats& stats) {
  std::vector<std::pair<std::string, std::uint64_t>> counters;
  for (const StatMetric& metric : kCounters)
    counters.emplace_back(metric.name, stats.*metric.value);
  return counters;
}

}  // namespace kvtrie
