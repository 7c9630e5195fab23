#include "storage/codec/residual_level.h"

#include <limits>

#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

TEST(RateThresholdsTest, WithoutRateValuesAreRounded) {
  const ResidualProfile profile = PlainProfile(SyntheticSpec());
  EXPECT_EQ(RateThresholds(profile, 0),
            std::vector<float>(std::size_t{kScaleClasses} * kRestoredOffsets, 0.5f));
}

TEST(RateThresholdsTest, DearerSymbolsAreTakenLater) {
  const ResidualProfile profile = PlainProfile(SyntheticSpec());
  const auto little = RateThresholds(profile, 0.05f), much = RateThresholds(profile, 0.1f);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const std::uint16_t* const zero =
        profile.class_frequencies.data() + c * kResidualSymbols + kSymbolMax;
    for (std::size_t k = 0; k < kRestoredOffsets; ++k) {
      const std::size_t at = c * kRestoredOffsets + k;
      EXPECT_GE(little[at], 0.5f);
      EXPECT_LE(much[at], 1);
      const bool dearer = zero[k] > zero[k + 1] && much[at] < 1;
      EXPECT_TRUE(!dearer || much[at] > little[at]) << c << " " << k;
    }
  }
  // Where the costs are equal: (x - 0)^2 + w bits(0) = (x - 1)^2 + w bits(1).
  ResidualProfile even = profile;
  std::uint16_t* const zero = even.class_frequencies.data() + kSymbolMax;
  zero[0] = 1024;
  zero[1] = zero[-1] = 256;
  EXPECT_FLOAT_EQ(RateThresholds(even, 0.1f)[0], 0.5f + 0.1f * 2 / 2);
}

TEST(SymbolLimitsTest, AreTheLargestThatATableHasWithEitherSign) {
  ResidualProfile profile = PlainProfile(SyntheticSpec());
  std::fill(profile.class_frequencies.begin(), profile.class_frequencies.end(), std::uint16_t{1});
  const auto symbol = [&](std::size_t c, std::int32_t value) -> std::uint16_t& {
    return profile
        .class_frequencies[c * kResidualSymbols + static_cast<std::size_t>(value + kSymbolMax)];
  };
  symbol(1, 5) = 0;
  symbol(2, -3) = 0;
  symbol(3, 1) = 0;
  const std::vector<std::uint32_t> limits = SymbolLimits(profile);
  ASSERT_EQ(limits.size(), std::size_t{kScaleClasses});
  EXPECT_EQ(limits[0], 63u);
  EXPECT_EQ(limits[1], 4u);
  EXPECT_EQ(limits[2], 2u);
  EXPECT_EQ(limits[3], 0u);
}

TEST(SymbolTablesTest, HaveClassesThenExponentsAndAllThatIsBeside) {
  ResidualProfile profile = PlainProfile(SyntheticSpec());
  profile.exponent_frequencies.assign(2 * kExponentSymbols, 0);
  profile.exponent_frequencies[3] = profile.exponent_frequencies[kExponentSymbols + 5] = 4096;
  profile.expected[7] = 77;
  profile.carried[8] = 88;
  const auto symbols = SymbolTables::Of(profile);
  ASSERT_TRUE(symbols.ok()) << symbols.status();
  RansTables expected(kScaleClasses + 2);
  for (std::size_t c = 0; c < kScaleClasses; ++c) {
    const auto of_class =
        std::span(profile.class_frequencies).subspan(c * kResidualSymbols, kResidualSymbols);
    ASSERT_TRUE(expected.Set(c, of_class).ok());
  }
  ASSERT_TRUE(expected.Set(kScaleClasses, std::vector<std::uint16_t>{0, 0, 0, 4096}).ok());
  ASSERT_TRUE(
      expected.Set(kScaleClasses + 1, std::vector<std::uint16_t>{0, 0, 0, 0, 0, 4096}).ok());

  const float threshold = 0.5f;
  const ResidualTables tables = symbols->Tables(&threshold);
  const std::size_t slots = expected.table_count() * kRansTableSlots;
  EXPECT_TRUE(std::equal(tables.decode, tables.decode + slots, expected.decode()));
  const std::size_t codes = expected.table_count() * kRansTableSymbols;
  EXPECT_TRUE(std::equal(tables.encode, tables.encode + codes, expected.encode()));
  EXPECT_EQ(tables.expected[7], 77u);
  EXPECT_EQ(tables.carried[8], 88u);
  EXPECT_EQ(tables.offsets, profile.offsets.data());
  EXPECT_EQ(tables.thresholds, &threshold);
  EXPECT_EQ(tables.limits[0], SymbolLimits(profile)[0]);
  EXPECT_EQ(tables.prior, profile.prior);
}

TEST(SymbolTablesTest, SharesOfOtherThan4096AreRefused) {
  const ResidualProfile profile = PlainProfile(SyntheticSpec());
  ResidualProfile classes = profile, exponents = profile;
  ++classes.class_frequencies.back();
  exponents.exponent_frequencies.assign(kExponentSymbols, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(SymbolTables::Of(classes).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SymbolTables::Of(exponents).status()));
}

TEST(LevelPlaneTest, CodesWhatTheLevelCodesInOrder) {
  ResidualProfile profile = PlainProfile(SyntheticSpec({{1, 2, 2, 2}}));
  profile.group_count = 2;
  profile.exponent_frequencies.assign(kExponentSymbols, 100);
  PlaneProfile& plane = profile.plane_profiles[1];
  plane.block_count = 2;
  plane.basis = {127, 0, 0, 127, 127, 0, 0, 127};
  plane.scales = {{70, kNotCoded, 71, 72}, {kNotCoded, 60, kNotCoded, kNotCoded}};
  const LevelPlane level(profile, 1, 0);
  const ResidualPlane symbols = level.Symbols();
  ASSERT_EQ(level.coded_count(), 3u);
  ASSERT_EQ(symbols.coded_count, 3u);
  EXPECT_EQ(symbols.group_count, 2u);
  EXPECT_EQ(symbols.exponent_table, static_cast<std::uint32_t>(kScaleClasses));
  EXPECT_EQ(std::vector<int>(symbols.scales, symbols.scales + 3), (std::vector<int>{70, 71, 72}));
  EXPECT_EQ(std::vector<int>(symbols.groups, symbols.groups + 3), (std::vector<int>{0, 1, 1}));

  // [token][value] to [coded value][token] and back, times a factor.
  std::vector<float> values(kLanes * 4), coded(3 * kLanes), again(values.size(), -1);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  level.Gather(values.data(), 4, 2, coded.data());
  EXPECT_EQ(coded[0], 0);
  EXPECT_EQ(coded[kLanes + 5], 2 * (5 * 4 + 2));
  level.Scatter(coded.data(), 0.5f, again.data(), 4);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(again[i], i % 4 == 1 ? -1 : values[i]);

  EXPECT_EQ(LevelPlane(profile, 1, 1).coded_count(), 1u);
}

TEST(LevelPlaneTest, MayDropWhatIsSmallAndNotCoded) {
  ResidualProfile profile = PlainProfile(SyntheticSpec({{1, 1, 4, 4}}));
  profile.plane_profiles[0].scales[0] = {70, kNotCoded, 70, kNotCoded};
  const LevelPlane level(profile, 0, 0);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(level.MayDrop(std::vector<float>{9, 2, nan, -2}.data(), 2));
  EXPECT_FALSE(level.MayDrop(std::vector<float>{0, 2.5f, 0, 0}.data(), 2));
  EXPECT_FALSE(level.MayDrop(std::vector<float>{0, 0, 0, -2.5f}.data(), 2));
  EXPECT_FALSE(level.MayDrop(std::vector<float>{0, 0, 0, nan}.data(), 2));
}

TEST(PredictFromTokensTest, AddsTheTablesRowAndLeavesOtherTokens) {
  ResidualProfile profile = PlainProfile(SyntheticSpec({{2, 1, 2, 3}}));
  profile.table_tokens = {4, 9};
  profile.table_rows = {1, 2, 3, 4, 5, -6, -7, -8, -9, -10};
  for (auto& scale : profile.plane_profiles[1].input_scales) scale = 0.5f;
  const std::vector<TokenId> tokens = {9, 5, 4, 0, 1000000};
  std::vector<float> rows(5 * 3, 1);
  PredictFromTokens(profile, 1, tokens, rows);
  EXPECT_EQ(rows, (std::vector<float>{-3, -3.5f, -4, 1, 1, 1, 2.5f, 3, 3.5f, 1, 1, 1, 1, 1, 1}));
}

TEST(PredictFromTokensTest, LeavesLayersAboveTheFirst) {
  const ResidualProfile profile = PlainProfile(SyntheticSpec({{2, 1, 2, 3}}));
  const std::vector<TokenId> tokens = {profile.table_tokens[0]};
  std::vector<float> rows(2, 1);
  PredictFromTokens(profile, 2, tokens, rows);
  EXPECT_EQ(rows, std::vector<float>(2, 1));
}

}  // namespace
}  // namespace kvtrie
