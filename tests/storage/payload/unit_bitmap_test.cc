#include "storage/payload/unit_bitmap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <set>

namespace kvtrie {
namespace {

TEST(UnitBitmapTest, AgreesWithASetOfNumbers) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    UnitBitmap bitmap;
    std::set<std::uint64_t> set;
    for (int step = 0; step < 200; ++step) {
      const std::uint64_t first = random() % 300;
      const UnitBitmap::Range range{first, first + 1 + random() % 150};
      bool all = true;
      bool any = false;
      for (std::uint64_t unit = range.first; unit < range.end; ++unit) {
        all = all && set.contains(unit);
        any = any || set.contains(unit);
      }
      ASSERT_EQ(bitmap.HoldsAll(range), all);
      ASSERT_EQ(bitmap.HoldsAny(range), any);
      if (random() % 2 == 0) {
        bitmap.Add(range);
        for (std::uint64_t unit = range.first; unit < range.end; ++unit) set.insert(unit);
      } else {
        bitmap.Remove(range);
        set.erase(set.lower_bound(range.first), set.lower_bound(range.end));
      }
      ASSERT_EQ(bitmap.End(), set.empty() ? 0 : *set.rbegin() + 1);
      std::uint64_t unit = 0;
      constexpr std::uint64_t kEnd = 500;
      for (auto gap = bitmap.NextGap(0, kEnd); gap.first < gap.end;
           gap = bitmap.NextGap(gap.end, kEnd)) {
        for (; unit < gap.first; ++unit) ASSERT_TRUE(set.contains(unit));
        for (; unit < gap.end; ++unit) ASSERT_FALSE(set.contains(unit));
      }
      for (; unit < kEnd; ++unit) ASSERT_TRUE(set.contains(unit));
    }
  }
}

TEST(UnitBitmapTest, EmptyHoldsNothing) {
  const UnitBitmap bitmap;
  EXPECT_EQ(bitmap.End(), 0u);
  EXPECT_FALSE(bitmap.HoldsAny({0, 1000}));
  EXPECT_FALSE(bitmap.HoldsAll({0, 1}));
  EXPECT_EQ(bitmap.NextGap(3, 10).first, 3u);
  EXPECT_EQ(bitmap.NextGap(3, 10).end, 10u);
  EXPECT_EQ(bitmap.NextGap(10, 10).end, 10u);
}

}  // namespace
}  // namespace kvtrie
