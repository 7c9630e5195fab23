#include "storage/base/clock.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(SystemClockTest, MonotonicNeverGoesBack) {
  Clock::Duration last = SystemClock().Monotonic();
  for (int i = 0; i < 1000; ++i) {
    const Clock::Duration now = SystemClock().Monotonic();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(SystemClockTest, UnixSecondsIsInThisCentury) {
  constexpr std::int64_t kYear2020 = 1'577'836'800;
  constexpr std::int64_t kYear2100 = 4'102'444'800;
  EXPECT_GT(SystemClock().UnixSeconds(), kYear2020);
  EXPECT_LT(SystemClock().UnixSeconds(), kYear2100);
}

}  // namespace
}  // namespace kvtrie
