#include "storage/base/log_limiter.h"

#include <chrono>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(LogLimiterTest, OneInAnIntervalSaysHowManyWereHeldBack) {
  LogLimiter limiter(seconds(1));
  EXPECT_EQ(limiter.Admit(seconds(5)), 0u);
  EXPECT_EQ(limiter.Admit(seconds(5)), std::nullopt);
  EXPECT_EQ(limiter.Admit(milliseconds(5999)), std::nullopt);
  EXPECT_EQ(limiter.Admit(seconds(6)), 2u);
  EXPECT_EQ(limiter.Admit(seconds(8)), 0u);
}

}  // namespace
}  // namespace kvtrie
