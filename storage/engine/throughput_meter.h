#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"
#include "storage/kv/quality.h"

namespace kvtrie {

// How much of some work is done per second of the time in which any of it is under way: what
// somebody who brings more of it can expect, with the threads that there are. About the last second
// of such time is remembered, for kKnownFor: so that what nobody asks for any more, because it is
// slow, is tried again. Thread-safe; SecondsPerUnit takes no lock.
class ThroughputMeter {
 public:
  static constexpr std::chrono::seconds kKnownFor{30};

  explicit ThroughputMeter(const Clock& clock) : clock_(clock) {}

  // A piece of work begins, and ends with so much done. As many ends as begins.
  void Begin();
  void End(double amount);

  // 0: nothing was measured lately.
  double SecondsPerUnit() const;

 private:
  const Clock& clock_;
  std::atomic<double> seconds_per_unit_{0};
  std::atomic<Clock::Duration::rep> measured_{0};  // when
  absl::Mutex mutex_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  Clock::Duration counted_to_ ABSL_GUARDED_BY(mutex_){};  // while work is under way
  double seconds_ ABSL_GUARDED_BY(mutex_) = 0;
  double amount_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One for the frames of each codec: these are of about one size, and differ in cost.
class ThroughputMeters {
 public:
  explicit ThroughputMeters(const Clock& clock)
      : meters_{ThroughputMeter(clock), ThroughputMeter(clock), ThroughputMeter(clock),
                ThroughputMeter(clock), ThroughputMeter(clock)} {}

  // REQUIRES: IsCodec(codec).
  ThroughputMeter& Of(CodecId codec) { return meters_[static_cast<std::size_t>(codec) - 1]; }
  // By codec; one of which nothing is known is as the slowest of the others. 0: nothing is, of any.
  using PerCodec = std::array<double, 5>;
  PerCodec SecondsPerUnit() const;

 private:
  static_assert(static_cast<std::size_t>(CodecId::kReferenced) == 5);
  std::array<ThroughputMeter, 5> meters_;
};

}  // namespace kvtrie
