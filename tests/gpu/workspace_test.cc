#include "gpu/workspace.h"

#include <atomic>
#include <thread>
#include <utility>

#include "gpu/host_device.h"
#include "gtest/gtest.h"
#include "tests/gpu/faulty_device.h"

namespace kvtrie::gpu {
namespace {

TEST(MemoryLayoutTest, PartsAreAligned) {
  MemoryLayout layout;
  EXPECT_EQ(layout.Add(0), 0u);
  EXPECT_EQ(layout.Add(1), 0u);
  EXPECT_EQ(layout.Add<double>(33), 256u);
  EXPECT_EQ(layout.Add(256), 768u);
  EXPECT_EQ(layout.bytes(), 1024u);
}

TEST(WorkspaceTest, GrowsAndStaysThen) {
  const auto device = MakeHostDevice(1 << 20);
  const auto workspace = *Workspace::Of(*device);
  ASSERT_TRUE(workspace->Reserve(1000, 10, 20).ok());
  const std::byte* const memory = workspace->device();
  ASSERT_TRUE(workspace->Reserve(500, 10, 20).ok());
  EXPECT_EQ(workspace->device(), memory);
  // It has to let go of what it has.
  ASSERT_TRUE(workspace->Reserve(600'000, 10, 20).ok());
  EXPECT_TRUE(absl::IsUnavailable(workspace->Reserve(2'000'000, 10, 20)));
  ASSERT_TRUE(workspace->Reserve(800'000, 10, 20).ok());
}

TEST(WorkspacePoolTest, LendsSoManyAndNoMore) {
  const auto device = MakeHostDevice(1 << 20);
  WorkspacePool pool(*device, 2);
  EXPECT_EQ(pool.count(), 2u);
  WorkspacePool::Lease first = *pool.Acquire();
  const Workspace* const address = first.get();
  WorkspacePool::Lease second = pool.TryAcquire();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(pool.TryAcquire(), nullptr);
  std::atomic<bool> has = false;
  std::thread waiter([&] {
    const WorkspacePool::Lease third = *pool.Acquire();
    has = true;
    EXPECT_EQ(third.get(), address);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(has);
  first = nullptr;
  waiter.join();
  EXPECT_TRUE(has);
}

TEST(WorkspacePoolTest, ADeviceThatFailsTakesNoPlaces) {
  Faults faults;
  FaultyDevice device(MakeHostDevice(1 << 20), faults);
  WorkspacePool pool(device, 1);
  faults.calls_left = 1;
  EXPECT_TRUE(absl::IsUnavailable(pool.Acquire().status()));
  EXPECT_EQ(pool.TryAcquire(), nullptr);
  faults.calls_left = Faults::kNone;
  WorkspacePool::Lease lease = *pool.Acquire();
  ASSERT_TRUE(lease->Reserve(100, 0, 0).ok());
  faults.calls_left = 0;
  lease->work().Zero(lease->device(), 100);
  lease = nullptr;
  faults.calls_left = Faults::kNone;
  lease = *pool.Acquire();
  EXPECT_EQ(lease->device(), nullptr) << "another one";
}

}  // namespace
}  // namespace kvtrie::gpu
