#include "server/rpc_metrics.h"

#include <algorithm>
#include <string>

namespace kvtrie {
namespace {

constexpr std::array<const char*, kRpcMethodCount> kRpcNames = {
    "RegisterModel", "PutProfile",   "GetProfile", "ListProfiles",  "DeleteProfile", "Lookup",
    "Similar",       "Fetch",        "Put",        "Touch",         "Pin",           "Unpin",
    "Delete",        "SetRetention", "Watch",      "OpenLocalLane", "LaneFetch",     "LanePut",
    "Admin",         "Encode",       "Decode",     "FitProfile",    "PutProfile",    "Describe"};
constexpr std::array<const char*, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

}  // namespace

void RpcMetrics::Started(RpcMethod method) {
  methods_[static_cast<std::size_t>(method)].in_flight.fetch_add(1, kOrder);
}

void RpcMetrics::Finished(RpcMethod method, int code, std::chrono::nanoseconds elapsed) {
  Method& counters = methods_[static_cast<std::size_t>(method)];
  counters.in_flight.fetch_sub(1, kOrder);
  const auto code_index = static_cast<std::size_t>(code);
  counters.by_code[code_index < kCodeCount ? code_index : 2].fetch_add(1, kOrder);
  const double seconds = std::chrono::duration<double>(elapsed).count();
  const auto bucket = static_cast<std::size_t>(
      std::lower_bound(kBucketSeconds.begin(), kBucketSeconds.end(), seconds) -
      kBucketSeconds.begin());
  counters.by_bucket[bucket].fetch_add(1, kOrder);
  counters.elapsed_ns.fetch_add(static_cast<std::uint64_t>(elapsed.count()), kOrder);
}

std::int64_t RpcMetrics::in_flight() const {
  std::int64_t total = 0;
  for (const Method& method : methods_) total += method.in_flight.load(kOrder);
  return total;
}

std::vector<prometheus::MetricFamily> RpcMetrics::Collect() const {
  prometheus::MetricFamily calls{
      "kvtrie_rpc_total", "Finished calls.", prometheus::MetricType::Counter, {}};
  prometheus::MetricFamily running{
      "kvtrie_rpc_in_flight", "Calls that are running.", prometheus::MetricType::Gauge, {}};
  prometheus::MetricFamily latency{"kvtrie_rpc_seconds",
                                   "Time from the start of a call on the server to its end.",
                                   prometheus::MetricType::Histogram,
                                   {}};
  for (auto i = static_cast<std::size_t>(first_); i <= static_cast<std::size_t>(last_); ++i) {
    const Method& method = methods_[i];
    const prometheus::ClientMetric::Label method_label{"method", kRpcNames[i]};
    for (std::size_t code = 0; code < kCodeCount; ++code) {
      const std::uint64_t count = method.by_code[code].load(kOrder);
      // OK is always there, so that a rate over it exists from the start on.
      if (count == 0 && code != 0) continue;
      prometheus::ClientMetric metric;
      metric.label = {method_label, {"code", kCodeNames[code]}};
      metric.counter.value = static_cast<double>(count);
      calls.metric.push_back(std::move(metric));
    }

    prometheus::ClientMetric gauge;
    gauge.label = {method_label};
    gauge.gauge.value = static_cast<double>(method.in_flight.load(kOrder));
    running.metric.push_back(std::move(gauge));

    prometheus::ClientMetric histogram;
    histogram.label = {method_label};
    std::uint64_t cumulative = 0;
    for (std::size_t bucket = 0; bucket < method.by_bucket.size(); ++bucket) {
      cumulative += method.by_bucket[bucket].load(kOrder);
      const double bound = bucket < kBucketSeconds.size() ? kBucketSeconds[bucket]
                                                          : std::numeric_limits<double>::infinity();
      histogram.histogram.bucket.push_back({cumulative, bound});
    }
    histogram.histogram.sample_count = cumulative;
    histogram.histogram.sample_sum = static_cast<double>(method.elapsed_ns.load(kOrder)) * 1e-9;
    latency.metric.push_back(std::move(histogram));
  }

  const auto counter = [](const char* name, const char* help, std::uint64_t value) {
    prometheus::MetricFamily family{name, help, prometheus::MetricType::Counter, {}};
    prometheus::ClientMetric metric;
    metric.counter.value = static_cast<double>(value);
    family.metric.push_back(std::move(metric));
    return family;
  };
  return {std::move(calls), std::move(running), std::move(latency),
          counter("kvtrie_sent_bytes_total", "Bytes of blocks sent to clients.",
                  sent_bytes_.load(kOrder)),
          counter("kvtrie_received_bytes_total", "Bytes of blocks received from clients.",
                  received_bytes_.load(kOrder))};
}

}  // namespace kvtrie
