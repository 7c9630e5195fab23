#include "storage/engine/frame_census.h"

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

RungRow Rung(CodecId codec, std::uint32_t bytes, std::uint8_t profile = 0) {
  RungRow row;
  row.rung = RungOf(codec);
  row.codec = codec;
  row.record_bytes = bytes;
  row.profile.bytes.fill(profile);
  return row;
}

TEST(FrameCensusTest, CountsByModelCodecAndProfile) {
  FrameCensus census;
  census.Add(0, Rung(CodecId::kRaw, 100));
  census.Add(2, Rung(CodecId::kRaw, 10));
  census.Add(2, Rung(CodecId::kResidual, 7, 1));
  census.Add(2, Rung(CodecId::kResidual, 8, 1));
  census.Add(2, Rung(CodecId::kLossless, 50, 2));
  using Usage = FrameCensus::Usage;
  EXPECT_EQ(census.OfModel(0), (Usage{1, 100}));
  EXPECT_EQ(census.OfModel(1), Usage{});
  EXPECT_EQ(census.OfModel(2), (Usage{4, 75}));
  EXPECT_EQ(census.OfModel(9), Usage{});
  EXPECT_EQ(census.OfCodec(CodecId::kRaw), (Usage{2, 110}));
  EXPECT_EQ(census.OfCodec(CodecId::kResidual), (Usage{2, 15}));
  EXPECT_EQ(census.OfCodec(CodecId::kRotated), Usage{});
  EXPECT_EQ(census.Total(), (Usage{5, 175}));
  EXPECT_EQ(census.FramesOf(Rung(CodecId::kResidual, 0, 1).profile), 2u);
  EXPECT_EQ(census.FramesOf(Rung(CodecId::kResidual, 0, 2).profile), 1u);
  EXPECT_EQ(census.FramesOf(Rung(CodecId::kResidual, 0, 3).profile), 0u);
}

TEST(FrameCensusTest, WhatIsRemovedLeavesNothing) {
  FrameCensus census;
  const FrameCensus empty;
  const RungRow rungs[] = {Rung(CodecId::kRaw, 5), Rung(CodecId::kResidual, 7, 1),
                           Rung(CodecId::kResidual, 9, 1)};
  for (const RungRow& rung : rungs) census.Add(3, rung);
  EXPECT_FALSE(census == empty);
  for (const RungRow& rung : rungs) census.Remove(3, rung);
  EXPECT_TRUE(census == empty);
  EXPECT_TRUE(census.profiles().empty());
}

TEST(FrameCensusDeathTest, WhatWasNotAddedCannotGo) {
  FrameCensus census;
  census.Add(0, Rung(CodecId::kRaw, 5));
  EXPECT_DEATH(census.Remove(0, Rung(CodecId::kRotated, 5)), "frames");
  EXPECT_DEATH(census.Remove(1, Rung(CodecId::kRaw, 5)), "models_");
}

}  // namespace
}  // namespace kvtrie
