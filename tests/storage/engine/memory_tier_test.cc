#include "storage/engine/memory_tier.h"

#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kFrameBytes = 8192;

PayloadLocation At(std::uint32_t number) { return {1, number, 100}; }

SharedBytes FrameOf(std::uint32_t number, std::size_t bytes = kFrameBytes) {
  auto buffer = std::make_shared<AlignedBuffer>(bytes);
  std::memset(buffer->data(), static_cast<int>(number % 251), buffer->size());
  const std::span<const std::byte> view(buffer->data(), buffer->size());
  return {std::move(buffer), view};
}

TEST(MemoryTierTest, GivesBackTheSameBytesWithoutACopy) {
  MemoryTier tier(4 * kFrameBytes);
  const SharedBytes frame = FrameOf(7);
  tier.Insert(At(7), frame);
  EXPECT_EQ(tier.Get(At(7)).view.data(), frame.view.data());
  EXPECT_TRUE(tier.Contains(At(7)));
  EXPECT_FALSE(tier.Get(At(8)));
  EXPECT_FALSE(tier.Contains(At(8)));
  EXPECT_EQ(tier.used_bytes(), kFrameBytes);
}

TEST(MemoryTierTest, LeastRecentlyUsedGoesFirst) {
  MemoryTier tier(3 * kFrameBytes);
  for (std::uint32_t number = 1; number <= 3; ++number) tier.Insert(At(number), FrameOf(number));
  tier.Get(At(1));
  tier.Insert(At(4), FrameOf(4));
  EXPECT_TRUE(tier.Contains(At(1)));
  EXPECT_FALSE(tier.Contains(At(2)));
  EXPECT_TRUE(tier.Contains(At(3)));
  EXPECT_EQ(tier.used_bytes(), 3 * kFrameBytes);
}

TEST(MemoryTierTest, WhatWasHandedOutOutlivesTheTier) {
  SharedBytes held;
  {
    MemoryTier tier(kFrameBytes);
    tier.Insert(At(1), FrameOf(1));
    held = tier.Get(At(1));
    tier.Insert(At(2), FrameOf(2));
    EXPECT_FALSE(tier.Contains(At(1)));
  }
  EXPECT_THAT(held.view, testing::Each(std::byte{1}));
}

TEST(MemoryTierTest, WhatIsTooLargeIsNotKeptAndDropsNothing) {
  MemoryTier tier(2 * kFrameBytes);
  tier.Insert(At(1), FrameOf(1));
  tier.Insert(At(2), FrameOf(2, 3 * kFrameBytes));
  EXPECT_TRUE(tier.Contains(At(1)));
  EXPECT_FALSE(tier.Contains(At(2)));
  MemoryTier none(0);
  none.Insert(At(1), FrameOf(1));
  EXPECT_EQ(none.used_bytes(), 0u);
}

TEST(MemoryTierTest, InsertingTwiceCountsOnce) {
  MemoryTier tier(4 * kFrameBytes);
  tier.Insert(At(1), FrameOf(1));
  tier.Insert(At(1), FrameOf(1));
  EXPECT_EQ(tier.used_bytes(), kFrameBytes);
  tier.Erase(At(1));
  tier.Erase(At(1));
  EXPECT_EQ(tier.used_bytes(), 0u);
  EXPECT_FALSE(tier.Contains(At(1)));
}

TEST(MemoryTierTest, AgreesWithAListOverRandomOperations) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  constexpr std::size_t kLimit = 10 * kFrameBytes;
  MemoryTier tier(kLimit);
  std::list<std::pair<std::uint32_t, std::size_t>> model;  // number and size, most recent first
  for (int step = 0; step < 20'000; ++step) {
    const auto number = static_cast<std::uint32_t>(random() % 20);
    const auto found = std::find_if(model.begin(), model.end(),
                                    [number](const auto& entry) { return entry.first == number; });
    switch (random() % 3) {
      case 0: {
        const std::size_t bytes = kFrameBytes * (1 + random() % 3);
        tier.Insert(At(number), FrameOf(number, bytes));
        if (found == model.end()) {
          model.emplace_front(number, bytes);
          std::size_t used = 0;
          for (const auto& entry : model) used += entry.second;
          for (; used > kLimit; model.pop_back()) used -= model.back().second;
        }
        break;
      }
      case 1: {
        const SharedBytes frame = tier.Get(At(number));
        ASSERT_EQ(static_cast<bool>(frame), found != model.end());
        if (frame) {
          ASSERT_EQ(frame.view.front(), static_cast<std::byte>(number));
          model.splice(model.begin(), model, found);
        }
        break;
      }
      default:
        tier.Erase(At(number));
        if (found != model.end()) model.erase(found);
    }
    std::size_t used = 0;
    for (const auto& entry : model) used += entry.second;
    ASSERT_EQ(tier.used_bytes(), used);
  }
}

using MayReplace = MemoryTier::MayReplace;

TEST(MemoryTierTest, WhatWasReadAheadIsUsefulOnceAskedForAndWastedElse) {
  MemoryTier tier(8 * kFrameBytes, 4 * kFrameBytes);
  for (std::uint32_t number = 1; number <= 3; ++number) {
    EXPECT_TRUE(tier.InsertPrefetched(At(number), FrameOf(number), MayReplace::kOldest, {}));
  }
  EXPECT_EQ(tier.prefetch_stats().unasked_bytes, 3 * kFrameBytes);
  EXPECT_EQ(tier.Get(At(2)).view.front(), std::byte{2});
  EXPECT_TRUE(tier.Get(At(2)));  // counts once
  tier.Erase(At(2));
  tier.Erase(At(3));
  const MemoryTier::PrefetchStats stats = tier.prefetch_stats();
  EXPECT_EQ(stats.unasked_bytes, kFrameBytes);
  EXPECT_EQ(stats.useful_frames, 1u);
  EXPECT_EQ(stats.useful_bytes, kFrameBytes);
  EXPECT_EQ(stats.wasted_frames, 1u);
  EXPECT_EQ(stats.wasted_bytes, kFrameBytes);
  EXPECT_EQ(tier.used_bytes(), kFrameBytes);
}

TEST(MemoryTierTest, WhatSomebodyElseReadMeanwhileWasReadAheadInVain) {
  MemoryTier tier(8 * kFrameBytes, 4 * kFrameBytes);
  EXPECT_TRUE(tier.InsertPrefetched(At(1), FrameOf(1), MayReplace::kOldest, {}));
  tier.Insert(At(1), FrameOf(1));
  tier.Get(At(1));
  EXPECT_EQ(tier.prefetch_stats().unasked_bytes, 0u);
  EXPECT_EQ(tier.prefetch_stats().useful_frames, 0u);
  EXPECT_EQ(tier.prefetch_stats().wasted_frames, 1u);
  EXPECT_EQ(tier.used_bytes(), kFrameBytes);
}

TEST(MemoryTierTest, WhatWasReadAheadLeavesBeforeAllElse) {
  MemoryTier tier(4 * kFrameBytes, 2 * kFrameBytes);
  tier.Insert(At(1), FrameOf(1));
  tier.Insert(At(2), FrameOf(2));
  tier.InsertPrefetched(At(3), FrameOf(3), MayReplace::kOldest, {});
  tier.InsertPrefetched(At(4), FrameOf(4), MayReplace::kOldest, {});
  tier.Insert(At(5), FrameOf(5));
  EXPECT_FALSE(tier.Contains(At(3)));  // the older of the two
  tier.Get(At(4));
  tier.Insert(At(6), FrameOf(6));
  EXPECT_FALSE(tier.Contains(At(1)));  // 4 is one like the others now
  EXPECT_TRUE(tier.Contains(At(4)));
}

TEST(MemoryTierTest, ReadingAheadTakesItsPartAtMost) {
  MemoryTier tier(8 * kFrameBytes, 2 * kFrameBytes);
  EXPECT_TRUE(tier.InsertPrefetched(At(1), FrameOf(1), MayReplace::kOldest, {}));
  EXPECT_FALSE(tier.InsertPrefetched(At(1), FrameOf(1), MayReplace::kOldest, {}));
  EXPECT_TRUE(tier.InsertPrefetched(At(2), FrameOf(2), MayReplace::kOldest, {}));
  EXPECT_FALSE(tier.InsertPrefetched(At(3), FrameOf(3), MayReplace::kOldest, {}));
  tier.Get(At(1));
  EXPECT_TRUE(tier.InsertPrefetched(At(3), FrameOf(3), MayReplace::kOldest, {}));
  MemoryTier none(8 * kFrameBytes);
  EXPECT_FALSE(none.InsertPrefetched(At(1), FrameOf(1), MayReplace::kOldest, {}));
}

TEST(MemoryTierTest, OnlyWhatIsAboutToBeReadTakesThePlaceOfWhatWasRead) {
  MemoryTier tier(2 * kFrameBytes, kFrameBytes);
  tier.Insert(At(1), FrameOf(1));
  tier.Insert(At(2), FrameOf(2));
  EXPECT_TRUE(tier.InsertPrefetched(At(3), FrameOf(3), MayReplace::kNeverRead, {}));
  EXPECT_FALSE(tier.Contains(At(1)));
  tier.Get(At(2));
  tier.Get(At(3));
  EXPECT_FALSE(tier.InsertPrefetched(At(4), FrameOf(4), MayReplace::kNeverRead, {}));
  EXPECT_TRUE(tier.InsertPrefetched(At(4), FrameOf(4), MayReplace::kOldest, {}));
  EXPECT_FALSE(tier.Contains(At(2)));
  EXPECT_TRUE(tier.Contains(At(3)));
}

TEST(MemoryTierTest, WhatCameLongAgoAndWasNotAskedForIsDropped) {
  using std::chrono::seconds;
  MemoryTier tier(8 * kFrameBytes, 8 * kFrameBytes);
  for (std::uint32_t number = 1; number <= 4; ++number) {
    tier.InsertPrefetched(At(number), FrameOf(number), MayReplace::kOldest, seconds(number));
  }
  tier.Get(At(1));
  tier.DropPrefetched(seconds(3));
  for (std::uint32_t number = 1; number <= 4; ++number) {
    EXPECT_EQ(tier.Contains(At(number)), number != 2);
  }
  EXPECT_EQ(tier.prefetch_stats().wasted_frames, 1u);
  const PayloadLocation places[] = {At(1), At(2), At(3)};
  EXPECT_THAT(tier.Contains(places), testing::ElementsAre(true, false, true));
}

TEST(MemoryTierTest, ThreadsGetTheirOwnFramesOnly) {
  MemoryTier tier(16 * kFrameBytes);
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 4; ++id) {
    threads.emplace_back([&tier, id] {
      std::mt19937 random(id);
      for (int step = 0; step < 5000; ++step) {
        const auto number = static_cast<std::uint32_t>(random() % 40);
        if (const SharedBytes frame = tier.Get(At(number))) {
          ASSERT_EQ(frame.view.back(), static_cast<std::byte>(number));
        } else if (step % 7 == 0) {
          tier.Erase(At(number));
        } else {
          tier.Insert(At(number), FrameOf(number));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(tier.used_bytes(), 16 * kFrameBytes);
}

}  // namespace
}  // namespace kvtrie
