#include "client/member_decoding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/storage/codec/plain_profile_bytes.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr Quality kLevel = Quality::kSmall;

// Two texts that share some tokens: the first coded alone, the second against it.
class MemberDecodingTest : public testing::TestWithParam<int> {
 protected:
  MemberDecodingTest()
      : spec_(SectionedSpec()),
        profile_(WithDifferences(PlainProfile(spec_), spec_)),
        codec_(std::make_shared<FrameCodec>(
            spec_, std::shared_ptr<const ResidualCodec>(
                       ResidualCodec::Create(spec_, ProfileIdOf(ProfileBytes(profile_)), profile_)
                           .value()))),
        other_(MakeText(spec_, 40 * 16, 1)),
        text_(ShareTokens(spec_, other_, 30, 560, 40, 40 * 16, 2, 0.05f)) {
    // What readers of the first get, is what the second is coded against.
    const SharedBlocks plain(spec_, text_, other_);
    auto encoded = codec_->Encode(plain.Alone(), Quality::kHigh).value();
    for (EncodedFrame& frame : encoded) {
      reference_frames_.push_back(std::move(frame.bytes));
    }
    SharedBlocks shared(spec_, other_, text_);
    for (std::size_t b = 0; b < reference_frames_.size(); ++b) {
      const FrameToDecode to_decode{.frame = FrameView::Parse(reference_frames_[b]).value(),
                                    .tokens = shared.reference_tokens[b],
                                    .raw = shared.reference_raw[b]};
      EXPECT_TRUE(codec_->Decode({&to_decode, 1}).ok());
    }
    for (auto& own : shared.of_block) {
      for (ReferenceBlock& reference : own) reference.quality = Quality::kHigh;
    }
    frames_ = codec_->Encode(shared.blocks, kLevel).value();
    for (std::size_t b = 0; b < reference_frames_.size(); ++b) {
      auto frame = std::make_shared<ReferenceFrame>();
      frame->bytes = reference_frames_[b];
      frame->tokens = shared.reference_tokens[b];
      references_.emplace(shared.references[b].node, std::move(frame));
    }
    for (std::size_t b = 0; b < frames_.size(); ++b) {
      std::vector<std::byte>& expected = expected_.emplace_back(shared.raw[b].size());
      const FrameToDecode to_decode{.frame = FrameView::Parse(frames_[b].bytes).value(),
                                    .tokens = shared.tokens[b],
                                    .raw = expected,
                                    .references = shared.of_block[b]};
      EXPECT_TRUE(codec_->Decode({&to_decode, 1}).ok());
    }
    tokens_ = shared.tokens;
  }

  // Of all blocks that were coded against others.
  MemberDecoding Make(int threads) {
    std::vector<MemberFrame> members;
    for (std::size_t b = 0; b < frames_.size(); ++b) {
      raw_.emplace_back(expected_[b].size());
      targets_.push_back({.node = {},
                          .raw = raw_[b],
                          .tokens = tokens_[b],
                          .first_position = static_cast<std::uint32_t>(16 * b)});
    }
    for (std::size_t b = 0; b < frames_.size(); ++b) {
      if (frames_[b].codec != CodecId::kReferenced) continue;
      const auto& bytes = frames_[b].bytes;
      auto memory = std::make_unique<std::byte[]>(bytes.size());
      std::copy(bytes.begin(), bytes.end(), memory.get());
      const FrameView view = FrameView::Parse({memory.get(), bytes.size()}).value();
      members.push_back({b, view, std::move(memory), codec_});
    }
    member_count_ = members.size();
    return {spec_, targets_, [this](const ProfileId&) { return codec_; }, std::move(members),
            threads};
  }

  const ModelSpec spec_;
  const ResidualProfile profile_;
  const std::shared_ptr<const FrameCodec> codec_;
  const SyntheticText other_, text_;
  std::vector<std::vector<std::byte>> reference_frames_;
  std::vector<EncodedFrame> frames_;
  std::vector<std::vector<TokenId>> tokens_;
  std::vector<std::vector<std::byte>> expected_, raw_;
  std::vector<FetchTarget> targets_;
  std::map<TrieNodeId, std::shared_ptr<const ReferenceFrame>> references_;
  std::size_t member_count_ = 0;
};

TEST_P(MemberDecodingTest, GivesWhatTheCodecGives) {
  MemberDecoding decoding = Make(GetParam());
  ASSERT_GE(member_count_, 30u);
  std::map<TrieNodeId, std::shared_ptr<const ReferenceFrame>> wanted;
  for (const TrieNodeId& node : decoding.References()) wanted.emplace(node, references_.at(node));
  EXPECT_GE(wanted.size(), 30u);
  EXPECT_TRUE(decoding.Decode(wanted).empty());
  for (std::size_t b = 0; b < frames_.size(); ++b) {
    if (frames_[b].codec != CodecId::kReferenced) continue;
    EXPECT_EQ(raw_[b], expected_[b]) << b;
  }
}

TEST_P(MemberDecodingTest, WhatLacksAReferenceOrHasAnotherFailsAlone) {
  MemberDecoding decoding = Make(GetParam());
  const auto nodes = decoding.References();
  references_.erase(nodes[7]);
  // Of another text: intact, and not what was coded against.
  references_[nodes[20]] = references_.at(nodes[3]);
  auto damaged = std::make_shared<ReferenceFrame>(*references_.at(nodes[12]));
  damaged->bytes[damaged->bytes.size() / 2] ^= std::byte{1};
  references_[nodes[12]] = damaged;

  const std::vector<std::size_t> failed = decoding.Decode(references_);
  std::vector<std::size_t> expected;
  for (std::size_t member = 0; member < member_count_; ++member) {
    const auto& own = decoding.table(member).references;
    const bool is_bad = std::any_of(own.begin(), own.end(), [&](const FrameReference& reference) {
      return reference.node == nodes[7] || reference.node == nodes[12] ||
             reference.node == nodes[20];
    });
    if (is_bad) {
      expected.push_back(member);
    } else {
      EXPECT_EQ(raw_[decoding.target(member)], expected_[decoding.target(member)]) << member;
    }
  }
  EXPECT_EQ(failed, expected);
  EXPECT_GE(failed.size(), 3u);
  EXPECT_LE(failed.size(), 6u);
}

TEST_P(MemberDecodingTest, WithoutReferencesAllFail) {
  MemberDecoding decoding = Make(GetParam());
  EXPECT_EQ(decoding.Decode({}).size(), member_count_);
}

INSTANTIATE_TEST_SUITE_P(Threads, MemberDecodingTest, testing::Values(1, 3));

}  // namespace
}  // namespace kvtrie
