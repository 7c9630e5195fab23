#include "storage/codec/frame_codec.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/storage/codec/residual_fixture.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

class FrameCodecTest : public testing::Test {
 protected:
  FrameCodecTest() {
    spec_ = WithBlocks(SyntheticSpec(), 16);
    spec_.dtype = DType::kBfloat16;
    const SyntheticText text = MakeText(spec_, 64, 5);
    for (std::uint32_t first = 0; first < 64; first += 16) {
      raw_.push_back(CutBlock(spec_, text, first));
      tokens_.emplace_back(text.tokens.begin() + first, text.tokens.begin() + first + 16);
    }
    for (std::size_t i = 0; i < raw_.size(); ++i) {
      blocks_.push_back({.first_position = static_cast<std::uint32_t>(16 * i),
                         .session_tokens = 64,
                         .tokens = tokens_[i],
                         .raw = raw_[i]});
    }
  }

  FrameCodec WithProfile() const {
    return FrameCodec(spec_, MakeCodec(spec_, FitSynthetic(spec_)));
  }
  FrameCodec WithoutProfile() const { return FrameCodec(spec_, nullptr); }

  // Every frame is one, of this model, and decodes by itself; returns what they decode to.
  std::vector<std::vector<std::byte>> Restore(const FrameCodec& codec,
                                              const std::vector<EncodedFrame>& frames) const {
    std::vector<std::vector<std::byte>> restored(frames.size(),
                                                 std::vector<std::byte>(raw_[0].size()));
    std::vector<FrameToDecode> to_decode;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const auto frame = FrameView::Parse(frames[i].bytes);
      EXPECT_TRUE(frame.ok()) << frame.status();
      if (!frame.ok()) continue;
      EXPECT_TRUE(frame->VerifyBody().ok());
      EXPECT_TRUE(frame->CheckGeometry(KvGeometry(spec_)).ok());
      EXPECT_EQ(frame->model(), spec_.Digest());
      EXPECT_EQ(frame->codec(), frames[i].codec);
      EXPECT_EQ(frame->quality(), frames[i].quality);
      to_decode.push_back({.frame = *frame, .tokens = tokens_[i], .raw = restored[i]});
    }
    const absl::Status decoded = codec.Decode(to_decode);
    EXPECT_TRUE(decoded.ok()) << decoded;
    return restored;
  }

  ModelSpec spec_;
  std::vector<std::vector<std::byte>> raw_;
  std::vector<std::vector<TokenId>> tokens_;
  std::vector<BlockToEncode> blocks_;
};

TEST_F(FrameCodecTest, LevelsOfTheProfileAreResidualFrames) {
  const FrameCodec codec = WithProfile();
  const auto frames = codec.Encode(blocks_, Quality::kHigh);
  ASSERT_TRUE(frames.ok()) << frames.status();
  ASSERT_EQ(frames->size(), blocks_.size());
  for (const EncodedFrame& frame : *frames) {
    EXPECT_EQ(frame.codec, CodecId::kResidual);
    EXPECT_EQ(frame.quality, Quality::kHigh);
  }
  Restore(codec, *frames);
}

TEST_F(FrameCodecTest, WithoutAProfileEveryRatedLevelIsExact) {
  const FrameCodec codec = WithoutProfile();
  for (const Quality quality :
       {Quality::kSmall, Quality::kHigh, Quality::kNearExact, Quality::kExact}) {
    const auto frames = codec.Encode(blocks_, quality);
    ASSERT_TRUE(frames.ok()) << frames.status();
    for (const EncodedFrame& frame : *frames) EXPECT_EQ(frame.quality, Quality::kExact);
    EXPECT_EQ(Restore(codec, *frames), raw_);
  }
}

TEST_F(FrameCodecTest, UnratedIsRotated) {
  for (const FrameCodec& codec : {WithProfile(), WithoutProfile()}) {
    const auto frames = codec.Encode(blocks_, Quality::kUnrated);
    ASSERT_TRUE(frames.ok()) << frames.status();
    for (const EncodedFrame& frame : *frames) EXPECT_EQ(frame.codec, CodecId::kRotated);
    Restore(codec, *frames);
  }
}

TEST_F(FrameCodecTest, ExactIsBitForBitWithAndWithoutTheProfile) {
  const FrameCodec codec = WithProfile();
  const auto plain = codec.Encode(blocks_, Quality::kExact);
  const auto smallest = codec.EncodeSmallestExact(blocks_);
  ASSERT_TRUE(plain.ok() && smallest.ok());
  EXPECT_EQ(Restore(codec, *plain), raw_);
  EXPECT_EQ(Restore(codec, *smallest), raw_);
  for (const EncodedFrame& frame : *smallest) EXPECT_EQ(frame.codec, CodecId::kLossless);
  for (const EncodedFrame& frame : *plain) EXPECT_EQ(frame.exact_tokens, 16u);
  EXPECT_TRUE(FrameView::Parse((*plain)[1].bytes)->profile().empty());
  EXPECT_FALSE(FrameView::Parse((*smallest)[1].bytes)->profile().empty());
}

TEST_F(FrameCodecTest, ABlockThatIsTooExtremeIsExact) {
  for (std::size_t i = 0; i < raw_[2].size(); ++i) raw_[2][i] = std::byte{0xFF};  // NaN everywhere
  const FrameCodec codec = WithProfile();
  const auto frames = codec.Encode(blocks_, Quality::kHigh);
  ASSERT_TRUE(frames.ok()) << frames.status();
  EXPECT_EQ((*frames)[1].codec, CodecId::kResidual);
  EXPECT_EQ((*frames)[2].codec, CodecId::kLossless);
  EXPECT_EQ((*frames)[2].quality, Quality::kExact);
  EXPECT_EQ(Restore(codec, *frames)[2], raw_[2]);
}

TEST_F(FrameCodecTest, FramesOfAllCodecsDecodeTogether) {
  const FrameCodec codec = WithProfile();
  std::vector<EncodedFrame> frames;
  frames.push_back((*codec.Encode(blocks_, Quality::kExact))[0]);
  frames.push_back((*codec.Encode(blocks_, Quality::kHigh))[1]);
  frames.push_back((*codec.EncodeSmallestExact(blocks_))[2]);
  frames.push_back((*codec.Encode(blocks_, Quality::kUnrated))[3]);
  const auto restored = Restore(codec, frames);
  EXPECT_EQ(restored[0], raw_[0]);
  EXPECT_EQ(restored[2], raw_[2]);
  // What a frame decodes to does not depend on its company.
  EXPECT_EQ(restored[1], Restore(codec, *codec.Encode(blocks_, Quality::kHigh))[1]);
}

TEST_F(FrameCodecTest, AMissingProfileAndOtherTokensAreNamed) {
  const auto frames = WithProfile().Encode(blocks_, Quality::kHigh);
  ASSERT_TRUE(frames.ok());
  const FrameView view = *FrameView::Parse((*frames)[1].bytes);
  std::vector<std::byte> restored(raw_[0].size());
  FrameToDecode frame = {.frame = view, .tokens = tokens_[1], .raw = restored};
  const absl::Status no_profile = WithoutProfile().Decode(std::span(&frame, 1));
  EXPECT_EQ(no_profile.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(no_profile.message()).find(SyntheticProfileId().ToHex()),
            std::string::npos);
  frame.tokens = tokens_[2];
  const absl::Status other_tokens = WithProfile().Decode(std::span(&frame, 1));
  EXPECT_EQ(other_tokens.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(other_tokens.message()).find("tokens"), std::string::npos);
}

class ReferencedFrameTest : public testing::Test {
 protected:
  static SyntheticText Other() { return MakeText(Spec(), 96, 5); }
  static ModelSpec Spec() { return SyntheticSpec({{4, 2, 16, 16}}, DType::kBfloat16); }
  FrameCodec WithDifferencesToo() const {
    return FrameCodec(spec_, MakeCodec(spec_, WithDifferences(PlainProfile(spec_), spec_)));
  }
  static std::vector<CodecId> CodecsOf(const std::vector<EncodedFrame>& frames) {
    std::vector<CodecId> codecs;
    for (const EncodedFrame& frame : frames) codecs.push_back(frame.codec);
    return codecs;
  }

  const ModelSpec spec_ = Spec();
  const SharedBlocks shared_{spec_, Other(), ShareTokens(spec_, Other(), 13, 60, 20, 96, 6, 0.02f)};
};

TEST_F(ReferencedFrameTest, ReferencesAreUsedWhereTheyPay) {
  const FrameCodec codec = WithDifferencesToo();
  const auto frames = codec.Encode(shared_.blocks, Quality::kHigh);
  ASSERT_TRUE(frames.ok()) << frames.status();
  const auto alone = codec.Encode(shared_.Alone(), Quality::kHigh);
  ASSERT_TRUE(alone.ok());
  std::size_t referenced = 0;
  for (std::size_t b = 0; b < frames->size(); ++b) {
    EXPECT_LE((*frames)[b].bytes.size(), (*alone)[b].bytes.size());
    if ((*frames)[b].codec == CodecId::kReferenced) {
      EXPECT_LT((*frames)[b].bytes.size(), (*alone)[b].bytes.size());
      EXPECT_GT((*frames)[b].referenced_tokens, 0u);
      EXPECT_LE((*frames)[b].referenced_tokens, 16u);
      ++referenced;
    } else {
      EXPECT_EQ((*frames)[b].referenced_tokens, 0u);
      EXPECT_EQ((*frames)[b].bytes, (*alone)[b].bytes);
    }
  }
  // Tokens 20 to 79 are shared.
  EXPECT_GE(referenced, 3u);
  EXPECT_EQ((*frames)[0].codec, CodecId::kResidual);
  EXPECT_EQ((*frames)[5].codec, CodecId::kResidual);
}

TEST_F(ReferencedFrameTest, ReferencesThatAreNoHelpAreLeft) {
  // The same tokens, and KV of its own.
  const SharedBlocks unlike(spec_, Other(), ShareTokens(spec_, Other(), 13, 60, 20, 96, 6, 3));
  const auto frames = WithDifferencesToo().Encode(unlike.blocks, Quality::kHigh);
  ASSERT_TRUE(frames.ok());
  EXPECT_EQ(CodecsOf(*frames), std::vector<CodecId>(6, CodecId::kResidual));
}

TEST_F(ReferencedFrameTest, OtherQualitiesAndProfilesLeaveThem) {
  const FrameCodec plain(spec_, MakeCodec(spec_, PlainProfile(spec_)));
  const FrameCodec without(spec_, nullptr);
  const FrameCodec with = WithDifferencesToo();
  EXPECT_EQ(CodecsOf(plain.Encode(shared_.blocks, Quality::kHigh).value()),
            std::vector<CodecId>(6, CodecId::kResidual));
  EXPECT_EQ(CodecsOf(without.Encode(shared_.blocks, Quality::kHigh).value()),
            std::vector<CodecId>(6, CodecId::kLossless));
  EXPECT_EQ(CodecsOf(with.Encode(shared_.blocks, Quality::kExact).value()),
            std::vector<CodecId>(6, CodecId::kLossless));
  EXPECT_EQ(CodecsOf(with.EncodeSmallestExact(shared_.blocks).value()),
            std::vector<CodecId>(6, CodecId::kLossless));
  EXPECT_EQ(CodecsOf(with.Encode(shared_.blocks, Quality::kUnrated).value()),
            std::vector<CodecId>(6, CodecId::kRotated));
}

TEST_F(ReferencedFrameTest, FramesDecodeWithWhatTheyName) {
  const FrameCodec codec = WithDifferencesToo();
  std::vector<EncodedFrame> frames = codec.Encode(shared_.blocks, Quality::kHigh).value();
  frames[4] = codec.EncodeSmallestExact(shared_.blocks).value()[4];
  std::vector<std::vector<std::byte>> together(frames.size(),
                                               std::vector<std::byte>(shared_.raw[0].size()));
  std::vector<FrameToDecode> to_decode;
  for (std::size_t b = 0; b < frames.size(); ++b) {
    to_decode.push_back({.frame = FrameView::Parse(frames[b].bytes).value(),
                         .tokens = shared_.tokens[b],
                         .raw = together[b],
                         .references = shared_.references});
  }
  ASSERT_TRUE(codec.Decode(to_decode).ok());
  EXPECT_EQ(together[4], shared_.raw[4]);
  for (std::size_t b = 0; b < frames.size(); ++b) {
    const auto named = ReferencesOf(to_decode[b].frame, spec_.block_tokens);
    ASSERT_TRUE(named.ok()) << named.status();
    EXPECT_EQ(named->references.empty(), frames[b].codec != CodecId::kReferenced);
    std::vector<ReferenceBlock> own;
    for (const FrameReference& of : named->references) {
      for (const ReferenceBlock& block : shared_.references) {
        if (block.node == of.node) own.push_back(block);
      }
    }
    std::vector<std::byte> raw(shared_.raw[0].size());
    FrameToDecode one = to_decode[b];
    one.raw = raw;
    one.references = own;
    ASSERT_TRUE(codec.Decode({&one, 1}).ok());
    EXPECT_EQ(raw, together[b]);
    if (own.empty()) continue;
    one.references = std::span(own).first(own.size() - 1);
    const absl::Status missing = codec.Decode({&one, 1});
    EXPECT_TRUE(absl::IsInvalidArgument(missing));
    EXPECT_NE(std::string(missing.message()).find(own.back().node.ToHex()), std::string::npos);
  }
}

TEST_F(ReferencedFrameTest, NamesOfADamagedTableAreRefused) {
  const std::vector<std::byte> bytes =
      WithDifferencesToo().Encode(shared_.blocks, Quality::kHigh).value()[2].bytes;
  const auto frame = FrameView::Parse(bytes).value();
  ASSERT_EQ(frame.codec(), CodecId::kReferenced);
  std::vector<std::byte> damaged = bytes;
  damaged[frame.header_bytes() + 24 + 6 + 2 * frame.section_count()] = std::byte{99};
  EXPECT_TRUE(absl::IsDataLoss(
      ReferencesOf(FrameView::Parse(damaged).value(), spec_.block_tokens).status()));
  damaged = bytes;
  damaged[frame.header_bytes() + 24 + 4] = std::byte{99};
  EXPECT_TRUE(absl::IsDataLoss(
      ReferencesOf(FrameView::Parse(damaged).value(), spec_.block_tokens).status()));
}

// Shapes of models, from one head of one dimension to 32 of 576, K and V or one latent, layers of
// several sizes.
class FrameCodecShapesTest : public testing::TestWithParam<DType> {
 protected:
  static std::vector<std::vector<LayerRun>> Shapes() {
    std::vector<std::vector<LayerRun>> shapes;
    for (const std::uint32_t dim : {1, 40, 64, 80, 96, 112, 128, 132, 192, 256, 512, 576}) {
      for (const std::uint32_t heads : {1, 2, 5, 7, 8, 32}) {
        if (dim * heads <= 4096 || heads == 32) shapes.push_back({{2, heads, dim, dim}});
      }
      shapes.push_back({{2, 1, dim, 0}});
    }
    shapes.push_back({{1, 8, 256, 256}, {2, 1, 512, 256}, {1, 4, 64, 64}});
    return shapes;
  }
};

// Exact comes back bit for bit; unrated decodes, or is exact where it cannot be coded; a level
// without a profile is exact.
TEST_P(FrameCodecShapesTest, EveryShapeIsCodedOrFallsBack) {
  for (const std::vector<LayerRun>& shape : Shapes()) {
    const ModelSpec spec = WithBlocks(SyntheticSpec(shape, GetParam()), 3);
    SCOPED_TRACE(absl::StrCat(shape[0].kv_heads, " heads of ", shape[0].k_head_dim));
    const KvGeometry geometry(spec);
    TestRandom random(shape[0].kv_heads * 1000 + shape[0].k_head_dim);
    std::vector<std::byte> raw(geometry.raw_block_bytes());
    // In the first two bytes of a number: magnitudes that a model has, and some that it has not.
    for (std::byte& byte : raw) byte = static_cast<std::byte>(random.Below(3) * 0x3B);
    const std::vector<TokenId> tokens = {1, 2, 3};
    const BlockToEncode block = {
        .first_position = 6, .session_tokens = 9, .tokens = tokens, .raw = raw};
    const FrameCodec codec(spec, nullptr);
    for (const Quality quality : {Quality::kExact, Quality::kHigh, Quality::kUnrated}) {
      const auto frames = codec.Encode({&block, 1}, quality);
      ASSERT_TRUE(frames.ok()) << frames.status();
      const auto frame = FrameView::Parse((*frames)[0].bytes);
      ASSERT_TRUE(frame.ok()) << frame.status();
      ASSERT_TRUE(frame->VerifyBody().ok());
      std::vector<std::byte> restored(raw.size(), std::byte{0xAA});
      const FrameToDecode to_decode = {.frame = *frame, .tokens = tokens, .raw = restored};
      const absl::Status status = codec.Decode({&to_decode, 1});
      ASSERT_TRUE(status.ok()) << status;
      if (quality != Quality::kUnrated) {
        ASSERT_EQ(frame->quality(), Quality::kExact);
      }
      if (frame->quality() == Quality::kExact) {
        ASSERT_EQ(restored, raw);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDTypes, FrameCodecShapesTest,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBfloat16,
                                         DType::kFloat8E4m3, DType::kFloat8E5m2, DType::kInt8,
                                         DType::kUint8));

}  // namespace
}  // namespace kvtrie
