#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "storage/base/clock.h"

namespace kvtrie {

// Stands still until the test advances it. Thread-safe.
class FakeClock final : public Clock {
 public:
  Duration Monotonic() const override { return Duration(nanoseconds_.load()); }
  std::int64_t UnixSeconds() const override {
    return 1'700'000'000 + nanoseconds_.load() / 1'000'000'000;
  }
  void Advance(Duration by) { nanoseconds_ += by.count(); }

 private:
  std::atomic<std::int64_t> nanoseconds_{1'000'000'000};
};

}  // namespace kvtrie
