#pragma once

#include <chrono>
#include <cstdint>

namespace kvtrie {

// Time as the storage layer sees it. Injected, so that tests decide when a lease ends.
// Thread-safe.
class Clock {
 public:
  using Duration = std::chrono::nanoseconds;

  virtual ~Clock() = default;

  // Since an arbitrary start; never goes back.
  virtual Duration Monotonic() const = 0;

  // Seconds since 1970, UTC.
  virtual std::int64_t UnixSeconds() const = 0;
};

// The machine's clock; lives for ever.
Clock& SystemClock();

}  // namespace kvtrie
