#include "storage/base/byte_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace kvtrie {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ByteBudgetTest, GrantsUpToItsLimit) {
  ByteBudget budget(100);
  EXPECT_TRUE(budget.TryAcquire(60));
  EXPECT_FALSE(budget.TryAcquire(41));
  EXPECT_FALSE(budget.TryAcquire(30, /*keep_free_bytes=*/11));
  EXPECT_TRUE(budget.TryAcquire(30, /*keep_free_bytes=*/10));
  EXPECT_TRUE(budget.TryAcquire(10));
  EXPECT_EQ(budget.used_bytes(), 100u);
  budget.Release(100);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(ByteBudgetTest, RequestOverTheLimitIsGrantedAlone) {
  ByteBudget budget(100);
  EXPECT_TRUE(budget.TryAcquire(1000));
  EXPECT_FALSE(budget.TryAcquire(1));
  budget.Release(1000);
  ASSERT_TRUE(budget.TryAcquire(1));
  EXPECT_FALSE(budget.TryAcquire(1000));
}

TEST(ByteBudgetTest, WaitersAreServedInTheOrderTheyCame) {
  ByteBudget budget(100);
  std::vector<int> granted;
  ASSERT_TRUE(budget.TryAcquire(100));
  EXPECT_FALSE(budget.AcquireOrWait(90, [&] { granted.push_back(1); }));
  EXPECT_FALSE(budget.AcquireOrWait(10, [&] { granted.push_back(2); }));
  EXPECT_FALSE(budget.AcquireOrWait(10, [&] { granted.push_back(3); }));
  budget.Release(50);
  EXPECT_THAT(granted, IsEmpty());
  EXPECT_EQ(budget.waiting(), 3u);
  budget.Release(50);
  EXPECT_THAT(granted, ElementsAre(1, 2));
  EXPECT_EQ(budget.waiting(), 1u);
  budget.Release(90);
  EXPECT_THAT(granted, ElementsAre(1, 2, 3));
}

TEST(ByteBudgetTest, SmallRequestsDoNotOvertakeALargeOne) {
  ByteBudget budget(100);
  bool granted = false;
  ASSERT_TRUE(budget.TryAcquire(50));
  EXPECT_FALSE(budget.AcquireOrWait(80, [&] { granted = true; }));
  EXPECT_FALSE(budget.TryAcquire(10));
  budget.Release(50);
  EXPECT_TRUE(granted);
}

// The callback may use the budget: it runs outside of the lock.
TEST(ByteBudgetTest, CallbackMayReleaseAtOnce) {
  ByteBudget budget(10);
  ASSERT_TRUE(budget.TryAcquire(10));
  EXPECT_FALSE(budget.AcquireOrWait(10, [&] { budget.Release(10); }));
  budget.Release(10);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(ByteBudgetTest, ReservationGivesBackOnce) {
  ByteBudget budget(100);
  {
    ASSERT_TRUE(budget.TryAcquire(30));
    ByteReservation first(&budget, 30);
    ByteReservation second = std::move(first);
    EXPECT_EQ(budget.used_bytes(), 30u);
    EXPECT_EQ(second.bytes(), 30u);
    ASSERT_TRUE(budget.TryAcquire(20));
    second = ByteReservation(&budget, 20);
    EXPECT_EQ(budget.used_bytes(), 20u);
  }
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(ByteBudgetTest, ManyThreadsNeverExceedIt) {
  constexpr std::size_t kLimit = 1000;
  ByteBudget budget(kLimit);
  std::atomic<std::size_t> held = 0;
  std::atomic<bool> exceeded = false;
  std::atomic<int> granted = 0;
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  const auto hold = [&](std::size_t bytes) {
    if (held.fetch_add(bytes) + bytes > kLimit) exceeded = true;
    held.fetch_sub(bytes);
    ++granted;
    budget.Release(bytes);
  };
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t round = 0; round < kRounds; ++round) {
        const std::size_t bytes = 1 + (thread * 7919 + round * 104'729) % kLimit;
        if (budget.AcquireOrWait(bytes, [&hold, bytes] { hold(bytes); })) hold(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
  EXPECT_EQ(granted, kThreads * kRounds);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

}  // namespace
}  // namespace kvtrie
