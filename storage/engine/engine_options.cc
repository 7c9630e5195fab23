#include "storage/engine/engine_options.h"

#include "absl/strings/str_cat.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

}  // namespace

absl::Status EngineOptions::Validate() const {
  const auto fault = [](const char* field, const char* rule) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", rule));
  };
  if (data_dir.empty()) return fault("data_dir", "must be set to a folder");
  if (segment_bytes < kMiB || segment_bytes > 1024 * kMiB) {
    return fault("segment_bytes", "must be between 1 MiB and 1 GiB");
  }
  if (disk_limit_bytes < 64 * kMiB) return fault("disk_limit_bytes", "must be at least 64 MiB");
  if (disk_limit_bytes < 2 * segment_bytes) {
    return fault("disk_limit_bytes", "must be at least two segments (segment_bytes)");
  }
  if (prefetch_percent_min < 50 || prefetch_percent_min > 100) {
    return fault("prefetch_percent_min", "must be between 50 and 100");
  }
  if (token_cache_bytes < kMiB) return fault("token_cache_bytes", "must be at least 1 MiB");
  if (put_memory_bytes < kMiB) return fault("put_memory_bytes", "must be at least 1 MiB");
  if (index_bytes_max < kMiB) return fault("index_bytes_max", "must be at least 1 MiB");
  if (run_index_bytes != 0 && run_index_bytes < kMiB) {
    return fault("run_index_bytes", "must be at least 1 MiB, or 0");
  }
  if (io_threads < 1 || io_threads > 256) return fault("io_threads", "must be between 1 and 256");
  if (decode_threads < 1 || decode_threads > 256) {
    return fault("decode_threads", "must be between 1 and 256");
  }
  if (recode_quality && (!IsQuality(*recode_quality) || *recode_quality == Quality::kExact ||
                         *recode_quality == Quality::kUnrated)) {
    return fault("recode_quality", "must be a level that profiles have: near-exact, high or small");
  }
  if (recode_cpu_percent < 1 || recode_cpu_percent > 100) {
    return fault("recode_cpu_percent", "must be between 1 and 100");
  }
  if (io_queue_max < 1) return fault("io_queue_max", "must be at least 1");
  if (sync_interval.count() < 1) return fault("sync_interval", "must be at least 1 ms");
  if (lease_max.count() < 1) return fault("lease_max", "must be at least 1 ms");
  if (pin_max.count() < 1) return fault("pin_max", "must be at least 1 s");
  if (pinned_percent_max > 90) return fault("pinned_percent_max", "must be at most 90");
  if (event_log_max < 1) return fault("event_log_max", "must be at least 1");
  return absl::OkStatus();
}

}  // namespace kvtrie
