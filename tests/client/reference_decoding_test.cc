#include "client/reference_decoding.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

constexpr std::size_t kBlocks = 6;

class ReferenceDecodingTest : public testing::Test {
 protected:
  ReferenceDecodingTest() {
    std::vector<BlockToEncode> blocks;
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      raw_.push_back(CutBlock(spec_, text_, 16 * b));
      tokens_.emplace_back(text_.tokens.begin() + 16 * b, text_.tokens.begin() + 16 * (b + 1));
    }
    for (std::uint32_t b = 0; b < kBlocks; ++b) {
      blocks.push_back({.first_position = 16 * b,
                        .session_tokens = 16 * kBlocks,
                        .tokens = tokens_[b],
                        .raw = raw_[b]});
    }
    const auto encoded = codec_->Encode(blocks, Quality::kHigh).value();
    for (std::size_t b = 0; b < kBlocks; ++b) {
      TrieNodeId node;
      node.bytes.fill(static_cast<std::uint8_t>(b + 1));
      nodes_.push_back(node);
      Keep(b, encoded[b].bytes, tokens_[b]);
      std::vector<std::byte>& expected = expected_.emplace_back(raw_[b].size());
      const FrameToDecode to_decode{.frame = FrameView::Parse(encoded[b].bytes).value(),
                                    .tokens = tokens_[b],
                                    .raw = expected};
      EXPECT_TRUE(codec_->Decode({&to_decode, 1}).ok());
    }
  }

  void Keep(std::size_t block, std::vector<std::byte> bytes, std::vector<TokenId> tokens) {
    auto frame = std::make_shared<ReferenceFrame>();
    frame->bytes = std::move(bytes);
    frame->tokens = std::move(tokens);
    frames_[nodes_[block]] = std::move(frame);
  }
  DecodedReferences Decode(DecodedReferences last = {}) {
    return DecodeReferences(
        KvGeometry(spec_), spec_.Digest(), nodes_, frames_,
        [this](const ProfileId&) -> absl::StatusOr<std::shared_ptr<const FrameCodec>> {
          ++codec_calls_;
          return codec_;
        },
        std::move(last));
  }

  const ModelSpec spec_ = SectionedSpec();
  const ResidualProfile profile_ = PlainProfile(spec_);
  const std::shared_ptr<const FrameCodec> codec_ = std::make_shared<FrameCodec>(
      spec_,
      std::shared_ptr<const ResidualCodec>(
          ResidualCodec::Create(spec_, ProfileIdOf(ProfileBytes(profile_)), profile_).value()));
  const SyntheticText text_ = MakeText(spec_, 16 * kBlocks, 3);
  std::vector<std::vector<std::byte>> raw_, expected_;
  std::vector<std::vector<TokenId>> tokens_;
  std::vector<TrieNodeId> nodes_;
  ReferenceFrames frames_;
  int codec_calls_ = 0;
};

TEST_F(ReferenceDecodingTest, GivesRawKvWithWhereItStandsAndHowGoodItIs) {
  const DecodedReferences decoded = Decode();
  ASSERT_EQ(decoded.size(), kBlocks);
  for (std::uint32_t b = 0; b < kBlocks; ++b) {
    const DecodedReference& reference = decoded.at(nodes_[b]);
    EXPECT_EQ(reference.first_position, 16 * b);
    EXPECT_EQ(reference.quality, Quality::kHigh);
    EXPECT_TRUE(std::equal(expected_[b].begin(), expected_[b].end(), reference.raw.get()));
  }
}

TEST_F(ReferenceDecodingTest, WhatIsThereIsNotDecodedAgain) {
  DecodedReferences decoded = Decode();
  const int calls = codec_calls_;
  EXPECT_EQ(Decode(std::move(decoded)).size(), kBlocks);
  EXPECT_EQ(codec_calls_, calls);
}

TEST_F(ReferenceDecodingTest, WhatIsBadIsLeftOutAlone) {
  auto damaged = frames_.at(nodes_[0])->bytes;
  damaged[damaged.size() - 1] ^= std::byte{1};
  Keep(0, damaged, tokens_[0]);
  auto cut = frames_.at(nodes_[1])->bytes;
  cut.pop_back();
  Keep(1, cut, tokens_[1]);
  Keep(2, frames_.at(nodes_[2])->bytes, tokens_[3]);  // of other tokens
  Keep(3, frames_.at(nodes_[3])->bytes, {});
  frames_.erase(nodes_[4]);
  const DecodedReferences decoded = Decode();
  ASSERT_EQ(decoded.size(), 1u);
  EXPECT_EQ(decoded.begin()->first, nodes_[5]);
}

}  // namespace
}  // namespace kvtrie
