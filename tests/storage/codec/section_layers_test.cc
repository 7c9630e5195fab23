#include "storage/codec/section_layers.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/codec/frame_codec.h"
#include "storage/codec/profile_codec.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

class SectionLayersTest : public testing::Test {
 protected:
  SectionLayersTest() {
    const std::vector<std::byte> profile = ProfileBytes(PlainProfile(spec_));
    codec_ = CodecOfProfile(spec_, ProfileIdOf(profile), profile).value();
  }

  BlockToEncode Block() const {
    return {.first_position = 0, .session_tokens = 16, .tokens = text_.tokens, .raw = text_.raw};
  }

  const ModelSpec spec_ = SectionedSpec();
  const KvGeometry geometry_{spec_};
  const SyntheticText text_ = MakeText(spec_, 16, 1);
  std::shared_ptr<const ResidualCodec> codec_;
};

TEST_F(SectionLayersTest, ResidualFramesSayWhatTheirDecoderSays) {
  const BlockToEncode block = Block();
  const FrameCodec codec(spec_, codec_);
  for (const Quality quality : {Quality::kHigh, Quality::kExact}) {
    const auto frame = quality == Quality::kExact ? codec.EncodeSmallestExact({&block, 1})
                                                  : codec.Encode({&block, 1}, quality);
    const FrameView view = FrameView::Parse((*frame)[0].bytes).value();
    ASSERT_FALSE(view.profile().empty());
    const auto layers = LayersOfSections(view, geometry_);
    ASSERT_TRUE(layers.ok()) << layers.status();
    ASSERT_EQ(layers->size(), view.section_count());
    EXPECT_GT(layers->size(), 2u);
    std::vector<std::uint32_t> section_bytes;
    for (std::size_t i = 0; i < view.section_count(); ++i) {
      section_bytes.push_back(view.section(i).bytes);
    }
    std::vector<std::byte> raw(text_.raw.size());
    const BlockToDecode to_decode{.body = view.body(),
                                  .section_bytes = section_bytes,
                                  .quality = quality,
                                  .tokens = text_.tokens,
                                  .raw = raw};
    const auto decoder = ResidualCodec::Decoder::Start(*codec_, {&to_decode, 1});
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    for (std::size_t i = 0; i < layers->size(); ++i) {
      EXPECT_EQ((*layers)[i], decoder->LayersIn(0, i + 1));
    }
  }
}

TEST_F(SectionLayersTest, SectionsOfRawFramesFollowTheLayers) {
  const ModelSpec large = SyntheticSpec({{2, 32, 512, 512}}, DType::kFloat32);  // 2 MiB a layer
  const KvGeometry geometry(large);
  const std::vector<std::uint32_t> sizes = RawSectionBytes(geometry);
  std::vector<FrameSection> sections;
  for (const std::uint32_t bytes : sizes) sections.push_back({bytes, 0});
  std::vector<std::byte> head(FrameHeaderBytes(sections.size()));
  WriteFrameHeader(
      {.model = large.Digest(), .raw_bytes = geometry.raw_block_bytes(), .sections = sections},
      head);
  const auto layers = LayersOfSections(FrameView::Parse(head).value(), geometry);
  ASSERT_TRUE(layers.ok()) << layers.status();
  EXPECT_THAT(*layers, testing::ElementsAre(0, 1, 1, 2));
}

TEST_F(SectionLayersTest, OthersAreWholeOrNothing) {
  const BlockToEncode block = Block();
  const auto frame = FrameCodec(spec_, nullptr).Encode({&block, 1}, Quality::kExact);
  const FrameView view = FrameView::Parse((*frame)[0].bytes).value();
  ASSERT_GT(view.section_count(), 1u);
  const auto layers = LayersOfSections(view, geometry_);
  ASSERT_TRUE(layers.ok()) << layers.status();
  EXPECT_EQ((*layers)[layers->size() - 2], 0u);
  EXPECT_EQ(layers->back(), geometry_.layer_count());
}

TEST_F(SectionLayersTest, ATableThatIsNoneIsDamage) {
  const BlockToEncode block = Block();
  auto frame = FrameCodec(spec_, codec_).Encode({&block, 1}, Quality::kHigh).value()[0].bytes;
  const FrameView view = FrameView::Parse(frame).value();
  const std::size_t count_at = view.header_bytes() + kFrameBindingBytes + 4;
  const auto expect_damage = [&](std::size_t at, std::uint16_t value) {
    const auto before = LoadLittle<std::uint16_t>(frame.data() + at);
    StoreLittle(frame.data() + at, value);
    EXPECT_TRUE(absl::IsDataLoss(LayersOfSections(view, geometry_).status())) << at;
    StoreLittle(frame.data() + at, before);
    EXPECT_TRUE(LayersOfSections(view, geometry_).ok());
  };
  const std::size_t last_at = count_at + 2 * view.section_count();
  expect_damage(count_at, 1);
  expect_damage(count_at + 2, 13);
  expect_damage(last_at, 11);
  expect_damage(last_at, 13);
  expect_damage(last_at - 2, 13);
}

}  // namespace
}  // namespace kvtrie
