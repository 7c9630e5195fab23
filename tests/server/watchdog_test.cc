#include "server/watchdog.h"

#include <gtest/gtest.h>

#include <deque>

#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

class WatchdogTest : public ::testing::Test {
 protected:
  void RunQueue() {
    while (!queue_.empty()) {
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      work();
    }
  }

  FakeClock clock_;
  std::deque<std::function<void()>> queue_;
  bool queue_full_ = false;
  Watchdog watchdog_{[this](std::function<void()> work) {
                       if (queue_full_) return false;
                       queue_.push_back(std::move(work));
                       return true;
                     },
                     std::chrono::seconds(10), clock_};
};

TEST_F(WatchdogTest, WorkThatMovesIsNoComplaint) {
  for (int i = 0; i < 100; ++i) {
    watchdog_.Tick();
    RunQueue();
    clock_.Advance(std::chrono::seconds(1));
    EXPECT_EQ(watchdog_.Complaint(), "");
  }
}

TEST_F(WatchdogTest, StuckWorkIsAndEndsWhenItMoves) {
  watchdog_.Tick();
  clock_.Advance(std::chrono::seconds(9));
  watchdog_.Tick();
  EXPECT_EQ(watchdog_.Complaint(), "");
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_NE(watchdog_.Complaint(), "");
  RunQueue();
  EXPECT_EQ(watchdog_.Complaint(), "");
}

TEST_F(WatchdogTest, AQueueThatStaysFullIsStuckToo) {
  queue_full_ = true;
  for (int i = 0; i < 11; ++i) {
    watchdog_.Tick();
    clock_.Advance(std::chrono::seconds(1));
  }
  EXPECT_NE(watchdog_.Complaint(), "");
}

}  // namespace
}  // namespace kvtrie
