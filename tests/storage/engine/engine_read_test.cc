// Frames of several rungs: found, served, decoded.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using testing::HasSubstr;

class EngineReadTest : public CodedFixture {
 protected:
  const std::vector<TokenId> tokens_ = SessionTokens(1, 4 * kTestBlockTokens);
  PathView Path() const { return PathOf(tokens_); }
};

TEST_F(EngineReadTest, CodedBlocksServeWhatTheyAreGoodFor) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  for (const Quality wanted : kAllQualities) {
    const bool serves = IsAtLeast(Quality::kHigh, wanted);
    const LookupResult found = LookupAt(Path(), wanted);
    EXPECT_EQ(found.matched_blocks, serves ? 4u : 0u);
    EXPECT_TRUE(!serves || found.quality == Quality::kHigh);
    for (const auto& frame : FramesAt(Path(), wanted)) {
      ASSERT_EQ(frame.has_value(), serves);
      if (!frame) continue;
      EXPECT_EQ(frame->rung, Rung::kCoded);
      EXPECT_EQ(frame->quality, Quality::kHigh);
      EXPECT_EQ(frame->codec, CodecId::kResidual);
    }
  }
  const LookupResult found = LookupAt(Path(), Quality::kSmall);
  EXPECT_EQ(found.blocks.front().front().rungs, RungBit(Rung::kTokens) | RungBit(Rung::kCoded));
  ExpectSound();
}

TEST_F(EngineReadTest, FramesComeAsTheyWereSentAndDecoded) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  for (const bool from_disk : {false, true}) {
    if (from_disk) Reopen();
    const auto frames = FramesAt(Path(), Quality::kHigh);
    ASSERT_EQ(frames.size(), 4u);
    for (std::uint32_t block = 0; block < 4; ++block) {
      const auto sent = MakeFrame(Path(), block, Residual(Quality::kHigh));
      const auto loaded = ReadBlock(*frames[block], ReadAs::kFrame);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_TRUE(std::equal(loaded->bytes.view.begin(), loaded->bytes.view.end(), sent.begin(),
                             sent.end()));
      const auto raw = RawBytes(*frames[block]);
      ASSERT_TRUE(raw.ok()) << raw.status();
      EXPECT_EQ(*raw, DecodedBytes(Path(), block, Residual(Quality::kHigh)));
    }
  }
  EXPECT_EQ(engine_->Stats().decoded_blocks_total, 4u);  // since the last opening
}

TEST_F(EngineReadTest, TokensAreToldToThoseWhoseBlocksTheyAre) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  auto nodes = NodesOf(LookupAt(Path(), Quality::kHigh));
  nodes[1].bytes[5] ^= 1;  // there is none
  Reopen();                // rows are read
  const auto tokens = engine_->TokensOfBlocks(tenant_, model_, nodes);
  ASSERT_EQ(tokens.size(), 4u);
  for (std::uint32_t block = 0; block < 4; ++block) {
    const auto expected =
        Path().tokens.subspan(std::size_t{block} * kTestBlockTokens, kTestBlockTokens);
    EXPECT_TRUE(block == 1 ? tokens[block].empty() : std::ranges::equal(tokens[block], expected));
  }
  const TenantId other{tenant_.value + 1};
  for (const auto& of_block : engine_->TokensOfBlocks(other, model_, nodes)) {
    EXPECT_TRUE(of_block.empty());
  }
}

// A block that is expected raw never comes from memory as something else.
TEST_F(EngineReadTest, NothingCodedIsServedAsRaw) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const auto frames = FramesAt(Path(), Quality::kHigh);
  EXPECT_TRUE(engine_->TryReadFrame(*frames[0], ReadAs::kFrame).has_value());
  EXPECT_FALSE(engine_->TryReadFrame(*frames[0], ReadAs::kRaw).has_value());
}

TEST_F(EngineReadTest, WithoutADecoderFramesAreServedAsFramesOnly) {
  codec_ = nullptr;
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const auto frames = FramesAt(Path(), Quality::kHigh);
  EXPECT_TRUE(ReadBlock(*frames[0], ReadAs::kFrame).ok());
  const auto raw = ReadBlock(*frames[0], ReadAs::kRaw);
  EXPECT_TRUE(absl::IsFailedPrecondition(raw.status())) << raw.status();
  EXPECT_THAT(std::string(raw.status().message()),
              HasSubstr("stored coded; fetch it as ENCODING_FRAME"));
  EXPECT_EQ(engine_->Stats().undecoded_blocks_total, 1u);
}

TEST_F(EngineReadTest, WithoutADecoderRawReadersGetTheExactFrameWhereThereIsOne) {
  codec_ = nullptr;
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const PathView half = PathOf(std::span(tokens_).first(2 * kTestBlockTokens));
  MustPut(half);
  const auto nodes = NodesOf(LookupAt(Path(), Quality::kHigh));
  const auto raw = engine_->FindFrames(tenant_, model_, nodes, Quality::kSmall, ReadAs::kRaw);
  const auto frames = engine_->FindFrames(tenant_, model_, nodes, Quality::kSmall, ReadAs::kFrame);
  for (std::uint32_t block = 0; block < 4; ++block) {
    EXPECT_EQ((*raw)[block]->rung, block < 2 ? Rung::kExact : Rung::kCoded);
    EXPECT_EQ((*frames)[block]->rung, Rung::kCoded);
  }
  EXPECT_EQ(*RawBytes(*(*raw)[1]), Pattern(Path(), 1));
}

TEST_F(EngineReadTest, FramesThatCannotBeDecodedAreDropped) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const auto frames = FramesAt(Path(), Quality::kHigh);
  fake_codec_->fail = [] { return absl::DataLossError("nonsense"); };
  EXPECT_TRUE(absl::IsDataLoss(ReadBlock(*frames[3], ReadAs::kRaw).status()));
  EXPECT_EQ(engine_->Stats().decode_errors_total, 1u);
  EXPECT_EQ(engine_->Stats().corrupt_frames_total, 1u);
  fake_codec_->fail = nullptr;
  EXPECT_EQ(LookupAt(Path(), Quality::kHigh).matched_blocks, 3u);
  ExpectSound();
}

TEST_F(EngineReadTest, WhatIsMissingForDecodingDropsNothing) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  const auto frames = FramesAt(Path(), Quality::kHigh);
  fake_codec_->fail = [] { return absl::FailedPreconditionError("no profile"); };
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadBlock(*frames[3], ReadAs::kRaw).status()));
  EXPECT_EQ(LookupAt(Path(), Quality::kHigh).matched_blocks, 4u);
}

// What was put in either order.
TEST_F(EngineReadTest, TheSmallestFrameThatIsGoodEnoughServes) {
  OpenWithProfile();
  for (const bool exact_first : {false, true}) {
    const auto tokens = SessionTokens(exact_first ? 5 : 6, 3 * kTestBlockTokens);
    const PathView path = PathOf(tokens);
    if (exact_first) MustPut(path);
    MustPutFrames(path, Residual(Quality::kHigh), /*beside_exact=*/exact_first);
    if (!exact_first) MustPut(path);
    for (const bool reopened : {false, true}) {
      if (reopened) Reopen();
      for (const Quality wanted : kAllQualities) {
        const bool exact = wanted == Quality::kExact || wanted == Quality::kNearExact;
        const LookupResult found = LookupAt(path, wanted);
        ASSERT_EQ(found.matched_blocks, 3u);
        EXPECT_EQ(found.quality, exact ? Quality::kExact : Quality::kHigh);
        EXPECT_EQ(found.blocks.front().front().rungs,
                  RungBit(Rung::kTokens) | RungBit(Rung::kCoded) | RungBit(Rung::kExact));
        EXPECT_EQ(found.blocks.front().front().stored_bytes > raw_block_bytes_, exact);
        const auto frames = FramesAt(path, wanted);
        for (std::uint32_t block = 0; block < 3; ++block) {
          ASSERT_TRUE(frames[block].has_value());
          EXPECT_EQ(frames[block]->rung, exact ? Rung::kExact : Rung::kCoded);
          EXPECT_EQ(
              *RawBytes(*frames[block]),
              exact ? Pattern(path, block) : DecodedBytes(path, block, Residual(Quality::kHigh)));
        }
      }
    }
    ExpectSound();
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.node_count, 6u);
  EXPECT_EQ(stats.codecs[0].codec, CodecId::kRaw);
  EXPECT_EQ(stats.codecs[0].frames, 6u);
  EXPECT_EQ(stats.codecs[2].codec, CodecId::kResidual);
  EXPECT_EQ(stats.codecs[2].frames, 6u);
  EXPECT_EQ(stats.codecs[0].bytes + stats.codecs[2].bytes, stats.live_bytes);
}

TEST_F(EngineReadTest, OnlyTheRowKnowsWhereTheLargerFrameLies) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  MustPut(Path());
  const auto nodes = NodesOf(LookupAt(Path(), Quality::kHigh));
  EXPECT_TRUE(
      engine_->TryFindFrames(tenant_, model_, nodes, Quality::kHigh, ReadAs::kRaw).has_value());
  EXPECT_FALSE(
      engine_->TryFindFrames(tenant_, model_, nodes, Quality::kExact, ReadAs::kRaw).has_value());
  EXPECT_TRUE(engine_->FindFrames(tenant_, model_, nodes, Quality::kExact)->front().has_value());
}

TEST_F(EngineReadTest, ADamagedFrameLeavesTheOtherOne) {
  OpenWithProfile();
  options_.memory_tier_bytes = 0;
  Reopen();
  for (const Quality damaged : {Quality::kHigh, Quality::kExact}) {
    const auto tokens =
        SessionTokens(20 + static_cast<std::uint64_t>(damaged), 2 * kTestBlockTokens);
    const PathView path = PathOf(tokens);
    MustPutFrames(path, Residual(Quality::kHigh));
    MustPut(path);
    const Quality left = damaged == Quality::kHigh ? Quality::kExact : Quality::kHigh;
    const auto frame = FramesAt(path, damaged)[1].value();
    ASSERT_EQ(frame.quality, damaged);
    DamageRecord(frame.at);
    EXPECT_TRUE(absl::IsDataLoss(ReadBlock(frame).status()));
    EXPECT_EQ(LookupAt(path, Quality::kExact).matched_blocks, left == Quality::kExact ? 2u : 1u);
    EXPECT_EQ(LookupAt(path, Quality::kHigh).matched_blocks, 2u);
    const auto kept = FramesAt(path, Quality::kUnrated)[1];
    ASSERT_TRUE(kept.has_value());
    EXPECT_EQ(kept->quality, left);
    EXPECT_TRUE(ReadBlock(*kept).ok());
    ExpectSound();
    Reopen();
    EXPECT_EQ(FramesAt(path, Quality::kUnrated)[1]->quality, left);
    ExpectSound();
  }
}

TEST_F(EngineReadTest, DescriptionsNameBothFrames) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kSmall));
  MustPut(Path());
  const auto described = engine_->DescribePath(tenant_, SelectionOf(Path()));
  ASSERT_TRUE(described.ok()) << described.status();
  ASSERT_EQ(described->size(), 4u);
  for (const NodeInfo& node : *described) {
    ASSERT_EQ(node.frames.size(), 2u);
    EXPECT_EQ(node.frames[0].codec, CodecId::kResidual);
    EXPECT_EQ(node.frames[0].quality, Quality::kSmall);
    EXPECT_EQ(node.frames[1].codec, CodecId::kRaw);
    EXPECT_EQ(node.quality, Quality::kExact);
    EXPECT_EQ(node.in_memory, std::vector<bool>({true, true}));
  }
  const auto children = engine_->ListChildren(tenant_, model_, {}, {}, 10);
  ASSERT_EQ(children->size(), 1u);
  EXPECT_EQ(children->front().frames.size(), 2u);
}

}  // namespace
}  // namespace kvtrie
