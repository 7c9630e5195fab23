#include "storage/engine/work_pool.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

// Keeps the only thread of a pool busy until it is released.
class Blocker {
 public:
  explicit Blocker(WorkPool& pool) {
    pool.Post([this] {
      running_.Notify();
      released_.WaitForNotification();
    });
    running_.WaitForNotification();
  }
  void Release() { released_.Notify(); }

 private:
  absl::Notification running_;
  absl::Notification released_;
};

TEST(WorkPoolTest, RunsAllThatItTook) {
  std::atomic<int> count{0};
  {
    WorkPool pool(4, 1000);
    for (int i = 0; i < 1000; ++i) {
      while (!pool.TryPost([&count] { ++count; })) std::this_thread::yield();
    }
  }
  EXPECT_EQ(count, 1000);
}

TEST(WorkPoolTest, RefusesWhatIsOverItsQueueAndRunsTheRest) {
  std::atomic<int> count{0};
  {
    WorkPool pool(1, 3);
    Blocker blocker(pool);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool.TryPost([&count] { ++count; }));
    EXPECT_EQ(pool.queue_length(), 3u);
    EXPECT_FALSE(pool.TryPost([&count] { count += 100; }));
    pool.Post([&count] { count += 10; });  // bounded elsewhere
    EXPECT_EQ(pool.queue_length(), 4u);
    blocker.Release();
  }
  EXPECT_EQ(count, 13);
}

TEST(WorkPoolTest, SpareThreadsAreThoseThatNeitherWorkNorAreWaitedFor) {
  WorkPool pool(3, 10);
  EXPECT_EQ(pool.thread_count(), 3u);
  EXPECT_EQ(pool.spare_threads(), 3);
  {
    Blocker first(pool);
    EXPECT_EQ(pool.spare_threads(), 2);
    Blocker second(pool);
    Blocker third(pool);
    EXPECT_EQ(pool.spare_threads(), 0);
    pool.Post([] {});
    EXPECT_EQ(pool.spare_threads(), -1);
    first.Release();
    second.Release();
    third.Release();
    while (pool.spare_threads() < 3) std::this_thread::yield();
  }
  EXPECT_EQ(pool.queue_length(), 0u);
}

TEST(WorkPoolTest, OneThreadRunsInTheOrderOfPosting) {
  std::vector<int> order;
  {
    WorkPool pool(1, 100);
    for (int i = 0; i < 100; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(WorkPoolTest, RefusedWorkIsDroppedWithWhatItHolds) {
  WorkPool pool(1, 1);
  Blocker blocker(pool);
  ASSERT_TRUE(pool.TryPost([] {}));
  auto held = std::make_shared<int>(1);
  EXPECT_FALSE(pool.TryPost([held] { FAIL(); }));
  EXPECT_EQ(held.use_count(), 1);
  blocker.Release();
}

TEST(WorkPoolTest, WorkMayPostWork) {
  std::atomic<int> count{0};
  {
    WorkPool pool(2, 10);
    absl::Notification done;
    pool.Post([&] {
      pool.Post([&] {
        ++count;
        done.Notify();
      });
    });
    done.WaitForNotification();
  }
  EXPECT_EQ(count, 1);
}

// Work that is run while the pool ends may still post: that runs too.
TEST(WorkPoolTest, WorkThatIsPostedWhileEndingRunsToo) {
  std::atomic<int> count{0};
  auto pool = std::make_unique<WorkPool>(1, 10);
  WorkPool& running = *pool;
  Blocker blocker(running);
  running.Post([&] { running.Post([&count] { ++count; }); });
  blocker.Release();
  running.Finish();
  EXPECT_EQ(count, 1);
  running.Finish();
  pool.reset();
}

}  // namespace
}  // namespace kvtrie
