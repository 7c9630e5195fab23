#include "storage/kv/quality.h"

#include <concepts>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

template <typename T>
concept Ordered = requires(T a, T b) {
  a < b;
};
static_assert(!Ordered<Quality>, "numbers of qualities are not in the order of quality");
static_assert(Ordered<Rung>);

TEST(QualityTest, RanksFromUnratedToExact) {
  int rank = 0;
  for (const Quality quality : kAllQualities) {
    EXPECT_EQ(QualityRank(quality), ++rank);
    EXPECT_TRUE(IsQuality(quality));
  }
  EXPECT_FALSE(IsQuality(Quality{0}));
  EXPECT_FALSE(IsQuality(Quality{6}));
}

TEST(QualityTest, EachIsAtLeastItselfAndAllBelow) {
  for (const Quality a : kAllQualities) {
    for (const Quality b : kAllQualities) {
      EXPECT_EQ(IsAtLeast(a, b), QualityRank(a) >= QualityRank(b));
      EXPECT_EQ(LowerOf(a, b), QualityRank(a) < QualityRank(b) ? a : b);
    }
  }
  EXPECT_TRUE(IsAtLeast(Quality::kHigh, Quality::kSmall));
  EXPECT_FALSE(IsAtLeast(Quality::kUnrated, Quality::kSmall));
}

TEST(QualityTest, CodecsAreOnTheRungThatTheirBytesAllow) {
  EXPECT_EQ(RungOf(CodecId::kRaw), Rung::kExact);
  EXPECT_EQ(RungOf(CodecId::kLossless), Rung::kExact);
  EXPECT_EQ(RungOf(CodecId::kResidual), Rung::kCoded);
  EXPECT_EQ(RungOf(CodecId::kRotated), Rung::kCoded);
  EXPECT_EQ(RungOf(CodecId::kReferenced), Rung::kCoded);
  EXPECT_FALSE(IsCodec(CodecId{0}));
  EXPECT_FALSE(IsCodec(CodecId{6}));
}

}  // namespace
}  // namespace kvtrie
