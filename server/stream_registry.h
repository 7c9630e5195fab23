#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"

namespace kvtrie {

class StreamRegistry;

// A stream that the server can end: because its peer stalls, or because the server stops.
class TrackedStream {
 public:
  virtual ~TrackedStream() = default;

  // Ends the stream with this status, at once: what is queued for the peer is dropped.
  virtual void Abort(const absl::Status& status) = 0;
  // The server drains: end when what was begun is done.
  virtual void OnDrain() = 0;
  // From time to time.
  virtual void OnTick() {}

 protected:
  // From now on the peer owes progress ... or does not. Cheap; thread-safe.
  void ArmStall(Clock::Duration now) { waiting_since_.store(now.count(), kOrder); }
  void DisarmStall() { waiting_since_.store(0, kOrder); }
  bool stall_is_armed() const { return waiting_since_.load(kOrder) != 0; }

 private:
  friend class StreamRegistry;
  static constexpr auto kOrder = std::memory_order_relaxed;
  std::atomic<std::int64_t> waiting_since_{0};  // 0: not waiting for the peer
};

// The open streams of a server: how many there may be, which of them stall, and their end when it
// drains. Thread-safe. Calls into streams are made without a lock.
class StreamRegistry {
 public:
  StreamRegistry(std::size_t streams_max, std::chrono::milliseconds stall_limit, Clock& clock)
      : streams_max_(streams_max), stall_limit_(stall_limit), clock_(clock) {}

  // Unavailable: there are too many streams, or the server drains.
  absl::Status Add(const std::shared_ptr<TrackedStream>& stream);
  void Remove(const TrackedStream* stream);

  // Tells all streams that time has passed, and ends those whose peers have owed progress for
  // longer than the limit: how many. Called once a period.
  std::size_t Tick();
  std::chrono::milliseconds tick_period() const;

  void Drain();
  void AbortAll(const absl::Status& status);

  // True: no stream is open, or none was any more within the time.
  bool AwaitNone(std::chrono::milliseconds timeout) const;

  std::size_t stream_count() const;
  // For want of room.
  std::uint64_t refused_total() const { return refused_total_.load(std::memory_order_relaxed); }
  std::uint64_t stalled_total() const { return stalled_total_.load(std::memory_order_relaxed); }
  Clock& clock() const { return clock_; }

 private:
  std::vector<std::shared_ptr<TrackedStream>> Streams() const;

  const std::size_t streams_max_;
  const std::chrono::milliseconds stall_limit_;
  Clock& clock_;
  std::atomic<std::uint64_t> stalled_total_{0};
  std::atomic<std::uint64_t> refused_total_{0};
  mutable absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<const TrackedStream*, std::weak_ptr<TrackedStream>> streams_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvtrie
