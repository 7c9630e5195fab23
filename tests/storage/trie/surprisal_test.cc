#include "storage/trie/surprisal.h"

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <utility>
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

// Little-endian, as on the wire.
template <typename Value>
std::string Packed(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

std::uint16_t Half(double value) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

// Probabilities with what they point to.
struct Sent {
  std::string log_probs{};
  std::uint32_t top_k = 0;
  std::string ids{};
  std::string top_log_probs{};
  std::uint32_t vocabulary_tokens = 0;

  TokenProbabilities view() const {
    return {log_probs, top_k, ids, top_log_probs, vocabulary_tokens};
  }
};

// One distribution per token, of pairs (id, probability).
Sent Distributions(const std::vector<std::vector<std::pair<TokenId, double>>>& of_tokens) {
  std::vector<TokenId> ids;
  std::vector<std::uint16_t> halves;
  for (const auto& of_token : of_tokens) {
    for (const auto& [id, probability] : of_token) {
      ids.push_back(id);
      halves.push_back(Half(std::log(probability)));
    }
  }
  return {.top_k = static_cast<std::uint32_t>(of_tokens.front().size()),
          .ids = Packed(ids),
          .top_log_probs = Packed(halves)};
}

std::vector<float> MustSum(const Sent& sent, const std::vector<TokenId>& tokens,
                           std::uint32_t block_tokens) {
  const auto bits = BlockSurprisalBits(sent.view(), tokens, block_tokens);
  EXPECT_TRUE(bits.ok()) << bits.status();
  return bits.ok() ? *bits : std::vector<float>();
}

std::string WhyRefused(const Sent& sent, const std::vector<TokenId>& tokens) {
  const auto bits = BlockSurprisalBits(sent.view(), tokens, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(bits.status())) << bits.status();
  return std::string(bits.status().message());
}

TEST(BlockSurprisalBitsTest, SumsOverEachFullBlock) {
  // log P = -1 nat for each token: 4 / ln 2 bits per block of 4.
  const Sent sent{.log_probs = Packed(std::vector<std::uint16_t>(11, kMinusOne))};
  const auto bits = MustSum(sent, std::vector<TokenId>(11), 4);
  ASSERT_EQ(bits.size(), 2u);
  EXPECT_FLOAT_EQ(bits[0], 5.7707801635558535f);
  EXPECT_FLOAT_EQ(bits[1], 5.7707801635558535f);
}

TEST(BlockSurprisalBitsTest, ATokenCostsWhatItsPlaceInTheDistributionSays) {
  const Sent sent = Distributions({{{7, 0.5}, {8, 0.25}}, {{7, 0.5}, {8, 0.25}}});
  const auto bits = MustSum(sent, {7, 8}, 1);
  ASSERT_EQ(bits.size(), 2u);
  EXPECT_NEAR(bits[0], 1, 1e-3);
  EXPECT_NEAR(bits[1], 2, 2e-3);
}

TEST(BlockSurprisalBitsTest, ATokenOutsideOfTheDistributionSharesTheRestOfTheMass) {
  Sent sent = Distributions({{{7, 0.5}, {8, 0.25}}});
  sent.vocabulary_tokens = 2 + 1024;
  // A quarter over 1024 tokens.
  EXPECT_NEAR(MustSum(sent, {9}, 1)[0], 12, 2e-3);
  sent.vocabulary_tokens = 0;
  EXPECT_NEAR(MustSum(sent, {9}, 1)[0], 2 + std::log2(kVocabularyTokensAssumed - 2), 2e-3);
  // Where rounding hides the rest, something is left.
  const Sent sure = Distributions({{{7, 1.0}}});
  EXPECT_NEAR(MustSum(sure, {9}, 1)[0], 12 + std::log2(kVocabularyTokensAssumed - 1), 1e-3);
  EXPECT_LT(MustSum(sure, {7}, 1)[0], 1e-30f);
}

TEST(BlockSurprisalBitsTest, TheOwnLogProbabilityBeatsTheDistribution) {
  Sent sent = Distributions({{{7, 0.5}}});
  sent.log_probs = Packed(std::vector<std::uint16_t>{Half(-4 * std::numbers::ln2)});
  EXPECT_NEAR(MustSum(sent, {7}, 1)[0], 4, 1e-2);
}

TEST(BlockSurprisalBitsTest, WhatIsCertainIsMoreThanNothing) {
  // 0 stands for "not known".
  const Sent sent{.log_probs = Packed(std::vector<std::uint16_t>{0x8000, 0x0000})};
  for (const float bits : MustSum(sent, {1, 2}, 1)) {
    EXPECT_GT(bits, 0);
    EXPECT_LT(bits, 1e-30f);
  }
}

TEST(BlockSurprisalBitsTest, NoProbabilitiesGiveNoSurprisals) {
  EXPECT_TRUE(MustSum({}, std::vector<TokenId>(32), 16).empty());
  const Sent sent{.log_probs = Packed(std::vector<std::uint16_t>(15, kMinusOne))};
  EXPECT_TRUE(MustSum(sent, std::vector<TokenId>(15), 16).empty());
}

TEST(BlockSurprisalBitsTest, AProbabilityThatRoundsToZeroIsTheLeastThatCanBeSaid) {
  const Sent sent{.log_probs = Packed(std::vector<std::uint16_t>{0xfc00})};
  EXPECT_FLOAT_EQ(MustSum(sent, {1}, 1)[0], 65504.0f * 1.442695f);
}

TEST(BlockSurprisalBitsTest, RefusesWhatIsNoProbabilityAndNamesFieldAndToken) {
  using testing::AllOf;
  using testing::HasSubstr;
  const auto halves = [](std::vector<std::uint16_t> values) { return Packed(values); };
  EXPECT_THAT(WhyRefused({.log_probs = halves({kMinusOne, 0x3c00})}, {1, 2}),
              AllOf(HasSubstr("probabilities.log_probs: token 1 "), HasSubstr("1;")));
  EXPECT_THAT(WhyRefused({.log_probs = halves({kNaN})}, {1}),
              HasSubstr("probabilities.log_probs: token 0 "));
  EXPECT_THAT(WhyRefused({.log_probs = halves({kInfinity})}, {1}),
              HasSubstr("probabilities.log_probs: token 0 "));
  Sent bad = Distributions({{{7, 0.5}, {8, 0.25}}, {{7, 0.5}, {7, 0.25}}});
  EXPECT_THAT(WhyRefused(bad, {1, 2}), HasSubstr("probabilities.top_token_ids: token 1 has id 7"));
  bad = Distributions({{{7, 0.75}, {8, 0.5}}});
  EXPECT_THAT(WhyRefused(bad, {1}), AllOf(HasSubstr("probabilities.top_log_probs: token 0 "),
                                          HasSubstr("sum up to 1.2")));
  bad = Distributions({{{7, 0.75}, {8, 2}}});
  EXPECT_THAT(WhyRefused(bad, {1}), HasSubstr("probabilities.top_log_probs: token 0 has"));
  bad = Distributions({{{7, 0.75}, {8, 0.1}}});
  bad.vocabulary_tokens = 8;
  EXPECT_THAT(WhyRefused(bad, {1}), HasSubstr("probabilities.top_token_ids: token 0 names id 8"));
  // Also where the token's own log-probability would do.
  bad = Distributions({{{7, 0.5}, {7, 0.25}}});
  bad.log_probs = halves({kMinusOne});
  EXPECT_THAT(WhyRefused(bad, {1}), HasSubstr("probabilities.top_token_ids: token 0"));
}

TEST(BlockSurprisalBitsTest, SizesMustFitTheTokens) {
  using testing::HasSubstr;
  EXPECT_THAT(WhyRefused({.log_probs = "xx"}, {1, 2}), HasSubstr("log_probs: 2 bytes"));
  Sent sent = Distributions({{{7, 0.5}, {8, 0.25}}});
  EXPECT_THAT(WhyRefused(sent, {1, 2}), HasSubstr("top_token_ids: 8 bytes"));
  sent.top_log_probs.pop_back();
  EXPECT_THAT(WhyRefused(sent, {1}), HasSubstr("top_log_probs: 3 bytes"));
  sent.top_k = kTopKMax + 1;
  EXPECT_THAT(WhyRefused(sent, {1}), HasSubstr("top_k: 65 is over the limit of 64"));
}

// What halves can make of a distribution is taken.
TEST(BlockSurprisalBitsTest, RoundingIsNoOverflowOfMass) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    const auto k = 1 + random() % kTopKMax;
    std::vector<std::pair<TokenId, double>> distribution;
    double sum = 0;
    for (TokenId id = 0; id < k; ++id) {
      const double weight = std::pow(static_cast<double>(1 + random() % 1000), (round % 5));
      distribution.emplace_back(id, weight);
      sum += weight;
    }
    for (auto& [id, weight] : distribution) weight /= sum;
    const auto bits =
        BlockSurprisalBits(Distributions({distribution}).view(), std::vector<TokenId>{0}, 1);
    ASSERT_TRUE(bits.ok()) << bits.status();
  }
}

}  // namespace
}  // namespace kvtrie
