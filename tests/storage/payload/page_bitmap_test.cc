#include "storage/payload/page_bitmap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

namespace kvtrie {
namespace {

TEST(PageBitmapTest, AgreesWithASetOfNumbers) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    PageBitmap bitmap;
    std::set<std::uint64_t> set;
    for (int step = 0; step < 200; ++step) {
      const std::uint64_t first = random() % 300;
      const PageBitmap::Range range{first, first + 1 + random() % 150};
      bool all = true;
      bool any = false;
      for (std::uint64_t page = range.first; page < range.end; ++page) {
        all = all && set.contains(page);
        any = any || set.contains(page);
      }
      ASSERT_EQ(bitmap.HoldsAll(range), all);
      ASSERT_EQ(bitmap.HoldsAny(range), any);
      if (random() % 2 == 0) {
        bitmap.Add(range);
        for (std::uint64_t page = range.first; page < range.end; ++page) set.insert(page);
      } else {
        bitmap.Remove(range);
        set.erase(set.lower_bound(range.first), set.lower_bound(range.end));
      }
      ASSERT_EQ(bitmap.End(), set.empty() ? 0 : *set.rbegin() + 1);
      std::uint64_t page = 0;
      constexpr std::uint64_t kEnd = 500;
      for (auto gap = bitmap.NextGap(0, kEnd); gap.first < gap.end;
           gap = bitmap.NextGap(gap.end, kEnd)) {
        for (; page < gap.first; ++page) ASSERT_TRUE(set.contains(page));
        for (; page < gap.end; ++page) ASSERT_FALSE(set.contains(page));
      }
      for (; page < kEnd; ++page) ASSERT_TRUE(set.contains(page));
    }
  }
}

TEST(PageBitmapTest, EmptyHoldsNothing) {
  const PageBitmap bitmap;
  EXPECT_EQ(bitmap.End(), 0u);
  EXPECT_FALSE(bitmap.HoldsAny({0, 1000}));
  EXPECT_FALSE(bitmap.HoldsAll({0, 1}));
  EXPECT_EQ(bitmap.NextGap(3, 10).first, 3u);
  EXPECT_EQ(bitmap.NextGap(3, 10).end, 10u);
  EXPECT_EQ(bitmap.NextGap(10, 10).end, 10u);
}

}  // namespace
}  // namespace kvtrie
