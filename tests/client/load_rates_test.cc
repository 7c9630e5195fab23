#include "client/load_rates.h"

#include <random>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

const LoadRates::Time now = LoadRates::Time() + std::chrono::hours(1);

TEST(LoadRatesTest, NothingIsKnownBeforeItIsMeasured) {
  LoadRates rates;
  rates.Fetched(0, 1, now);
  rates.Fetched(100, 0, now);
  EXPECT_EQ(rates.cost(now).seconds_per_byte, 0);
  for (const double seconds : rates.cost(now).decode_seconds_per_token) EXPECT_EQ(seconds, 0);
  EXPECT_FALSE(PrefillFit().cost().is_known());
}

TEST(LoadRatesTest, TheFastestFetchCountsAndIsForgottenByBytes) {
  LoadRates rates;
  rates.Fetched(1'000'000, 0.01, now);
  EXPECT_DOUBLE_EQ(rates.cost(now).seconds_per_byte, 1e-8);
  rates.Fetched(1000, 0.01, now);  // waited for the server
  EXPECT_NEAR(rates.cost(now).seconds_per_byte, 1e-8, 1e-11);
  rates.Fetched(1'000'000, 0.005, now);
  EXPECT_DOUBLE_EQ(rates.cost(now).seconds_per_byte, 5e-9);
  // The network has become ten times slower.
  for (int i = 0; i < 600; ++i) rates.Fetched(1'000'000, 0.05, now);
  EXPECT_NEAR(rates.cost(now).seconds_per_byte, 5e-8, 1e-9);
}

TEST(LoadRatesTest, DecodingIsMeasuredByCodecAndAsItWasLately) {
  LoadRates rates;
  rates.Decoded(CodecId::kResidual, 1000, 0.5, now);
  rates.Decoded(CodecId::kLossless, 1000, 0.1, now);
  EXPECT_DOUBLE_EQ(rates.cost(now).DecodeSecondsPerToken(CodecId::kResidual), 5e-4);
  EXPECT_DOUBLE_EQ(rates.cost(now).DecodeSecondsPerToken(CodecId::kLossless), 1e-4);
  EXPECT_EQ(rates.cost(now).DecodeSecondsPerToken(CodecId::kRotated), 0);
  for (int i = 0; i < 100; ++i) rates.Decoded(CodecId::kResidual, 10'000, 0.5, now);
  EXPECT_NEAR(rates.cost(now).DecodeSecondsPerToken(CodecId::kResidual), 5e-5, 1e-6);
}

TEST(LoadRatesTest, WhatWasMeasuredLongAgoIsNotKnown) {
  LoadRates rates;
  rates.Fetched(1000, 1, now);
  rates.Decoded(CodecId::kResidual, 10, 1, now);
  const auto later = now + LoadRates::kKnownFor;
  EXPECT_GT(rates.cost(later).seconds_per_byte, 0);
  const auto too_late = later + std::chrono::milliseconds(1);
  EXPECT_EQ(rates.cost(too_late).seconds_per_byte, 0);
  EXPECT_EQ(rates.cost(too_late).DecodeSecondsPerToken(CodecId::kResidual), 0);
  // Slower than before, and believed at once.
  rates.Fetched(1000, 4, too_late);
  rates.Decoded(CodecId::kResidual, 10, 4, too_late);
  EXPECT_DOUBLE_EQ(rates.cost(too_late).seconds_per_byte, 0.004);
  EXPECT_DOUBLE_EQ(rates.cost(too_late).DecodeSecondsPerToken(CodecId::kResidual), 0.4);
}

TEST(PrefillFitTest, FindsBothPartsOfNoisyReports) {
  const PrefillCost truth{2e-4, 3e-8};
  std::mt19937 random(1);
  PrefillFit fit;
  for (int i = 0; i < 200; ++i) {
    const std::uint64_t tokens = 100 + random() % 4000;
    const std::uint64_t context = random() % 30'000;
    const double noise = 0.95 + 0.1 * static_cast<double>(random() % 1001) / 1000;
    fit.Add(tokens, context, truth.Seconds(tokens, context) * noise);
  }
  EXPECT_NEAR(fit.cost().seconds_per_token, truth.seconds_per_token, 0.1 * 2e-4);
  EXPECT_NEAR(fit.cost().seconds_per_token_pair, truth.seconds_per_token_pair, 0.1 * 3e-8);
}

TEST(PrefillFitTest, OneReportIsTakenForThatOfAllTokens) {
  PrefillFit fit;
  fit.Add(1000, 500, 2);
  EXPECT_DOUBLE_EQ(fit.cost().seconds_per_token, 0.002);
  EXPECT_EQ(fit.cost().seconds_per_token_pair, 0);
  for (int i = 0; i < 10; ++i) fit.Add(1000, 500, 4);
  EXPECT_NEAR(fit.cost().Seconds(1000, 500), 4, 0.6);
}

TEST(PrefillFitTest, NoPartIsEverLessThanNothing) {
  PrefillFit faster_behind;  // more context, less time: a cache that warms up
  faster_behind.Add(1000, 0, 2);
  faster_behind.Add(1000, 5000, 1);
  EXPECT_GT(faster_behind.cost().seconds_per_token, 0);
  EXPECT_EQ(faster_behind.cost().seconds_per_token_pair, 0);
  PrefillFit steep;
  steep.Add(1000, 0, 0.1);
  steep.Add(1000, 5000, 20);
  EXPECT_EQ(steep.cost().seconds_per_token, 0);
  EXPECT_GT(steep.cost().seconds_per_token_pair, 0);
}

TEST(PrefillFitTest, FollowsAnEngineThatBecameFaster) {
  PrefillFit fit;
  for (int i = 0; i < 100; ++i)
    fit.Add(1000, 1000u * static_cast<unsigned>(i % 10), 1 + 0.1 * (i % 10));
  const double before = fit.cost().Seconds(1000, 5000);
  for (int i = 0; i < 100; ++i) {
    fit.Add(1000, 1000u * static_cast<unsigned>(i % 10), 0.5 * (1 + 0.1 * (i % 10)));
  }
  EXPECT_NEAR(fit.cost().Seconds(1000, 5000), before / 2, 0.05);
}

}  // namespace
}  // namespace kvtrie
