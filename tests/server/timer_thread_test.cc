#include "server/timer_thread.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

namespace kvtrie {
namespace {

TEST(TimerThreadTest, PostedWorkRunsInOrderOnAnotherThread) {
  TimerThread timer;
  std::vector<int> order;
  absl::Notification done;
  std::thread::id ran_on;
  for (int i = 0; i < 3; ++i) timer.Post([&order, i] { order.push_back(i); });
  timer.Post([&] {
    ran_on = std::this_thread::get_id();
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST(TimerThreadTest, PeriodicWorkComesAgain) {
  TimerThread timer;
  auto remaining = std::make_shared<absl::BlockingCounter>(3);
  auto left = std::make_shared<int>(3);
  timer.Every(std::chrono::milliseconds(1), [remaining, left] {
    if ((*left)-- > 0) remaining->DecrementCount();
  });
  remaining->Wait();
}

TEST(TimerThreadTest, WorkAfterTheStopIsDropped) {
  TimerThread timer;
  timer.Stop();
  bool ran = false;
  timer.Post([&ran] { ran = true; });
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace kvtrie
