#include "server/log.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(EscapeJsonTest, EscapesWhatJsonMust) {
  EXPECT_EQ(EscapeJson("a\"b\\c\n\x01\xff"), "a\\\"b\\\\c\\u000a\\u0001\\u00ff");
}

TEST(LogLimiterTest, LetsOneThroughPerPeriodAndCountsTheRest) {
  LogLimiter limiter(std::chrono::seconds(10));
  const std::chrono::steady_clock::time_point start{std::chrono::hours(1)};
  std::uint64_t suppressed = 99;
  EXPECT_TRUE(limiter.Admit(start, &suppressed));
  EXPECT_EQ(suppressed, 0u);
  for (int i = 0; i < 20'000; ++i) EXPECT_FALSE(limiter.Admit(start, &suppressed));
  EXPECT_FALSE(limiter.Admit(start + std::chrono::milliseconds(9999), &suppressed));
  EXPECT_TRUE(limiter.Admit(start + std::chrono::seconds(10), &suppressed));
  EXPECT_EQ(suppressed, 20'001u);
}

}  // namespace
}  // namespace kvtrie
