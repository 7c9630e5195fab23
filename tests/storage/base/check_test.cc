#include "storage/base/check.h"

#include <gtest/gtest.h>

namespace kvtrie {
namespace {

TEST(CheckTest, TrueConditionDoesNothingAndIsEvaluatedOnce) {
  int evaluations = 0;
  KV_CHECK(++evaluations == 1);
  EXPECT_EQ(evaluations, 1);
}

TEST(CheckDeathTest, FalseConditionSaysWhereAndWhat) {
  const int answer = 41;
  EXPECT_DEATH(KV_CHECK(answer == 42), "check_test.cc:[0-9]+: check failed: answer == 42");
}

TEST(CheckDeathTest, DebugCheckStopsOnlyDebugBuilds) {
  const int answer = 41;
  EXPECT_DEBUG_DEATH(KV_DCHECK(answer == 42), "answer == 42");
}

}  // namespace
}  // namespace kvtrie
