#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvtrie/v1/codec.pb.h"
#include "server/rpc_metrics.h"
#include "server/stream_registry.h"
#include "server/timer_thread.h"
#include "server/worker/codec_checks.h"
#include "server/worker/codec_queue.h"
#include "server/worker/codec_stream.h"
#include "server/worker/profile_shelf.h"
#include "storage/base/byte_budget.h"

namespace kvtrie {

// Fitting takes all cores and much memory: one at a time, from its first text to its profile.
// Thread-safe.
class FitTurn {
 public:
  // False: it is taken.
  bool Take() {
    absl::MutexLock lock(&mutex_);
    return !std::exchange(taken_, true);
  }
  void GiveBack() {
    absl::MutexLock lock(&mutex_);
    taken_ = false;
    held_bytes_ = 0;
  }
  // What the one that has the turn holds, for metrics.
  void SetHeldBytes(std::size_t bytes) { held_bytes_ = bytes; }
  std::size_t held_bytes() const { return held_bytes_; }
  // False: it is still taken after that time.
  bool AwaitFree(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    const auto is_free = +[](bool* taken) { return !*taken; };
    return mutex_.AwaitWithTimeout(absl::Condition(is_free, &taken_), timeout);
  }

 private:
  absl::Mutex mutex_;
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<std::size_t> held_bytes_{0};
};

// What the calls of a worker share. Outlives every one of them.
struct WorkerContext {
  CodecStreamHost host;
  ProfileShelf& shelf;
  StreamRegistry& streams;
  RpcMetrics& metrics;
  TimerThread& chores;  // for what takes up to a second
  std::function<v1::DescribeResponse()> describe;
  FitTurn& fit_turn;
};

}  // namespace kvtrie
