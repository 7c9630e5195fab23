#include "client/path_encoder.h"

#include "gtest/gtest.h"
#include "storage/codec/profile_codec.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kFirstBlock = 2;
constexpr std::size_t kBlocks = 40;

class PathEncoderTest : public testing::Test {
 protected:
  PathEncoderTest() {
    const auto profile = ProfileBytes(PlainProfile(spec_));
    codec_ = std::make_shared<const FrameCodec>(
        spec_, std::shared_ptr<const ResidualCodec>(
                   CodecOfProfile(spec_, ProfileIdOf(profile), profile).value()));
    for (std::size_t i = 0; i < kBlocks; ++i) {
      raw_.push_back(CutBlock(spec_, text_, static_cast<std::uint32_t>(16 * (kFirstBlock + i))));
    }
    blocks_.assign(raw_.begin(), raw_.end());
    path_.path.tokens = text_.tokens;
    path_.first_block = kFirstBlock;
    path_.blocks = blocks_;
    path_.quality = Quality::kHigh;
  }

  std::vector<std::byte> Expected(std::uint32_t i, const FrameCodec& codec) const {
    const BlockToEncode block{.first_position = 16 * (kFirstBlock + i),
                              .session_tokens = static_cast<std::uint32_t>(text_.tokens.size()),
                              .tokens = std::span(text_.tokens).subspan(16 * (kFirstBlock + i), 16),
                              .raw = raw_[i]};
    return codec.Encode({&block, 1}, path_.quality).value()[0].bytes;
  }

  const ModelSpec spec_ = SyntheticSpec();
  // Some tokens are behind the last block: they are part of what is known of the session.
  const SyntheticText text_ = MakeText(spec_, 16 * (kFirstBlock + kBlocks) + 5, 4);
  std::shared_ptr<const FrameCodec> codec_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<std::span<const std::byte>> blocks_;
  PutPath path_;
};

TEST_F(PathEncoderTest, OnlyWhatIsWantedIsEncodedAndSomeAtATime) {
  for (const int threads : {1, 3}) {
    PathEncoder encoder(path_, 16, codec_, threads);
    std::deque<std::uint32_t> wanted;
    for (std::uint32_t i = 1; i < kBlocks; i += 2) wanted.push_back(i);
    EXPECT_TRUE(encoder.Frame(wanted).bytes == Expected(1, *codec_));
    EXPECT_EQ(encoder.frame(35) != nullptr, threads == 3) << "16 blocks per thread";
    while (!wanted.empty()) {
      const EncodedFrame& frame = encoder.Frame(wanted);
      EXPECT_EQ(frame.codec, CodecId::kResidual);
      EXPECT_TRUE(frame.bytes == Expected(wanted.front(), *codec_));
      EXPECT_EQ(&frame, encoder.frame(wanted.front()));
      wanted.pop_front();
    }
    for (std::uint32_t i = 0; i < kBlocks; i += 2) EXPECT_EQ(encoder.frame(i), nullptr);
  }
}

TEST_F(PathEncoderTest, WhatTheCodecCannotDoIsCodedWithoutLoss) {
  path_.quality = Quality::kNearExact;  // no such level
  PathEncoder encoder(path_, 16, codec_, 1);
  const EncodedFrame& frame = encoder.Frame({0});
  EXPECT_EQ(frame.codec, CodecId::kLossless);
  EXPECT_EQ(frame.quality, Quality::kExact);
}

}  // namespace
}  // namespace kvtrie
