#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/base/clock.h"

namespace kvtrie {

// Keeps a message that can come in thousands from filling the log. Thread-safe.
class LogLimiter {
 public:
  explicit LogLimiter(Clock::Duration interval) : interval_(interval) {}

  // Whether to write now, and then how many were held back since the last one that was.
  std::optional<std::uint64_t> Admit(Clock::Duration now) {
    absl::MutexLock lock(&mutex_);
    if (last_ && now - *last_ < interval_) {
      ++held_back_;
      return std::nullopt;
    }
    last_ = now;
    const std::uint64_t held_back = held_back_;
    held_back_ = 0;
    return held_back;
  }

 private:
  const Clock::Duration interval_;
  absl::Mutex mutex_;
  std::optional<Clock::Duration> last_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t held_back_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvtrie
