#include "storage/engine/reuse_model.h"

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

const NodeTraffic kForkOfA(NodeOrigin::kFork, 1);
const NodeTraffic kForkOfB(NodeOrigin::kFork, 3);

// Blocks that are used again after an exponential time, or given up at `end`.
void Watch(ReuseModel& model, NodeTraffic traffic, double mean_seconds, double share, double end,
           int count) {
  std::mt19937_64 random(1);
  for (int i = 0; i < count; ++i) {
    const double chance = std::uniform_real_distribution<>()(random);
    const double at = std::exponential_distribution<>(1 / mean_seconds)(random);
    if (chance < share && at < end) {
      model.Reused(ReuseModel::CellOf(traffic, static_cast<std::uint32_t>(at)), 1);
    } else {
      model.GivenUp(ReuseModel::CellOf(traffic, static_cast<std::uint32_t>(end)), 1);
    }
  }
}

TEST(ReuseModelTest, WithoutObservationsMoreUsesAndLessIdleTimeAreWorthMore) {
  const ReuseModel model;
  NodeTraffic used = kForkOfA;
  for (int use = 0; use < 10; ++use) {
    const NodeTraffic once_more = used.Used(20);
    for (const std::uint32_t idle : {0u, 5u, 60u, 3600u}) {
      EXPECT_GE(model.UsesPerSecond(once_more, idle), model.UsesPerSecond(used, idle))
          << use << " " << idle;
    }
    used = once_more;
  }
  EXPECT_GT(model.UsesPerSecond(used, 30), 2 * model.UsesPerSecond(kForkOfA, 30));
  double before = model.UsesPerSecond(used, 0);
  for (std::uint32_t idle = 1; idle < 1u << 20; idle += idle / 3 + 1) {
    const double now = model.UsesPerSecond(used, idle);
    EXPECT_LE(now, before) << idle;
    EXPECT_GT(now, 0);
    before = now;
  }
}

TEST(ReuseModelTest, LearnsTheRateOfMemorylessTraffic) {
  ReuseModel model;
  Watch(model, kForkOfA, 100, 1, 2000, 200'000);
  model.Update({});
  for (const std::uint32_t idle : {10u, 50u, 200u}) {
    EXPECT_NEAR(model.UsesPerSecond(kForkOfA, idle), 0.01, 0.002) << idle;
    EXPECT_NEAR(model.Probability(kForkOfA, idle, 50), 1 - std::exp(-0.5), 0.05) << idle;
  }
  EXPECT_EQ(model.Probability(kForkOfA, 10, 0), 0);
  EXPECT_GT(model.Probability(kForkOfA, 10, 1e9), 0.99);
}

TEST(ReuseModelTest, TellsScansFromWhatComesBack) {
  ReuseModel model;
  Watch(model, kForkOfA, 100, 0.02, 1000, 50'000);
  Watch(model, kForkOfB, 100, 0.6, 1000, 50'000);
  model.Update({});
  EXPECT_GT(model.UsesPerSecond(kForkOfB, 20), 10 * model.UsesPerSecond(kForkOfA, 20));
  EXPECT_NEAR(model.Probability(kForkOfB, 0, 1000), 0.6, 0.06);
  EXPECT_NEAR(model.Probability(kForkOfA, 0, 1000), 0.02, 0.02);
  // A long silence says that it is one of those that do not come.
  EXPECT_LT(model.UsesPerSecond(kForkOfB, 900), model.UsesPerSecond(kForkOfB, 100) / 4);
}

TEST(ReuseModelTest, APauseIsWaitedForAndNotLonger) {
  ReuseModel model;
  for (int i = 0; i < 20'000; ++i) model.Reused(ReuseModel::CellOf(kForkOfA, 100 + i % 50), 1);
  for (int i = 0; i < 20'000; ++i) model.GivenUp(ReuseModel::CellOf(kForkOfA, 4000), 1);
  model.Update({});
  // Worth most shortly before, little once the time is over.
  EXPECT_GT(model.UsesPerSecond(kForkOfA, 88), model.UsesPerSecond(kForkOfA, 2));
  EXPECT_GT(model.UsesPerSecond(kForkOfA, 88), 10 * model.UsesPerSecond(kForkOfA, 400));
}

TEST(ReuseModelTest, WhatStillWaitsCountsAsNotUsed) {
  ReuseModel certain, doubtful;
  for (ReuseModel* model : {&certain, &doubtful})
    model->Reused(ReuseModel::CellOf(kForkOfA, 50), 10'000);
  certain.Update({});
  const ReuseModel::Waiting waiting{ReuseModel::CellOf(kForkOfA, 1000), 90'000};
  doubtful.Update({&waiting, 1});
  EXPECT_GT(certain.Probability(kForkOfA, 40, 60), 0.8);
  EXPECT_NEAR(doubtful.Probability(kForkOfA, 40, 60), 0.1, 0.03);
}

TEST(ReuseModelTest, AWorkloadThatChangesIsFollowed) {
  ReuseModel model;
  Watch(model, kForkOfA, 50, 0.9, 500, 60'000);
  model.Update({});
  const double before = model.Probability(kForkOfA, 0, 500);
  for (int round = 0; round < 40; ++round) {
    Watch(model, kForkOfA, 50, 0.05, 500, 20'000);
    model.Update({});
  }
  EXPECT_GT(before, 0.8);
  EXPECT_LT(model.Probability(kForkOfA, 0, 500), 0.15);
}

TEST(ReuseModelTest, ClassesThatWereNotSeenLeanOnThoseUsedAsOften) {
  ReuseModel model;
  Watch(model, kForkOfA.Used(10), 100, 0.1, 1000, 50'000);
  model.Update({});
  const ReuseModel fresh;
  const NodeTraffic other_gap = kForkOfB.Used(500);
  EXPECT_LT(model.Probability(other_gap, 0, 1000), 0.2);
  EXPECT_GT(fresh.Probability(other_gap, 0, 1000), 0.5);
}

TEST(ReuseModelTest, CountsFromManyThreadsAllArrive) {
  ReuseModel model;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&model] {
      for (int i = 0; i < 25'000; ++i) {
        model.Reused(ReuseModel::CellOf(kForkOfA, 50), 1);
        model.GivenUp(ReuseModel::CellOf(kForkOfA, 1000), 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(model.WantsUpdate());
  model.Update({});
  EXPECT_FALSE(model.WantsUpdate());
  EXPECT_NEAR(model.Probability(kForkOfA, 40, 60), 0.5, 0.02);
}

}  // namespace
}  // namespace kvtrie
