#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

class EngineRecodeTest : public CodedFixture {
 protected:
  EngineRecodeTest() {
    options_.recode_quality = Quality::kHigh;
    options_.recode_in_background = false;
  }

  // Until nothing is left; the number of steps.
  int RecodeAll() {
    int steps = 0;
    while (engine_->RunRecoding() > 0) ++steps;
    return steps;
  }
  // What a reader at `high` gets of each block.
  void ExpectCoded(const PathView& path, std::uint32_t block_count) {
    const auto frames = FramesAt(path, Quality::kHigh);
    ASSERT_EQ(frames.size(), block_count);
    for (std::uint32_t block = 0; block < block_count; ++block) {
      ASSERT_TRUE(frames[block].has_value());
      EXPECT_EQ(frames[block]->codec, CodecId::kResidual);
      const auto raw = RawBytes(*frames[block]);
      ASSERT_TRUE(raw.ok()) << raw.status();
      EXPECT_EQ(*raw, DecodedBytes(path, block, Residual(Quality::kHigh)));
    }
  }
  std::uint64_t CodedFrames() {
    for (const CodecUsage& usage : engine_->Stats().codecs) {
      if (usage.codec == CodecId::kResidual) return usage.frames;
    }
    return 0;
  }
};

TEST_F(EngineRecodeTest, ExactBlocksGetACodedFrameBesideThem) {
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 5 * kTestBlockTokens);
  MustPut(tokens);
  EXPECT_EQ(engine_->Stats().recode_waiting_blocks, 5u);
  EXPECT_EQ(RecodeAll(), 1);
  ExpectCoded(PathOf(tokens), 5);
  EXPECT_EQ(ExpectOwnBytes(tokens), 5u);  // the exact ones are still there
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.recoded_blocks_total, 5u);
  EXPECT_EQ(stats.recoded_raw_bytes_total, 5 * raw_block_bytes_);
  EXPECT_EQ(stats.recode_waiting_blocks, 0u);
  EXPECT_EQ(stats.recode_failed_blocks_total, 0u);
  ExpectSound();
}

TEST_F(EngineRecodeTest, BranchesSaltsAndExtraKeysKeepTheirOwn) {
  OpenWithProfile();
  auto left = SessionTokens(1, 4 * kTestBlockTokens);
  auto right = left;
  right[3 * kTestBlockTokens] ^= 1;
  const std::vector<ExtraKey> extra_keys = {{1, "image"}, {3, "sound"}};
  const PathView salted = PathOf(left, "salt", extra_keys);
  for (const PathView& path : {PathOf(left), PathOf(right), salted}) MustPut(path);
  RecodeAll();
  for (const PathView& path : {PathOf(left), PathOf(right), salted}) {
    ExpectCoded(path, 4);
    EXPECT_EQ(ExpectOwnBytes(path), 4u);
  }
  EXPECT_EQ(CodedFrames(), 4u + 1u + 4u);
  ExpectSound();
}

TEST_F(EngineRecodeTest, WhatIsThereIsNotMadeAgain) {
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  RecodeAll();
  const int encoded = fake_codec_->encoded_blocks;
  EXPECT_EQ(engine_->RunRecoding(), 0u);
  Reopen();
  EXPECT_EQ(engine_->RunRecoding(), 0u);
  EXPECT_EQ(fake_codec_->encoded_blocks, encoded);
}

TEST_F(EngineRecodeTest, ABlockThatCannotBeCodedIsTriedOnceAndThoseAroundItAreCoded) {
  fake_codec_->refuse = [](std::uint32_t first_position) {
    return first_position == 2 * kTestBlockTokens;
  };
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  EXPECT_EQ(RecodeAll(), 1);
  EXPECT_EQ(CodedFrames(), 3u);
  EXPECT_EQ(engine_->Stats().recode_failed_blocks_total, 1u);
  EXPECT_EQ(fake_codec_->encoded_blocks, 4);
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  ExpectSound();
}

TEST_F(EngineRecodeTest, WithoutAProfileOrItsLevelNothingIsDone) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  EXPECT_EQ(engine_->RunRecoding(), 0u);
  EXPECT_EQ(engine_->Stats().recode_waiting_blocks, 0u);
  profile_ = MustPutProfile(TestProfile(spec_));
  EXPECT_EQ(engine_->Stats().recode_waiting_blocks, 4u);
  EXPECT_EQ(RecodeAll(), 1);
  EXPECT_EQ(CodedFrames(), 4u);
}

TEST_F(EngineRecodeTest, OffMeansOff) {
  options_.recode_quality.reset();
  OpenWithProfile();
  MustPut(SessionTokens(1, 4 * kTestBlockTokens));
  EXPECT_EQ(engine_->RunRecoding(), 0u);
  EXPECT_EQ(fake_codec_->encoded_blocks, 0);
}

TEST_F(EngineRecodeTest, WhatIsDeletedMeanwhileStaysDeleted) {
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  // While blocks are being encoded, nothing holds them.
  fake_codec_->refuse = [&](std::uint32_t first_position) {
    if (first_position == 0) {
      Selection all;
      all.all = true;
      EXPECT_TRUE(engine_->Delete(tenant_, all).ok());
    }
    return false;
  };
  RecodeAll();
  EXPECT_EQ(CodedFrames(), 0u);
  EXPECT_EQ(Matched(tokens), 0u);
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  ExpectSound();
}

TEST_F(EngineRecodeTest, DamageIsDroppedAndTheOtherBlocksAreCoded) {
  options_.memory_tier_bytes = 0;
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  DamageRecord(FramesAt(PathOf(tokens), Quality::kExact)[3]->at);
  RecodeAll();
  EXPECT_EQ(CodedFrames(), 3u);
  EXPECT_EQ(engine_->Stats().corrupt_frames_total, 1u);
  ExpectCoded(PathOf(tokens), 3);
  ExpectSound();
}

TEST_F(EngineRecodeTest, NothingIsHeldAfterwards) {
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 3 * kTestBlockTokens);
  MustPut(tokens);
  RecodeAll();
  EXPECT_EQ(engine_->Stats().put_memory_bytes, 0u);
  AwaitNoOpenPuts();
  EXPECT_EQ(engine_->Stats().open_puts, 0u);
}

// The same text behind another prefix, at another place in its blocks.
TEST_F(EngineRecodeTest, TextThatIsStoredElsewhereIsCodedAgainstIt) {
  OpenWithProfile();
  const auto document = SessionTokens(7, 10 * kTestBlockTokens);
  std::vector<TokenId> first = SessionTokens(1, 2 * kTestBlockTokens);
  std::vector<TokenId> second = SessionTokens(2, 2 * kTestBlockTokens + 5);
  first.insert(first.end(), document.begin(), document.end());
  second.insert(second.end(), document.begin(), document.end());
  const std::uint32_t second_blocks = static_cast<std::uint32_t>(second.size()) / kTestBlockTokens;
  // References are finer than what is coded against them.
  MustPutFrames(PathOf(first), Residual(Quality::kNearExact));
  MustPut(second);
  RecodeAll();
  const auto frames = FramesAt(PathOf(second), Quality::kHigh);
  ASSERT_EQ(frames.size(), second_blocks);
  std::uint32_t referenced = 0;
  for (std::uint32_t block = 0; block < second_blocks; ++block) {
    ASSERT_TRUE(frames[block].has_value());
    referenced += frames[block]->codec == CodecId::kReferenced ? 1 : 0;
    const auto raw = RawBytes(*frames[block]);
    ASSERT_TRUE(raw.ok()) << raw.status();
    EXPECT_EQ(*raw, DecodedBytes(PathOf(second), block, Residual(Quality::kHigh)));
  }
  EXPECT_EQ(referenced, second_blocks - 2);  // all that hold some of the document
  EXPECT_GE(engine_->Stats().reference_count, referenced);
  ExpectSound();

  // A third one is coded against the first too: members are no references.
  std::vector<TokenId> third = SessionTokens(3, 3 * kTestBlockTokens);
  third.insert(third.end(), document.begin(), document.end());
  MustPut(third);
  RecodeAll();
  EXPECT_EQ(FramesAt(PathOf(third), Quality::kHigh)[5]->codec, CodecId::kReferenced);
  ExpectSound();
  // All members outlive the session that they were coded against.
  Selection selection;
  const auto found = LookupAt(PathOf(first), Quality::kUnrated);
  selection.node = found.blocks.front().front().node;
  ASSERT_TRUE(engine_->Delete(tenant_, selection).ok());
  EXPECT_EQ(engine_->Stats().reference_count, 0u);
  EXPECT_EQ(LookupAt(PathOf(second), Quality::kHigh).matched_blocks, second_blocks);
  EXPECT_EQ(LookupAt(PathOf(third), Quality::kHigh).matched_blocks, 13u);
  EXPECT_EQ(engine_->Stats().lost_members_total, 0u);
  ExpectSound();
}

// How many of the blocks are coded so.
std::uint32_t CountCoded(const Engine::FoundFrames& frames, CodecId codec, Quality quality) {
  return static_cast<std::uint32_t>(
      std::count_if(frames.begin(), frames.end(), [&](const auto& frame) {
        return frame.has_value() && frame->codec == codec && frame->quality == quality;
      }));
}

TEST_F(EngineRecodeTest, TextThatStandsInThreePlacesIsCodedFinerOnceAndTheOthersAgainstIt) {
  OpenWithProfile();
  constexpr std::uint32_t kDocumentBlocks = 10;
  const auto document = SessionTokens(7, kDocumentBlocks * kTestBlockTokens);
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t i = 0; i < 5; ++i) {
    sessions.push_back(SessionTokens(i + 1, 2 * kTestBlockTokens + 5 * i));
    sessions.back().insert(sessions.back().end(), document.begin(), document.end());
    const auto rest = SessionTokens(i + 100, kTestBlockTokens);
    sessions.back().insert(sessions.back().end(), rest.begin(), rest.end());
  }
  std::uint32_t fine = 0, coded_alone = 0, own_blocks = 0;
  for (std::size_t i = 0; i < 3; ++i) MustPut(sessions[i]);
  RecodeAll();
  for (std::size_t i = 3; i < sessions.size(); ++i) {
    MustPut(sessions[i]);
    RecodeAll();
  }
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const auto frames = FramesAt(PathOf(sessions[i]), Quality::kHigh);
    fine += CountCoded(frames, CodecId::kResidual, Quality::kNearExact);
    coded_alone += CountCoded(frames, CodecId::kResidual, Quality::kHigh);
    const std::uint32_t members = CountCoded(frames, CodecId::kReferenced, Quality::kHigh);
    // All but those that hold some of the document; behind it in a block of its own in the first.
    const std::size_t own = (2 * kTestBlockTokens + 5 * i) / kTestBlockTokens + (i == 0 ? 1 : 0);
    EXPECT_EQ(members, i == 0 ? 0 : frames.size() - own) << i;
    own_blocks += static_cast<std::uint32_t>(own);
    EXPECT_EQ(ExpectOwnBytes(sessions[i]), frames.size());
  }
  EXPECT_EQ(fine, kDocumentBlocks);
  EXPECT_EQ(coded_alone, own_blocks);
  EXPECT_EQ(engine_->Stats().refined_blocks_total, kDocumentBlocks);
  ExpectSound();
}

TEST_F(EngineRecodeTest, TextThatStandsInTwoPlacesIsNotWorthAReference) {
  OpenWithProfile();
  const auto document = SessionTokens(7, 10 * kTestBlockTokens);
  for (std::uint64_t i = 1; i <= 2; ++i) {
    auto session = SessionTokens(i, 2 * kTestBlockTokens);
    session.insert(session.end(), document.begin(), document.end());
    MustPut(session);
    RecodeAll();
  }
  EXPECT_EQ(engine_->Stats().refined_blocks_total, 0u);
  EXPECT_EQ(CodedFrames(), 24u);

  // The third does not know what is still to come, but that it has come three times.
  auto third = SessionTokens(3, 2 * kTestBlockTokens);
  third.insert(third.end(), document.begin(), document.end());
  MustPut(third);
  RecodeAll();
  EXPECT_EQ(engine_->Stats().refined_blocks_total, 10u);
  ExpectSound();
}

TEST_F(EngineRecodeTest, WhatWasCodedAloneIsCodedAgainstAReferenceThatCameLater) {
  OpenWithProfile();
  const auto document = SessionTokens(7, 10 * kTestBlockTokens);
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t i = 1; i <= 4; ++i) {
    sessions.push_back(SessionTokens(i, 2 * kTestBlockTokens));
    sessions.back().insert(sessions.back().end(), document.begin(), document.end());
    MustPut(sessions.back());
    if (i == 1) {
      // Without its exact frame, nothing better can be made of it.
      RecodeAll();
      ASSERT_TRUE(
          engine_
              ->SetRetention(tenant_, SelectionOf(PathOf(sessions[0])), {.quality = Quality::kHigh})
              .ok());
    }
    RecodeAll();
    EXPECT_EQ(engine_->Stats().recode_waiting_blocks, 0u);
  }
  std::vector<std::uint32_t> members;
  for (const auto& tokens : sessions) {
    const auto frames = FramesAt(PathOf(tokens), Quality::kHigh);
    members.push_back(CountCoded(frames, CodecId::kReferenced, Quality::kHigh));
    for (std::uint32_t block = 0; block < 12; ++block) {
      const auto raw = RawBytes(*frames[block]);
      ASSERT_TRUE(raw.ok()) << raw.status();
      EXPECT_EQ(*raw, DecodedBytes(PathOf(tokens), block, Residual(frames[block]->quality)));
    }
  }
  EXPECT_EQ(members, (std::vector<std::uint32_t>{0, 10, 0, 10}));
  EXPECT_EQ(engine_->Stats().recoded_again_blocks_total, 10u);
  EXPECT_EQ(ExpectOwnBytes(sessions[1]), 12u);  // exact ones are still there
  ExpectSound();
  Reopen();
  ExpectSound();
}

TEST_F(EngineRecodeTest, WithoutDifferencesInTheProfileThereAreNoReferences) {
  fake_codec_->codes_differences = false;
  OpenWithProfile();
  const auto document = SessionTokens(7, 10 * kTestBlockTokens);
  for (std::uint64_t i = 1; i <= 4; ++i) {
    auto session = SessionTokens(i, 2 * kTestBlockTokens);
    session.insert(session.end(), document.begin(), document.end());
    MustPut(session);
  }
  RecodeAll();
  EXPECT_EQ(engine_->Stats().refined_blocks_total, 0u);
  EXPECT_EQ(engine_->Stats().reference_count, 0u);
  EXPECT_EQ(CodedFrames(), 48u);
}

TEST_F(EngineRecodeTest, LongPathsAreCodedInSteps) {
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 100 * kTestBlockTokens);
  MustPut(tokens);
  EXPECT_GT(RecodeAll(), 2);
  ExpectCoded(PathOf(tokens), 100);
  EXPECT_EQ(engine_->Stats().recoded_blocks_total, 100u);
}

TEST_F(EngineRecodeTest, TheThreadDoesItByItself) {
  options_.recode_in_background = true;
  options_.recode_cpu_percent = 100;
  OpenWithProfile();
  const auto tokens = SessionTokens(1, 8 * kTestBlockTokens);
  MustPut(tokens);
  while (engine_->Stats().recode_waiting_blocks != 0) std::this_thread::yield();
  AwaitNoOpenPuts();
  ExpectCoded(PathOf(tokens), 8);
}

TEST_F(EngineRecodeTest, ExactFramesGoFirstWhenSpaceIsNeeded) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  spec_.kv_groups.front().layer_runs.front().layer_count = 64;  // 128 KiB per block
  OpenWithProfile();
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t i = 0; i < 80; ++i) {
    sessions.push_back(SessionTokens(i, 8 * kTestBlockTokens));
    MustPut(sessions.back());
    RecodeAll();
  }
  // 80 MiB were put into less than 64: everything is still there at `high`.
  for (const auto& tokens : sessions) {
    EXPECT_EQ(LookupAt(PathOf(tokens), Quality::kHigh).matched_blocks, 8u);
  }
  EXPECT_GT(engine_->Stats().evicted_frames_total, 0u);
  EXPECT_EQ(engine_->Stats().evicted_blocks_total, 0u);
  ExpectSound();
}

}  // namespace
}  // namespace kvtrie
