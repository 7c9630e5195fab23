#include "client/retry.h"

#include <gtest/gtest.h>

#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;

TEST(BackoffTest, PausesGrowToTheCapWithJitterOfHalf) {
  RetryOptions options;
  options.initial_backoff = milliseconds(10);
  options.max_backoff = milliseconds(80);
  Backoff backoff(options, /*seed=*/7);
  for (const int full_ms : {10, 20, 40, 80, 80, 80}) {
    const auto pause = backoff.Next();
    EXPECT_GE(pause, milliseconds(full_ms) / 2);
    EXPECT_LE(pause, milliseconds(full_ms));
  }
}

TEST(BackoffTest, CallersThatFailTogetherDoNotComeBackTogether) {
  Backoff one(RetryOptions{}, /*seed=*/1);
  Backoff other(RetryOptions{}, /*seed=*/2);
  EXPECT_NE(one.Next(), other.Next());
}

TEST(RetryBudgetTest, EndsAndComesBackWithTime) {
  FakeClock clock;
  RetryOptions options;
  options.budget_tokens = 3;
  options.budget_tokens_per_second = 2;
  RetryBudget budget(options, clock);
  EXPECT_TRUE(budget.TryTake());
  EXPECT_TRUE(budget.TryTake());
  EXPECT_TRUE(budget.TryTake());
  EXPECT_FALSE(budget.TryTake());
  clock.Advance(milliseconds(499));
  EXPECT_FALSE(budget.TryTake());
  clock.Advance(milliseconds(2));
  EXPECT_TRUE(budget.TryTake());
  EXPECT_FALSE(budget.TryTake());
}

TEST(RetryBudgetTest, ComesBackWithSuccess) {
  FakeClock clock;
  RetryOptions options;
  options.budget_tokens = 1;
  options.budget_tokens_per_success = 0.5;
  RetryBudget budget(options, clock);
  EXPECT_TRUE(budget.TryTake());
  budget.CallSucceeded();
  EXPECT_FALSE(budget.TryTake());
  budget.CallSucceeded();
  EXPECT_TRUE(budget.TryTake());
}

TEST(RetryBudgetTest, NeverHoldsMoreThanItsSize) {
  FakeClock clock;
  RetryOptions options;
  options.budget_tokens = 2;
  RetryBudget budget(options, clock);
  clock.Advance(std::chrono::hours(1));
  for (int i = 0; i < 100; ++i) budget.CallSucceeded();
  EXPECT_TRUE(budget.TryTake());
  EXPECT_TRUE(budget.TryTake());
  EXPECT_FALSE(budget.TryTake());
}

TEST(IsRetriableTest, OnlyUnavailable) {
  EXPECT_TRUE(IsRetriable(absl::UnavailableError("")));
  EXPECT_FALSE(IsRetriable(absl::OkStatus()));
  EXPECT_FALSE(IsRetriable(absl::ResourceExhaustedError("")));
  EXPECT_FALSE(IsRetriable(absl::DeadlineExceededError("")));
  EXPECT_FALSE(IsRetriable(absl::DataLossError("")));
}

}  // namespace
}  // namespace kvtrie
