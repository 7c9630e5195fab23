#pragma once

#include <grpc/support/time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvtrie {

// The end of a call, on the monotonic clock: a change of the wall clock moves no deadline.
class Deadline {
 public:
  static Deadline After(std::chrono::nanoseconds timeout) {
    return Deadline(std::chrono::steady_clock::now() + timeout);
  }

  // Never negative.
  std::chrono::nanoseconds remaining() const {
    return std::max(std::chrono::nanoseconds{0},
                    std::chrono::nanoseconds(end_ - std::chrono::steady_clock::now()));
  }
  // For poll(2): rounded up, so that a wait does not end just before the deadline.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<std::int64_t>(left, 1 << 30));
  }
  bool expired() const { return remaining().count() == 0; }
  // The deadline, or a moment from now if that is sooner.
  Deadline AtMost(std::chrono::nanoseconds from_now) const {
    return Deadline(std::min(end_, std::chrono::steady_clock::now() + from_now));
  }

  gpr_timespec ToGrpc() const {
    // gRPC rounds up to a millisecond, and would wait for it.
    if (expired()) return gpr_inf_past(GPR_CLOCK_MONOTONIC);
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_nanos(remaining().count(), GPR_TIMESPAN));
  }

 private:
  explicit Deadline(std::chrono::steady_clock::time_point end) : end_(end) {}
  std::chrono::steady_clock::time_point end_;
};

}  // namespace kvtrie
