#include "storage/trie/surprisal.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::uint16_t kMinusOne = 0xbc00;
constexpr std::uint16_t kNaN = 0x7e00;
constexpr std::uint16_t kInfinity = 0x7c00;

TEST(HalfToFloatTest, KnowsTheValuesOfIeee754) {
  EXPECT_EQ(HalfToFloat(0x0000), 0.0f);
  EXPECT_TRUE(std::signbit(HalfToFloat(0x8000)));
  EXPECT_EQ(HalfToFloat(0x3c00), 1.0f);
  EXPECT_EQ(HalfToFloat(kMinusOne), -1.0f);
  EXPECT_EQ(HalfToFloat(0x3555), 0.333251953125f);
  EXPECT_EQ(HalfToFloat(0xc000), -2.0f);
  EXPECT_EQ(HalfToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(HalfToFloat(0x0400), 6.103515625e-05f);            // least normal
  EXPECT_EQ(HalfToFloat(0x03ff), 6.0975551605224609375e-05f);  // greatest subnormal
  EXPECT_EQ(HalfToFloat(0x0001), 5.9604644775390625e-08f);     // least subnormal
  EXPECT_EQ(HalfToFloat(kInfinity), std::numeric_limits<float>::infinity());
  EXPECT_EQ(HalfToFloat(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(HalfToFloat(kNaN)));
  EXPECT_TRUE(std::isnan(HalfToFloat(0xfe01)));
}

TEST(HalfToFloatTest, AgreesWithTheCompilersHalfFloats) {
  for (std::uint32_t half = 0; half <= 0xffff; ++half) {
    const auto bits = static_cast<std::uint16_t>(half);
    const float expected = static_cast<float>(std::bit_cast<_Float16>(bits));
    const float value = HalfToFloat(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << half;
    } else {
      ASSERT_EQ(value, expected) << half;
    }
  }
}

TEST(BlockSurprisalBitsTest, SumsOverEachFullBlock) {
  // log P = -1 nat for each token: 4 / ln 2 bits per block of 4.
  const std::vector<std::uint16_t> log_probs(11, kMinusOne);
  const auto bits = BlockSurprisalBits(log_probs, 4);
  ASSERT_EQ(bits.size(), 2u);
  EXPECT_FLOAT_EQ(bits[0], 5.7707801635558535f);
  EXPECT_FLOAT_EQ(bits[1], 5.7707801635558535f);
}

TEST(BlockSurprisalBitsTest, WhatIsNoLogProbabilityCountsNothing) {
  const std::vector<std::uint16_t> log_probs = {kNaN, kInfinity, 0xfc00, 0x3c00, 0x0000, kMinusOne};
  const auto bits = BlockSurprisalBits(log_probs, 6);
  ASSERT_EQ(bits.size(), 1u);
  EXPECT_FLOAT_EQ(bits[0], 1.4426950408889634f);
}

TEST(BlockSurprisalBitsTest, IsNeverNegativeNorMinusZero) {
  const std::vector<std::uint16_t> log_probs = {0x8000, 0x8000, 0x7bff, kNaN};
  for (const float bits : BlockSurprisalBits(log_probs, 2)) {
    EXPECT_EQ(bits, 0.0f);
    EXPECT_FALSE(std::signbit(bits));
  }
}

TEST(BlockSurprisalBitsTest, NoProbabilitiesGiveNoSurprisals) {
  EXPECT_TRUE(BlockSurprisalBits({}, 16).empty());
  EXPECT_TRUE(BlockSurprisalBits(std::vector<std::uint16_t>(15, kMinusOne), 16).empty());
}

}  // namespace
}  // namespace kvtrie
