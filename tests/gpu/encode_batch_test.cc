#include "gpu/encode_batch.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

const Shape kShape = {.layers = {{3, 2, 8, 8}},
                      .block_tokens = 32,
                      .dtype = DType::kFloat32,
                      .group_count = 1,
                      .importance = true,
                      .first_token = true};

class EncodeBatchTest : public testing::Test {
 protected:
  void SetNumber(std::size_t block, std::uint32_t layer, KvKind kind, std::size_t token,
                 std::size_t component, float value) {
    const KvGeometry geometry(twin_.spec);
    const std::size_t at = geometry.kind_begin(layer, kind) +
                           (token * geometry.row_components(layer, kind) + component) * 4;
    std::memcpy(blocks_.raw[block].data() + at, &value, sizeof value);
  }

  // Expects the same decisions as the processor's, and returns them.
  std::vector<EncodedBlock> Encode(Quality quality = Quality::kHigh) {
    const auto expected = twin_.codec->Encode(blocks_.to_encode, quality);
    const auto encoded = twin_.coder->Encode(blocks_.to_encode, quality);
    EXPECT_TRUE(expected.ok()) << expected.status();
    EXPECT_TRUE(encoded.ok()) << encoded.status();
    for (std::size_t b = 0; b < expected->size(); ++b) {
      EXPECT_EQ((*encoded)[b].exact_tokens, (*expected)[b].exact_tokens) << b;
      EXPECT_EQ((*encoded)[b].body.empty(), (*expected)[b].body.empty()) << b;
      if ((*encoded)[b].body.empty()) continue;
      // Flags, exact tokens and sections.
      const std::size_t head =
          24 + 6 + 2 * (*expected)[b].section_bytes.size() + 2 * (*expected)[b].exact_tokens;
      EXPECT_TRUE(std::equal((*encoded)[b].body.begin(),
                             (*encoded)[b].body.begin() + static_cast<std::ptrdiff_t>(head),
                             (*expected)[b].body.begin()))
          << b;
    }
    Decoded by_codec(blocks_, *encoded, quality), by_twin(blocks_, *encoded, quality);
    EXPECT_TRUE(twin_.codec->Decode(by_codec.blocks).ok());
    EXPECT_TRUE(twin_.coder->Decode(by_twin.blocks).ok());
    EXPECT_TRUE(by_codec.raw == by_twin.raw);
    return *encoded;
  }

  ResidualProfile profile_ = RandomProfile(kShape, 31);
  Twin twin_{kShape, profile_};
  Blocks blocks_ = RandomBlocks(kShape, profile_, 3, 32);
};

TEST_F(EncodeBatchTest, TheFirstTokenIsTheProfilesWhereItsRowsAre) {
  auto encoded = Encode();
  EXPECT_EQ(encoded[0].body[24], std::byte{1});
  EXPECT_EQ(encoded[0].exact_tokens, 0u);
  EXPECT_EQ(encoded[1].body[24], std::byte{0});

  // Another row, another token, or no number: kept exact.
  SetNumber(0, 1, KvKind::kV, 0, 3, 30);
  encoded = Encode();
  EXPECT_EQ(encoded[0].body[24], std::byte{0});
  EXPECT_EQ(encoded[0].exact_tokens, 1u);
  SetNumber(0, 1, KvKind::kV, 0, 3, NAN);
  EXPECT_EQ(Encode()[0].exact_tokens, 1u);
}

TEST_F(EncodeBatchTest, TokensThatAreNotFiniteAreKept) {
  SetNumber(1, 0, KvKind::kK, 5, 0, INFINITY);
  SetNumber(1, 2, KvKind::kV, 5, 1, NAN);
  SetNumber(1, 1, KvKind::kV, 31, 7, 0x1p50f);
  SetNumber(1, 1, KvKind::kV, 30, 7, 0x1.8p20f);
  const auto encoded = Encode();
  EXPECT_GE(encoded[1].exact_tokens, 2u);
  EXPECT_LE(encoded[1].exact_tokens, 3u);
}

TEST_F(EncodeBatchTest, TokensOutOfRangeAreKept) {
  for (const Quality quality : {Quality::kHigh, Quality::kNearExact, Quality::kSmall}) {
    SetNumber(1, 0, KvKind::kK, 3, 5, 3e7f);
    SetNumber(1, 2, KvKind::kV, 4, 5, -2e8f);
    SetNumber(2, 1, KvKind::kV, 9, 15, 4e9f);
    const auto encoded = Encode(quality);
    EXPECT_GE(encoded[1].exact_tokens, 2u);
    EXPECT_GE(encoded[2].exact_tokens, 1u);
  }
}

TEST_F(EncodeBatchTest, BlocksThatWouldKeepTooMuchAreNotCoded) {
  // By what is not finite; and by what is out of range in one plane after the other.
  for (std::size_t t = 3; t < 12; ++t) SetNumber(1, 0, KvKind::kK, t, 1, NAN);
  for (std::size_t t = 0; t < 20; ++t) {
    SetNumber(2, static_cast<std::uint32_t>(t / 7), KvKind::kV, t, 1, 3e8f);
  }
  const auto encoded = Encode();
  EXPECT_FALSE(encoded[0].body.empty());
  EXPECT_TRUE(encoded[1].body.empty());
  EXPECT_EQ(encoded[1].exact_tokens, 9u);
  EXPECT_TRUE(encoded[2].body.empty());
}

TEST_F(EncodeBatchTest, SymbolsThatATableHasNotFallToTheProcessor) {
  ResidualProfile profile = profile_;
  // Exponents of one table: no change alone.
  std::fill(profile.exponent_frequencies.begin(), profile.exponent_frequencies.end(), 0);
  for (std::size_t table = 0; table < 2; ++table) {
    profile.exponent_frequencies[table * kExponentSymbols + kExponentDeltaMax] = 4096;
  }
  const Twin twin(kShape, profile);
  const auto expected = twin.codec->Encode(blocks_.to_encode, Quality::kHigh);
  const auto encoded = twin.coder->Encode(blocks_.to_encode, Quality::kHigh);
  EXPECT_EQ(encoded.status().code(), expected.status().code());
  EXPECT_FALSE(encoded.ok());
}

TEST_F(EncodeBatchTest, BlocksThatTakeMoreThanTheirRoomFallToTheProcessor) {
  // Every value is an escape, at 37 bits and more.
  ResidualProfile profile = profile_;
  for (PlaneProfile& plane : profile.plane_profiles) {
    std::fill(plane.scales[0].begin(), plane.scales[0].end(), std::uint8_t{0});
  }
  for (ResidualLevel& level : profile.levels) level.step = 1e-4f;
  const Twin twin(kShape, profile);
  const auto expected = twin.codec->Encode(blocks_.to_encode, Quality::kHigh);
  const auto encoded = twin.coder->Encode(blocks_.to_encode, Quality::kHigh);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  ASSERT_GT((*expected)[1].body.size(), blocks_.raw[1].size() / 2) << "more than 16 bits a number";
  for (std::size_t b = 0; b < 3; ++b) {
    EXPECT_TRUE((*encoded)[b].body == (*expected)[b].body) << "the processor's own";
  }
}

TEST_F(EncodeBatchTest, LayersEndWhereTheProcessorsDo) {
  // Sections of several layers.
  const Shape shape = {.layers = {{8, 4, 32, 32}}, .block_tokens = 64, .block_per_head = true};
  const ResidualProfile profile = RandomProfile(shape, 33);
  const Twin twin(shape, profile);
  const Blocks blocks = RandomBlocks(shape, profile, 2, 34);
  const auto expected = twin.codec->Encode(blocks.to_encode, Quality::kHigh);
  const auto encoded = twin.coder->Encode(blocks.to_encode, Quality::kHigh);
  ASSERT_TRUE(expected.ok() && encoded.ok());
  for (std::size_t b = 0; b < 2; ++b) {
    ASSERT_GE((*expected)[b].section_bytes.size(), 4u);
    ASSERT_EQ((*encoded)[b].section_bytes.size(), (*expected)[b].section_bytes.size());
    for (std::size_t s = 0; s < (*expected)[b].section_bytes.size(); ++s) {
      EXPECT_NEAR((*encoded)[b].section_bytes[s], (*expected)[b].section_bytes[s], 64);
    }
    // They are what a reader of layers needs.
    std::vector<std::byte> raw(blocks.raw[b].size());
    const BlockToDecode block = {.body = (*encoded)[b].body,
                                 .section_bytes = (*encoded)[b].section_bytes,
                                 .quality = Quality::kHigh,
                                 .tokens = blocks.tokens[b],
                                 .raw = raw};
    std::vector<std::byte> arrived((*encoded)[b].body.size(), std::byte{0xEE});
    BlockToDecode partial = block;
    partial.body = arrived;
    std::copy_n((*encoded)[b].body.begin(), (*encoded)[b].section_bytes[0], arrived.begin());
    auto decoder = ResidualCodec::Decoder::Start(*twin.codec, {&partial, 1});
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    std::size_t at = (*encoded)[b].section_bytes[0];
    for (std::size_t s = 1; s <= (*encoded)[b].section_bytes.size(); ++s) {
      while (decoder->decoded_layers() < decoder->LayersIn(0, s)) {
        ASSERT_TRUE(decoder->DecodeLayer().ok());
      }
      if (s == (*encoded)[b].section_bytes.size()) break;
      const std::size_t bytes = (*encoded)[b].section_bytes[s];
      std::copy_n((*encoded)[b].body.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                  arrived.begin() + static_cast<std::ptrdiff_t>(at));
      at += bytes;
    }
    EXPECT_EQ(decoder->decoded_layers(), 8u);
  }
}

}  // namespace
}  // namespace kvtrie::gpu
