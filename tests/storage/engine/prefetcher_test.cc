#include "storage/engine/prefetcher.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/engine/engine.h"
#include "tests/storage/base/fake_clock.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kFrameBytes = 4096;

StoredFrame FrameAt(std::uint32_t number) {
  StoredFrame frame;
  frame.at = {1, number * 8, kFrameBytes};
  return frame;
}

std::vector<StoredFrame> FramesFrom(std::uint32_t first, std::uint32_t count) {
  std::vector<StoredFrame> frames;
  for (std::uint32_t i = 0; i < count; ++i) frames.push_back(FrameAt(first + i));
  return frames;
}

SharedBytes Bytes() {
  auto buffer = std::make_shared<AlignedBuffer>(kFrameBytes);
  const std::span<const std::byte> view(buffer->data(), buffer->size());
  return {std::move(buffer), view};
}

class PrefetcherTest : public testing::Test {
 protected:
  void Start(unsigned threads, std::uint64_t frames_max) {
    tier_.emplace(std::size_t{100} * kFrameBytes, frames_max * kFrameBytes);
    pool_ = std::make_unique<WorkPool>(threads, 1000);
    prefetcher_ = std::make_unique<Prefetcher>(
        frames_max * kFrameBytes, clock_, *tier_, *pool_,
        [this](const StoredFrame& frame) -> std::optional<SharedBytes> {
          absl::MutexLock lock(&mutex_);
          read_.push_back(frame.at.offset_units / 8);
          mutex_.Await(absl::Condition(&may_read_));
          if (frame.at.offset_units == kGone * 8) return std::nullopt;
          return Bytes();
        });
  }
  ~PrefetcherTest() override {
    MayRead(true);
    if (prefetcher_ != nullptr) prefetcher_->Stop();
    if (pool_ != nullptr) pool_->Finish();
  }
  void MayRead(bool may) {
    absl::MutexLock lock(&mutex_);
    may_read_ = may;
  }
  std::vector<std::uint32_t> ReadSoFar() {
    absl::MutexLock lock(&mutex_);
    return read_;
  }
  void Want(const std::vector<StoredFrame>& frames) {
    prefetcher_->Want(frames, MemoryTier::MayReplace::kOldest);
  }
  void AwaitNothingPending() {
    while (prefetcher_->stats().pending_bytes > 0) std::this_thread::yield();
  }

  void AwaitIdlePool() {
    const auto all = static_cast<std::ptrdiff_t>(pool_->thread_count());
    while (pool_->spare_threads() < all) std::this_thread::yield();
  }

  static constexpr std::uint32_t kGone = 999;
  FakeClock clock_;
  std::optional<MemoryTier> tier_;
  std::unique_ptr<WorkPool> pool_;
  std::unique_ptr<Prefetcher> prefetcher_;
  absl::Mutex mutex_;
  bool may_read_ = true;
  std::vector<std::uint32_t> read_;
};

TEST_F(PrefetcherTest, ReadsInOrderIntoTheTier) {
  Start(1, 50);
  Want(FramesFrom(1, 20));
  AwaitNothingPending();
  std::vector<std::uint32_t> expected(20);
  for (std::uint32_t i = 0; i < 20; ++i) expected[i] = i + 1;
  EXPECT_EQ(ReadSoFar(), expected);
  for (const std::uint32_t number : expected) EXPECT_TRUE(tier_->Contains(FrameAt(number).at));
  EXPECT_EQ(prefetcher_->stats().frames, 20u);
  EXPECT_EQ(prefetcher_->stats().bytes, 20u * kFrameBytes);
}

TEST_F(PrefetcherTest, TakesNoMoreThanItsBytesAndTheFirstOnesOfThem) {
  Start(3, 10);
  MayRead(false);
  Want(FramesFrom(1, 50));
  Want(FramesFrom(100, 50));
  EXPECT_EQ(prefetcher_->stats().pending_bytes, 10u * kFrameBytes);
  MayRead(true);
  AwaitNothingPending();
  for (std::uint32_t i = 1; i <= 50; ++i) EXPECT_EQ(tier_->Contains(FrameAt(i).at), i <= 10);
  // What came and was not asked for fills it still.
  Want(FramesFrom(200, 1));
  EXPECT_EQ(prefetcher_->stats().pending_bytes, 0u);
  EXPECT_TRUE(tier_->Get(FrameAt(3).at));
  Want(FramesFrom(200, 5));
  AwaitNothingPending();
  EXPECT_TRUE(tier_->Contains(FrameAt(200).at));
  EXPECT_FALSE(tier_->Contains(FrameAt(201).at));
}

TEST_F(PrefetcherTest, WhatNobodyAsksForMakesWayAfterAWhile) {
  Start(2, 10);
  Want(FramesFrom(1, 10));
  AwaitNothingPending();
  clock_.Advance(Prefetcher::kKeepUnasked);
  Want(FramesFrom(100, 10));
  EXPECT_FALSE(tier_->Contains(FrameAt(100).at));
  clock_.Advance(std::chrono::milliseconds(1));
  Want(FramesFrom(100, 10));
  AwaitNothingPending();
  EXPECT_TRUE(tier_->Contains(FrameAt(109).at));
  EXPECT_FALSE(tier_->Contains(FrameAt(1).at));
  EXPECT_EQ(tier_->prefetch_stats().wasted_frames, 10u);
}

TEST_F(PrefetcherTest, ReadsNothingWhileOthersNeedTheThreads) {
  Start(2, 50);
  absl::Notification running, release;
  pool_->Post([&] {
    running.Notify();
    release.WaitForNotification();
  });
  running.WaitForNotification();
  Want(FramesFrom(1, 5));  // one thread is left, and is left alone
  EXPECT_EQ(prefetcher_->stats().pending_bytes, 0u);
  release.Notify();
  AwaitIdlePool();
  EXPECT_TRUE(ReadSoFar().empty());
  Want(FramesFrom(1, 5));
  AwaitNothingPending();
  EXPECT_EQ(ReadSoFar().size(), 5u);
  AwaitIdlePool();
}

TEST_F(PrefetcherTest, ForgetsWhatIsLeftAsSoonAsSomebodyWaits) {
  Start(2, 50);
  MayRead(false);
  Want(FramesFrom(1, 20));
  while (ReadSoFar().empty()) std::this_thread::yield();
  absl::Notification release, ran;
  pool_->Post([&] { release.WaitForNotification(); });
  pool_->Post([&] { ran.Notify(); });
  // One of them has a thread of its own; the other one waits for the reader's.
  MayRead(true);
  ran.WaitForNotification();
  release.Notify();
  AwaitNothingPending();
  EXPECT_EQ(ReadSoFar(), std::vector<std::uint32_t>{1});
  EXPECT_TRUE(tier_->Contains(FrameAt(1).at));
  AwaitIdlePool();
}

TEST_F(PrefetcherTest, AFrameIsReadOnceAndOneThatIsGoneIsNoHarm) {
  Start(3, 50);
  MayRead(false);
  Want(FramesFrom(1, 3));
  Want(FramesFrom(2, 3));
  Want({FrameAt(kGone)});
  MayRead(true);
  AwaitNothingPending();
  EXPECT_THAT(ReadSoFar(), testing::UnorderedElementsAre(1, 2, 3, 4, kGone));
  EXPECT_EQ(prefetcher_->stats().frames, 4u);
  EXPECT_FALSE(tier_->Contains(FrameAt(kGone).at));
}

TEST_F(PrefetcherTest, WhatSomebodyElseHasReadMeanwhileIsLate) {
  Start(2, 50);
  MayRead(false);
  Want(FramesFrom(1, 1));
  while (ReadSoFar().empty()) std::this_thread::yield();
  tier_->Insert(FrameAt(1).at, Bytes());
  MayRead(true);
  AwaitNothingPending();
  EXPECT_EQ(prefetcher_->stats().late_frames, 1u);
  EXPECT_EQ(prefetcher_->stats().late_bytes, kFrameBytes);
  EXPECT_EQ(tier_->prefetch_stats().unasked_bytes, 0u);
}

TEST_F(PrefetcherTest, WhoeverReadsAFrameThatIsOnItsWayWaitsForIt) {
  Start(2, 50);
  prefetcher_->AwaitReading(FrameAt(1).at);  // nothing is
  MayRead(false);
  Want(FramesFrom(1, 2));
  while (ReadSoFar().empty()) std::this_thread::yield();
  prefetcher_->AwaitReading(FrameAt(2).at);  // it has not begun
  bool was_there = false;
  std::thread reader([&] {
    prefetcher_->AwaitReading(FrameAt(1).at);
    was_there = static_cast<bool>(tier_->Get(FrameAt(1).at));
  });
  MayRead(true);
  reader.join();
  EXPECT_TRUE(was_there);
}

TEST_F(PrefetcherTest, StoppedItForgetsAllAndTakesNothing) {
  Start(2, 50);
  MayRead(false);
  Want(FramesFrom(1, 20));
  while (ReadSoFar().empty()) std::this_thread::yield();
  prefetcher_->Stop();
  EXPECT_LE(prefetcher_->stats().pending_bytes, kFrameBytes);
  Want(FramesFrom(50, 3));
  MayRead(true);
  AwaitNothingPending();
  EXPECT_EQ(ReadSoFar().size(), 1u);
}

// Frames are wanted, asked for, and read for others, all at once; sums hold at every moment.
TEST_F(PrefetcherTest, AFloodStaysBoundedAndEveryFrameIsAccountedFor) {
  Start(4, 10);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 3; ++id) {
    threads.emplace_back([this, id] {
      std::mt19937 random(id);
      for (int step = 0; step < 2000; ++step) {
        const auto number = static_cast<std::uint32_t>(random() % 300);
        switch (random() % 4) {
          case 0:
            tier_->Get(FrameAt(number).at);
            break;
          case 1:
            tier_->Insert(FrameAt(number).at, Bytes());
            break;
          case 2:
            tier_->Erase(FrameAt(number).at);
            break;
          default:
            Want(FramesFrom(number, 8));
        }
      }
    });
  }
  threads.emplace_back([&] {
    while (!over) {
      EXPECT_LE(tier_->prefetch_stats().unasked_bytes, 10u * kFrameBytes);
      EXPECT_LE(prefetcher_->stats().pending_bytes, 10u * kFrameBytes);
      EXPECT_LE(tier_->used_bytes(), 100u * kFrameBytes);
      std::this_thread::yield();
    }
  });
  for (int id = 0; id < 3; ++id) threads[static_cast<std::size_t>(id)].join();
  over = true;
  threads.back().join();
  AwaitNothingPending();
  for (std::uint32_t number = 0; number < 310; ++number) tier_->Get(FrameAt(number).at);
  Want(FramesFrom(400, 3));
  AwaitNothingPending();
  EXPECT_TRUE(tier_->Get(FrameAt(400).at));
  EXPECT_TRUE(tier_->Get(FrameAt(401).at));
  const Prefetcher::Stats read = prefetcher_->stats();
  const MemoryTier::PrefetchStats kept = tier_->prefetch_stats();
  EXPECT_GT(kept.useful_frames, 0u);
  EXPECT_EQ(read.frames, kept.useful_frames + kept.wasted_frames + read.late_frames +
                             kept.unasked_bytes / kFrameBytes);
}

}  // namespace
}  // namespace kvtrie
