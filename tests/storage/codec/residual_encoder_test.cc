#include <limits>
#include <string>

#include "storage/base/byte_order.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A block of 16 tokens, not the first of its session, whose raw KV a test changes.
class ExtremeBlock {
 public:
  explicit ExtremeBlock(DType dtype = DType::kFloat32, std::uint32_t block_tokens = 16)
      : spec_(WithBlocks(SyntheticSpec({{4, 2, 8, 8}}, dtype), block_tokens)),
        profile_(FitSynthetic(spec_)),
        codec_(MakeCodec(spec_, profile_)),
        text_(MakeText(spec_, 2 * block_tokens, 99)),
        raw_(CutBlock(spec_, text_, block_tokens)) {}

  // The bytes of one component of one token.
  std::byte* At(std::uint32_t layer, KvKind kind, std::uint32_t token, std::uint32_t component) {
    const KvGeometry geometry(spec_);
    const std::size_t component_bytes = DTypeBytes(spec_.dtype);
    return raw_.data() + geometry.kind_begin(layer, kind) +
           (token * geometry.row_components(layer, kind) + component) * component_bytes;
  }
  void Set(std::uint32_t layer, KvKind kind, std::uint32_t token, std::uint32_t component,
           float value) {
    if (spec_.dtype == DType::kFloat32) {
      StoreLittle(At(layer, kind, token, component), value);
    } else {
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      StoreLittle(At(layer, kind, token, component), static_cast<std::uint16_t>(bits >> 16));
    }
  }

  // Makes the last value of a plane, which carries least, one that no level codes.
  void DropLastValue(std::uint32_t plane) {
    for (auto& scales : profile_.plane_profiles[plane].scales) scales.back() = kNotCoded;
    codec_ = MakeCodec(spec_, profile_);
  }

  // Encodes and decodes; tokens of `exact` come back bit for bit and are counted, all others
  // within the bound.
  void ExpectExact(const std::vector<std::size_t>& exact) {
    std::vector<std::byte> decoded;
    ASSERT_NO_FATAL_FAILURE(ExpectKept(exact, decoded));
    ExpectWithinBound(spec_, profile_, 0, raw_, decoded, exact);
  }

  // The same without the bound.
  void ExpectKept(const std::vector<std::size_t>& exact, std::vector<std::byte>& decoded) {
    ASSERT_NO_FATAL_FAILURE(Encode());
    ASSERT_FALSE(encoded_.body.empty());
    EXPECT_EQ(encoded_.exact_tokens, exact.size());
    decoded = Decode();
    for (const std::size_t token : exact) {
      EXPECT_EQ(BytesOfToken(spec_, raw_, token), BytesOfToken(spec_, decoded, token)) << token;
    }
  }

  void Encode() {
    const BlockToEncode block = {.first_position = spec_.block_tokens,
                                 .session_tokens = 2 * spec_.block_tokens,
                                 .tokens = tokens(),
                                 .raw = raw_};
    auto encoded = codec_->Encode({&block, 1}, Quality::kHigh);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    encoded_ = std::move((*encoded)[0]);
  }
  std::vector<std::byte> Decode() {
    std::vector<std::byte> decoded(raw_.size(), std::byte{0xAA});
    const BlockToDecode block = {.body = encoded_.body,
                                 .section_bytes = encoded_.section_bytes,
                                 .quality = Quality::kHigh,
                                 .tokens = tokens(),
                                 .raw = decoded};
    const absl::Status status = codec_->Decode({&block, 1});
    EXPECT_TRUE(status.ok()) << status;
    return decoded;
  }

  const EncodedBlock& encoded() const { return encoded_; }
  std::vector<std::byte>& raw() { return raw_; }
  std::span<const TokenId> tokens() const {
    return std::span(text_.tokens).subspan(spec_.block_tokens);
  }
  const ModelSpec& spec() const { return spec_; }

 private:
  ModelSpec spec_;
  ResidualProfile profile_;
  std::unique_ptr<const ResidualCodec> codec_;
  SyntheticText text_;
  std::vector<std::byte> raw_;
  EncodedBlock encoded_;
};

TEST(ResidualExtremesTest, WhatIsNotFiniteComesBackBitForBit) {
  ExtremeBlock block;
  block.Set(0, KvKind::kK, 3, 2, kNan);
  block.Set(2, KvKind::kV, 5, 15, kInfinity);
  block.Set(3, KvKind::kK, 15, 0, -kInfinity);
  block.ExpectExact({3, 5, 15});
}

TEST(ResidualExtremesTest, ThePayloadOfANanIsKept) {
  ExtremeBlock block;
  StoreLittle(block.At(1, KvKind::kV, 7, 3), std::uint32_t{0xFFC12345});
  block.ExpectExact({7});
}

TEST(ResidualExtremesTest, ValuesBeyondAllRangeComeBackBitForBit) {
  ExtremeBlock block;
  block.Set(1, KvKind::kK, 0, 4, 1e38f);
  block.Set(1, KvKind::kK, 1, 4, -0x1p50f);
  block.ExpectExact({0, 1});
}

TEST(ResidualExtremesTest, ALargeBfloat16ComesBackBitForBit) {
  ExtremeBlock block(DType::kBfloat16);
  block.Set(3, KvKind::kV, 9, 1, 1e38f);
  block.ExpectExact({9});
}

// What is found out of range only when it is quantized, in the last layer and in the first.
TEST(ResidualExtremesTest, ResidualsBeyondTheirRangeComeBackBitForBit) {
  ExtremeBlock block;
  block.Set(3, KvKind::kV, 2, 0, 1e12f);
  block.Set(0, KvKind::kK, 11, 0, -1e14f);
  block.ExpectExact({2, 11});
}

TEST(ResidualExtremesTest, WhatALevelDoesNotCodeComesBackBitForBitWhereItIsLarge) {
  ExtremeBlock block;
  std::vector<std::byte> decoded;
  block.DropLastValue(7);
  block.ExpectKept({}, decoded);
  for (std::uint32_t c = 0; c < 16; ++c) block.Set(3, KvKind::kV, 6, c, c % 2 == 0 ? 900 : -500);
  block.ExpectKept({6}, decoded);
}

TEST(ResidualExtremesTest, LargeTokensComeBackAndTheirNeighboursDoNotSuffer) {
  ExtremeBlock block;
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
      for (std::uint32_t c = 0; c < 16; ++c) {
        float value;
        std::memcpy(&value, block.At(layer, kind, 6, c), sizeof value);
        block.Set(layer, kind, 6, c, 1e6f * value);
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(block.Encode());
  block.ExpectExact(block.encoded().exact_tokens == 0 ? std::vector<std::size_t>{}
                                                      : std::vector<std::size_t>{6});
}

TEST(ResidualExtremesTest, ZerosConstantsAndSubnormalsStayWithinTheBound) {
  ExtremeBlock block;
  std::fill(block.raw().begin(), block.raw().end(), std::byte{0});
  block.ExpectExact({});
  for (std::uint32_t t = 0; t < 16; ++t) block.Set(1, KvKind::kV, t, 5, 17.25f);
  block.ExpectExact({});
  for (std::uint32_t t = 0; t < 16; ++t) block.Set(2, KvKind::kK, t, 7, 1e-40f);
  block.ExpectExact({});
}

TEST(ResidualExtremesTest, AQuarterOfABlockMayBeExactAndNoMore) {
  ExtremeBlock block;
  for (const std::uint32_t token : {1, 4, 8, 15}) block.Set(0, KvKind::kV, token, 0, kNan);
  block.ExpectExact({1, 4, 8, 15});
  block.Set(0, KvKind::kV, 9, 0, kNan);
  ASSERT_NO_FATAL_FAILURE(block.Encode());
  EXPECT_TRUE(block.encoded().body.empty());
  EXPECT_TRUE(block.encoded().section_bytes.empty());
  EXPECT_EQ(block.encoded().exact_tokens, 5u);
}

TEST(ResidualExtremesTest, ABlockOfOneTokenMayBeExact) {
  ExtremeBlock block(DType::kFloat32, 1);
  block.Set(3, KvKind::kK, 0, 0, kNan);
  block.ExpectExact({0});
}

TEST(ResidualExtremesTest, ABlockOfNoiseGivesAnEmptyBody) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    ExtremeBlock block(DType::kBfloat16);
    TestRandom random(seed);
    for (std::byte& byte : block.raw()) byte = static_cast<std::byte>(random.Below(256));
    ASSERT_NO_FATAL_FAILURE(block.Encode());
    EXPECT_TRUE(block.encoded().body.empty()) << "bits of noise are of all magnitudes";
    EXPECT_GT(block.encoded().exact_tokens, 4u);
  }
}

// A basis that cannot be inverted has no values for a row: everything is exact then.
TEST(ResidualExtremesTest, ASingularBasisGivesAnEmptyBody) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 16);
  ResidualProfile profile = PlainProfile(spec);
  std::fill_n(profile.plane_profiles[3].basis.begin(), 32, std::int8_t{0});
  const auto codec = MakeCodec(spec, profile);
  ASSERT_NE(codec, nullptr);
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 32, 99), Quality::kHigh);
  EXPECT_TRUE(coded.encoded[1].body.empty());
  EXPECT_GT(coded.encoded[1].exact_tokens, 4u);
}

// An extreme block must not change what is coded beside it.
TEST(ResidualExtremesTest, OtherBlocksOfTheCallKeepTheirBytes) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 64, 99), Quality::kHigh);
  std::vector<BlockToEncode> blocks = coded.blocks;
  std::vector<std::byte> noise = coded.raw[1];
  TestRandom random(3);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random.Below(256));
  blocks[1].raw = noise;
  const auto encoded = codec->Encode(blocks, Quality::kHigh);
  ASSERT_TRUE(encoded.ok());
  EXPECT_TRUE((*encoded)[1].body.empty());
  for (const std::size_t b : {0u, 2u, 3u}) EXPECT_EQ((*encoded)[b].body, coded.encoded[b].body);
}

TEST(ResidualFirstTokenTest, IsTheProfilesWhereItIsTheSame) {
  const ModelSpec spec = SyntheticSpec();
  const ResidualProfile profile = FitSynthetic(spec);
  ASSERT_TRUE(profile.has_first_token);
  EXPECT_EQ(profile.first_token, kFirstTokenOfTexts);
  const auto codec = MakeCodec(spec, profile);
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 16, 99), Quality::kHigh);
  EXPECT_EQ(coded.encoded[0].exact_tokens, 0u);
  const std::vector<std::byte> decoded = DecodeOne(*codec, coded, 0, Quality::kHigh);
  // The mean of equal numbers: a rounding of float32 off.
  const auto from = ValuesOf(spec, coded.raw[0]), to = ValuesOf(spec, decoded);
  for (std::size_t p = 0; p < from.size(); ++p) {
    for (std::size_t c = 0; c < 16; ++c) EXPECT_NEAR(from[p][c], to[p][c], 1e-5) << p << " " << c;
  }
}

TEST(ResidualFirstTokenTest, IsExactWhereItDiffersOrTheProfileHasNone) {
  const ModelSpec spec = SyntheticSpec();
  const ResidualProfile profile = FitSynthetic(spec);
  ResidualProfile without = profile;
  without.has_first_token = false;
  without.first_rows.clear();

  SyntheticText text = MakeText(spec, 16, 99);
  const auto expect_exact = [&](const ResidualProfile& of) {
    const auto codec = MakeCodec(spec, of);
    const CodedText coded = EncodeText(*codec, spec, text, Quality::kHigh);
    EXPECT_EQ(coded.encoded[0].exact_tokens, 1u);
    EXPECT_EQ(BytesOfToken(spec, DecodeOne(*codec, coded, 0, Quality::kHigh), 0),
              BytesOfToken(spec, coded.raw[0], 0));
  };
  expect_exact(without);
  text.tokens[0] = 5;
  expect_exact(profile);
  text.tokens[0] = kFirstTokenOfTexts;
  // Another value in one plane: more than roundings of a dtype explain.
  StoreLittle(text.raw.data() + KvGeometry(spec).kind_begin(2, KvKind::kV), 25.0f);
  expect_exact(profile);
}

TEST(ResidualFirstTokenTest, IsAnOrdinaryTokenElsewhere) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  SyntheticText text = MakeText(spec, 32, 99);
  text.tokens[16] = kFirstTokenOfTexts;
  const CodedText coded = EncodeText(*codec, spec, text, Quality::kHigh);
  EXPECT_EQ(coded.encoded[1].exact_tokens, 0u);
  DecodeOne(*codec, coded, 1, Quality::kHigh);
}

// Each token's error is that of its own step.
TEST(ResidualImportanceTest, TheCallersImportanceMakesStepsOfTokens) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 16);
  const std::vector<SyntheticText> texts = FitTexts(spec);
  ResidualFitOptions options = SmallFitOptions();
  for (ResidualLevel& level : options.levels) level.importance_strength = 1;
  const auto codec = MakeCodec(spec, FitSynthetic(spec, options, MakeMaterial(spec, texts, false)));
  const SyntheticText text = MakeText(spec, 32, 99);
  CodedText coded = EncodeText(*codec, spec, text, Quality::kHigh);
  std::vector<float> importance(16, 1);
  const auto encode = [&] {
    coded.blocks[1].importance = importance;
    coded.encoded[1] = (*codec->Encode({&coded.blocks[1], 1}, Quality::kHigh))[0];
    return coded.encoded[1].body;
  };
  const auto error_of = [&](std::size_t token) {
    const std::vector<std::vector<float>> exact = ValuesOf(spec, coded.raw[1]);
    const std::vector<std::vector<float>> restored =
        ValuesOf(spec, DecodeOne(*codec, coded, 1, Quality::kHigh));
    double error = 0;
    for (std::size_t p = 0; p < exact.size(); ++p) {
      const std::size_t components = exact[p].size() / 16;
      for (std::size_t c = token * components; c < (token + 1) * components; ++c) {
        error += std::pow(exact[p][c] - restored[p][c], 2);
      }
    }
    return error;
  };
  const std::vector<std::byte> average = encode();
  const double error = error_of(5);
  importance[5] = 16;
  EXPECT_GT(encode().size(), average.size());
  EXPECT_LT(error_of(5), error / 4);
  importance[5] = 1 / 16.0f;
  EXPECT_LT(encode().size(), average.size());
  EXPECT_GT(error_of(5), error * 4);
  for (const float none : {0.0f, -1.0f, kNan}) {
    importance[5] = none;
    EXPECT_EQ(encode(), average);
  }
}
}  // namespace
}  // namespace kvtrie
