#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvtrie {

// Every call that is counted. Order is that of kRpcNames.
enum class RpcMethod : std::uint8_t {
  kRegisterModel,
  kPutProfile,
  kGetProfile,
  kListProfiles,
  kDeleteProfile,
  kLookup,
  kSimilar,
  kFetch,
  kPut,
  kTouch,
  kPin,
  kUnpin,
  kDelete,
  kSetRetention,
  kWatch,
  kOpenLocalLane,
  kLaneFetch,
  kLanePut,
  kAdmin,
  // Of a worker.
  kEncode,
  kDecode,
  kFitProfile,
  kWorkerPutProfile,
  kDescribe,
};
inline constexpr std::size_t kRpcMethodCount = 24;

// Calls by method and code, their latency, and how many are running. Thread-safe without locks:
// counters of one method share no cache line with those of another.
class RpcMetrics : public prometheus::Collectable {
 public:
  // Those of a server.
  RpcMetrics() : RpcMetrics(RpcMethod::kRegisterModel, RpcMethod::kAdmin) {}
  // Collects these, and nothing of others.
  RpcMetrics(RpcMethod first, RpcMethod last) : first_(first), last_(last) {}

  void Started(RpcMethod method);
  void Finished(RpcMethod method, int code, std::chrono::nanoseconds elapsed);
  void Sent(std::uint64_t bytes) { sent_bytes_.fetch_add(bytes, kOrder); }
  void Received(std::uint64_t bytes) { received_bytes_.fetch_add(bytes, kOrder); }

  std::vector<prometheus::MetricFamily> Collect() const override;
  // Of all methods.
  std::int64_t in_flight() const;

 private:
  static constexpr auto kOrder = std::memory_order_relaxed;
  static constexpr std::size_t kCodeCount = 17;
  // Upper bounds in seconds; one bucket more for what is above them.
  static constexpr std::array kBucketSeconds = {50e-6, 100e-6, 200e-6, 500e-6, 1e-3,   2e-3, 5e-3,
                                                10e-3, 25e-3,  50e-3,  100e-3, 250e-3, 1.0,  5.0};

  struct alignas(64) Method {
    std::atomic<std::int64_t> in_flight{0};
    std::array<std::atomic<std::uint64_t>, kCodeCount> by_code{};
    std::array<std::atomic<std::uint64_t>, kBucketSeconds.size() + 1> by_bucket{};
    std::atomic<std::uint64_t> elapsed_ns{0};
  };
  const RpcMethod first_;
  const RpcMethod last_;
  std::array<Method, kRpcMethodCount> methods_;
  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::uint64_t> received_bytes_{0};
};

// One running call: counted from construction until Finish (or destruction, as CANCELLED).
class RpcProbe {
 public:
  RpcProbe(RpcMetrics& metrics, RpcMethod method)
      : metrics_(metrics), method_(method), started_(std::chrono::steady_clock::now()) {
    metrics_.Started(method_);
  }
  ~RpcProbe() { Finish(1); }
  RpcProbe(const RpcProbe&) = delete;
  RpcProbe& operator=(const RpcProbe&) = delete;

  // Only the first call counts.
  void Finish(int code) {
    if (finished_.exchange(true, std::memory_order_relaxed)) return;
    metrics_.Finished(method_, code, std::chrono::steady_clock::now() - started_);
  }

 private:
  RpcMetrics& metrics_;
  const RpcMethod method_;
  const std::chrono::steady_clock::time_point started_;
  std::atomic<bool> finished_{false};
};

}  // namespace kvtrie
