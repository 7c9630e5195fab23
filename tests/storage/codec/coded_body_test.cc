#include "storage/codec/coded_body.h"

#include <numeric>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

using Sizes = std::vector<std::uint32_t>;
using Ends = std::vector<std::size_t>;

TEST(CutSectionsTest, CutsAtTheEndsOfLayers) {
  EXPECT_EQ(CutSections(Ends{5000, 10000, 20000}), (Sizes{5000, 5000, 10000}));
}

TEST(CutSectionsTest, SmallLayersShareASection) {
  EXPECT_EQ(CutSections(Ends{1000, 2000, 4096, 5000, 8191, 9000}), (Sizes{4096, 4904}));
  EXPECT_EQ(CutSections(Ends{10}), (Sizes{10}));
}

TEST(CutSectionsTest, OnlyTheLastMayBeSmall) {
  EXPECT_EQ(CutSections(Ends{4096, 4097}), (Sizes{4096, 1}));
  EXPECT_EQ(CutSections(Ends{4096, 4096}), (Sizes{4096}));
  EXPECT_EQ(CutSections(Ends{100, 100, 100}), (Sizes{100}));
}

TEST(CutSectionsTest, LargeLayersAreCutIntoEqualParts) {
  constexpr std::size_t kMebibyte = 1u << 20;
  EXPECT_EQ(CutSections(Ends{kMebibyte}), (Sizes{kMebibyte}));
  EXPECT_EQ(CutSections(Ends{kMebibyte + 1}), (Sizes{kMebibyte / 2, kMebibyte / 2 + 1}));
  const Sizes sections = CutSections(Ends{10, 5 * kMebibyte + 13, 64 * kMebibyte});
  EXPECT_EQ(std::accumulate(sections.begin(), sections.end(), std::size_t{0}), 64 * kMebibyte);
  EXPECT_EQ(sections.size(), 6u + 59u);
  for (const std::uint32_t bytes : sections) {
    EXPECT_LE(bytes, kMebibyte);
    EXPECT_GE(bytes, kMebibyte / 2);
  }
}

}  // namespace
}  // namespace kvtrie
