#include "storage/codec/residual_codec.h"

#include <limits>
#include <string>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/frame.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> DecodeOne(const ResidualCodec& codec, const CodedText& coded,
                                 std::size_t block, Quality quality) {
  std::vector<std::byte> raw(coded.raw[block].size(), std::byte{0xAA});
  const BlockToDecode to_decode = coded.ToDecode(block, quality, raw);
  const absl::Status status = codec.Decode({&to_decode, 1});
  EXPECT_TRUE(status.ok()) << status;
  return raw;
}

std::size_t IndexOf(const ResidualProfile& profile, Quality quality) {
  std::size_t level = 0;
  while (profile.levels[level].quality != quality) ++level;
  return level;
}

// Every block of a new text comes back within the bound, alone and together with the others.
void ExpectRoundTrip(const ModelSpec& spec, const ResidualProfile& profile, Quality quality,
                     float amplitude = 1, std::uint32_t token_count = 40) {
  const auto codec = MakeCodec(spec, profile);
  ASSERT_NE(codec, nullptr);
  const SyntheticText text = MakeText(spec, token_count, 99, amplitude);
  const CodedText coded = EncodeText(*codec, spec, text, quality);
  ASSERT_EQ(coded.encoded.size(), token_count / spec.block_tokens);
  ASSERT_FALSE(coded.encoded.empty());

  std::vector<std::vector<std::byte>> together;
  std::vector<BlockToDecode> to_decode;
  for (const auto& raw : coded.raw) together.emplace_back(raw.size(), std::byte{0xAA});
  for (std::size_t b = 0; b < coded.raw.size(); ++b) {
    const EncodedBlock& encoded = coded.encoded[b];
    ASSERT_FALSE(encoded.body.empty()) << "block " << b << ": " << encoded.exact_tokens;
    ASSERT_LE(encoded.exact_tokens, b == 0 ? 1u : 0u) << "block " << b;
    std::size_t bytes = 0;
    for (const std::uint32_t section : encoded.section_bytes) bytes += section;
    EXPECT_EQ(bytes, encoded.body.size());
    const FrameBinding binding = ReadFrameBinding(encoded.body);
    EXPECT_EQ(binding.profile, codec->id());
    EXPECT_EQ(binding.first_position, b * spec.block_tokens);
    to_decode.push_back(coded.ToDecode(b, quality, together[b]));
  }
  const absl::Status status = codec->Decode(to_decode);
  ASSERT_TRUE(status.ok()) << status;
  for (std::size_t b = 0; b < coded.raw.size(); ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    EXPECT_EQ(together[b], DecodeOne(*codec, coded, b, quality));
    // The first token comes from the profile or bit for bit; other tests look at it.
    const std::vector<std::size_t> skip(b == 0 ? 1 : 0, 0);
    ExpectWithinBound(spec, profile, IndexOf(profile, quality), coded.raw[b], together[b], skip);
    if (testing::Test::HasFatalFailure()) return;

    const auto alone = codec->Encode({&coded.blocks[b], 1}, quality);
    ASSERT_TRUE(alone.ok());
    EXPECT_EQ((*alone)[0].body, coded.encoded[b].body) << "alone it has the same bytes";
    EXPECT_EQ((*alone)[0].section_bytes, coded.encoded[b].section_bytes);
  }
}

TEST(ResidualCodecTest, EveryBlockSizeAndQualityComesBackWithinTheStep) {
  const ResidualProfile profile = FitSynthetic(SyntheticSpec());
  for (const std::uint32_t block_tokens : {1, 5, 16, 17, 64}) {
    for (const Quality quality : {Quality::kHigh, Quality::kNearExact, Quality::kSmall}) {
      SCOPED_TRACE(std::to_string(block_tokens) + " tokens, quality " +
                   std::to_string(static_cast<int>(quality)));
      ExpectRoundTrip(WithBlocks(SyntheticSpec(), block_tokens), profile, quality, 1,
                      block_tokens == 64 ? 128 : 40);
    }
  }
}

// The bound of each value itself, where the one above bounds sums of them.
TEST(ResidualCodecTest, ErrorInTheMetricIsAtMostAStepAndAnOffset) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 64);
  const ResidualProfile profile = FitSynthetic(spec);
  const auto codec = MakeCodec(spec, profile);
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 128, 99), Quality::kHigh);
  const std::vector<std::byte> decoded = DecodeOne(*codec, coded, 1, Quality::kHigh);
  const RawKv raw_kv(KvGeometry(spec), spec.rope);
  const RopeAngles angles = raw_kv.AnglesAt(64);
  double sum = 0, count = 0;
  for (std::uint32_t p = 0; p < profile.planes.size(); ++p) {
    const PlaneShape& shape = profile.planes[p];
    const KvKind kind = shape.is_v ? KvKind::kV : KvKind::kK;
    std::vector<float> from(64 * shape.components()), to(from.size());
    raw_kv.ReadRows(coded.raw[1], shape.layer, kind, angles, from);
    raw_kv.ReadRows(decoded, shape.layer, kind, angles, to);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] -= to[i];
    const PlaneTransform transform(profile, p);
    std::vector<float> errors(64 * shape.components());
    transform.Analyze(from, errors);
    for (const float error : errors) {
      EXPECT_LE(std::abs(error), ValueBound(profile, 0)) << p;
      sum += double{error} * error;
      ++count;
    }
  }
  // Values that are dense in steps err evenly by half a step: a root of 1/12. Rate costs some.
  const double step = profile.levels[0].step;
  EXPECT_GT(std::sqrt(sum / count), 0.2 * step);
  EXPECT_LT(std::sqrt(sum / count), 0.45 * step);
}

TEST(ResidualCodecTest, FinerQualitiesTakeMoreBytes) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 64);
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  const SyntheticText text = MakeText(spec, 64, 99);
  const auto bytes = [&](Quality quality) {
    return EncodeText(*codec, spec, text, quality).encoded[0].body.size();
  };
  EXPECT_LT(bytes(Quality::kSmall), bytes(Quality::kHigh));
  EXPECT_LT(bytes(Quality::kHigh), bytes(Quality::kNearExact));
  EXPECT_LT(bytes(Quality::kNearExact), KvGeometry(spec).raw_block_bytes() / 2);
}

TEST(ResidualCodecTest, ShapesOfModelsComeBack) {
  const struct {
    const char* name;
    std::vector<LayerRun> runs;
    bool block_per_head;
  } kShapes[] = {
      {"every head its own K", {{3, 4, 4, 4}}, false},
      {"every head its own K, in blocks", {{3, 4, 4, 4}}, true},
      {"K wider than V", {{3, 2, 12, 8}}, false},
      {"K wider than V, in blocks", {{3, 2, 12, 8}}, true},
      {"one latent and no V", {{3, 1, 20, 0}}, false},
      {"layers that differ", {{1, 2, 8, 8}, {2, 4, 4, 6}, {1, 2, 16, 8}}, false},
      {"layers with V between layers without", {{1, 1, 8, 0}, {2, 1, 8, 4}, {1, 1, 8, 0}}, false},
      {"heads of one dimension", {{3, 3, 1, 1}}, true},
      {"heads of three dimensions", {{3, 2, 3, 3}}, false},
      {"one layer of one number", {{1, 1, 1, 1}}, false},
      {"more layers than one plane remembers", {{9, 1, 4, 4}}, false},
  };
  for (const auto& shape : kShapes) {
    SCOPED_TRACE(shape.name);
    ModelSpec spec = SyntheticSpec(shape.runs);
    ResidualFitOptions options = SmallFitOptions();
    options.block_per_head = shape.block_per_head;
    // An odd dimension has no pairs to rotate.
    ExpectRoundTrip(spec, FitSynthetic(spec, options), Quality::kHigh);
    if (HasFatalFailure()) return;
  }
}

TEST(ResidualCodecTest, LargestHeadsComeBack) {
  ModelSpec spec = SyntheticSpec({{2, 1, 576, 0}});
  spec.rope.rotary_dims = 64;
  ExpectRoundTrip(spec, PlainProfile(spec), Quality::kHigh, 1, 40);
}

TEST(ResidualCodecTest, EveryRopeComesBack) {
  const RopeSpec kRopes[] = {
      {.pairing = RopePairing::kNone, .theta = 0, .rotary_dims = 0, .scaling = {}},
      {.pairing = RopePairing::kHalfSplit, .theta = 5e5, .rotary_dims = 4, .scaling = {}},
      {.pairing = RopePairing::kInterleaved, .theta = 10000, .rotary_dims = 0, .scaling = {}},
      {.pairing = RopePairing::kInterleaved, .theta = 10000, .rotary_dims = 6, .scaling = {}},
      // K cannot be un-rotated: it is coded as it is.
      {.pairing = RopePairing::kHalfSplit, .theta = 10000, .rotary_dims = 0, .scaling = "yarn"},
  };
  for (const RopeSpec& rope : kRopes) {
    SCOPED_TRACE(std::to_string(static_cast<int>(rope.pairing)) + " " +
                 std::to_string(rope.rotary_dims) + rope.scaling);
    ModelSpec spec = SyntheticSpec();
    spec.rope = rope;
    ExpectRoundTrip(spec, FitSynthetic(spec), Quality::kHigh);
    if (HasFatalFailure()) return;
  }
}

// A profile of one dtype fits all: it knows rows of float32.
TEST(ResidualCodecTest, EveryDTypeComesBackWithinItsRounding) {
  const ResidualProfile profile = FitSynthetic(SyntheticSpec());
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat8E4m3,
                            DType::kFloat8E5m2}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    ExpectRoundTrip(SyntheticSpec({{4, 2, 8, 8}}, dtype), profile, Quality::kHigh);
    if (HasFatalFailure()) return;
  }
}

TEST(ResidualCodecTest, IntegersComeBackWithinTheirRounding) {
  ModelSpec spec = SyntheticSpec({{4, 2, 8, 8}}, DType::kInt8);
  spec.rope = {};
  ExpectRoundTrip(spec, FitSynthetic(spec, SmallFitOptions(), {}, 12), Quality::kHigh, 12);
}

TEST(ResidualCodecTest, StepExponentsComeBackWithinTheirSteps) {
  const ModelSpec spec = WithBlocks(SyntheticSpec(), 32);
  const std::vector<SyntheticText> texts = FitTexts(spec);
  for (const bool group_per_head : {false, true}) {
    SCOPED_TRACE(group_per_head);
    ResidualFitOptions options = SmallFitOptions();
    options.block_per_head = group_per_head;
    for (ResidualLevel& level : options.levels) level.importance_strength = 0.5f;
    const FitMaterial material = MakeMaterial(spec, texts, group_per_head);
    const ResidualProfile profile = FitSynthetic(spec, options, material);
    ASSERT_EQ(profile.group_count, group_per_head ? 2u : 1u);
    ExpectRoundTrip(spec, profile, Quality::kHigh, 1, 96);

    // Importance of other tokens: other exponents, and so other bytes.
    ResidualProfile even = profile;
    for (ResidualLevel& level : even.levels) level.importance_strength = 0;
    const SyntheticText text = MakeText(spec, 64, 99);
    EXPECT_NE(EncodeText(*MakeCodec(spec, profile), spec, text, Quality::kHigh).encoded[1].body,
              EncodeText(*MakeCodec(spec, even), spec, text, Quality::kHigh).encoded[1].body);
  }
}

// Each token's error is that of its own step.
TEST(ResidualCodecTest, TheCallersImportanceMakesStepsOfTokens) {
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

TEST(ResidualCodecTest, LayersDecodeWithTheSectionsThatTheyNeed) {
  const ModelSpec spec = WithBlocks(SyntheticSpec({{6, 2, 8, 8}}), 512);
  const auto codec = MakeCodec(spec, PlainProfile(spec));
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 1024, 99), Quality::kHigh);
  const std::vector<std::byte> expected = DecodeOne(*codec, coded, 1, Quality::kHigh);
  const EncodedBlock& encoded = coded.encoded[1];
  ASSERT_GE(encoded.section_bytes.size(), 3u) << "a block with some sections";
  for (std::size_t i = 0; i + 1 < encoded.section_bytes.size(); ++i) {
    EXPECT_GE(encoded.section_bytes[i], 4096u);
  }

  const KvGeometry geometry(spec);
  std::vector<std::byte> arrived(encoded.body.size(), std::byte{0xEE});
  std::vector<std::byte> raw(expected.size(), std::byte{0xAA});
  std::memcpy(arrived.data(), encoded.body.data(), encoded.section_bytes[0]);
  BlockToDecode block = coded.ToDecode(1, Quality::kHigh, raw);
  block.body = arrived;
  auto decoder = ResidualCodec::Decoder::Start(*codec, {&block, 1});
  ASSERT_TRUE(decoder.ok()) << decoder.status();
  EXPECT_EQ(decoder->LayersIn(0, 0), 0u);
  EXPECT_EQ(decoder->LayersIn(0, encoded.section_bytes.size()), 6u);
  std::size_t at = encoded.section_bytes[0];
  for (std::size_t sections = 1; sections <= encoded.section_bytes.size(); ++sections) {
    if (sections > 1) {
      const std::size_t bytes = encoded.section_bytes[sections - 1];
      std::memcpy(arrived.data() + at, encoded.body.data() + at, bytes);
      at += bytes;
    }
    const std::uint32_t layers = decoder->LayersIn(0, sections);
    ASSERT_GE(layers, decoder->decoded_layers());
    while (decoder->decoded_layers() < layers) {
      const absl::Status status = decoder->DecodeLayer();
      ASSERT_TRUE(status.ok()) << status << " with " << sections << " sections";
    }
    const std::size_t bytes = layers == 0 ? 0 : geometry.layer_end(layers - 1);
    EXPECT_TRUE(
        std::equal(raw.begin(), raw.begin() + static_cast<std::ptrdiff_t>(bytes), expected.begin()))
        << sections;
    EXPECT_TRUE(std::all_of(raw.begin() + static_cast<std::ptrdiff_t>(bytes), raw.end(),
                            [](std::byte b) { return b == std::byte{0xAA}; }))
        << "later layers are not touched";
  }
  EXPECT_EQ(decoder->decoded_layers(), 6u);
}

// Matrix products are not theirs: all sets have the same inputs here, so all results are equal.
TEST(ResidualCodecTest, EveryKernelSetWritesAndReadsTheSame) {
  const ModelSpec spec = WithBlocks(SyntheticSpec({{4, 2, 8, 8}}, DType::kBfloat16), 17);
  const std::vector<SyntheticText> texts = FitTexts(spec);
  ResidualFitOptions options = SmallFitOptions();
  options.block_per_head = true;
  for (ResidualLevel& level : options.levels) level.importance_strength = 0.5f;
  const auto codec = MakeCodec(spec, FitSynthetic(spec, options, MakeMaterial(spec, texts, true)));
  SyntheticText text = MakeText(spec, 68, 99);
  // Something to escape.
  for (std::size_t i = 3; i < text.raw.size(); i += 1001) text.raw[i] ^= std::byte{0x07};
  std::vector<std::vector<std::byte>> bodies, raws;
  WithEachKernelSet([&] {
    for (const Quality quality : {Quality::kHigh, Quality::kNearExact}) {
      const CodedText coded = EncodeText(*codec, spec, text, quality);
      for (std::size_t b = 0; b < coded.encoded.size(); ++b) {
        if (coded.encoded[b].body.empty()) continue;
        bodies.push_back(coded.encoded[b].body);
        raws.push_back(DecodeOne(*codec, coded, b, quality));
      }
    }
  });
  std::size_t sets = 0;
  for (const KernelSet set : kKernelSets) sets += HasKernelSet(set) ? 1 : 0;
  ASSERT_EQ(bodies.size() % sets, 0u);
  ASSERT_GE(bodies.size() / sets, 4u);
  const std::size_t of_a_set = bodies.size() / sets;
  for (std::size_t i = of_a_set; i < bodies.size(); ++i) {
    EXPECT_EQ(bodies[i], bodies[i % of_a_set]) << i;
    EXPECT_EQ(raws[i], raws[i % of_a_set]) << i;
  }
}

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

struct Damageable {
  ModelSpec spec = SyntheticSpec({{2, 2, 4, 4}}, DType::kBfloat16);
  std::unique_ptr<const ResidualCodec> codec = MakeCodec(spec, FitSynthetic(spec));
  SyntheticText text = MakeText(spec, 32, 99);
  CodedText coded;
  std::vector<std::byte> raw;

  Damageable() {
    // A token that is kept exact, so that there is all that a body can have.
    StoreLittle(text.raw.data() + 2 * (20 * 8 + 1), std::uint16_t{0x7FC0});
    coded = EncodeText(*codec, spec, text, Quality::kHigh);
    EXPECT_EQ(coded.encoded[1].exact_tokens, 1u);
    raw.resize(coded.raw[1].size());
  }
  const EncodedBlock& encoded(std::size_t block = 1) const { return coded.encoded[block]; }

  absl::Status Decode(std::size_t block, const std::vector<std::byte>& body,
                      const std::vector<std::uint32_t>& section_bytes) {
    BlockToDecode to_decode = coded.ToDecode(block, Quality::kHigh, raw);
    to_decode.body = body;
    to_decode.section_bytes = section_bytes;
    return codec->Decode({&to_decode, 1});
  }
};

TEST(ResidualDamageTest, EveryTruncationIsDamage) {
  Damageable of;
  for (std::size_t block = 0; block < 2; ++block) {
    const EncodedBlock& encoded = of.encoded(block);
    ASSERT_TRUE(of.Decode(block, encoded.body, encoded.section_bytes).ok());
    for (std::size_t length = 0; length < encoded.body.size(); ++length) {
      // A copy, so that a sanitizer sees a read past its end.
      const std::vector<std::byte> cut(encoded.body.begin(),
                                       encoded.body.begin() + static_cast<std::ptrdiff_t>(length));
      const absl::Status status = of.Decode(block, cut, {static_cast<std::uint32_t>(length)});
      EXPECT_TRUE(absl::IsDataLoss(status)) << length << status;
    }
  }
}

TEST(ResidualDamageTest, LongerBodiesAreDamage) {
  Damageable of;
  for (const std::size_t more : {1, 2, 3, 64}) {
    std::vector<std::byte> longer = of.encoded().body;
    longer.resize(longer.size() + more);
    EXPECT_TRUE(
        absl::IsDataLoss(of.Decode(1, longer, {static_cast<std::uint32_t>(longer.size())})));
  }
}

TEST(ResidualDamageTest, BitFlipsAreFoundOrDecodeToSomething) {
  Damageable of;
  for (std::size_t block = 0; block < 2; ++block) {
    const EncodedBlock& encoded = of.encoded(block);
    const std::size_t entropy_begin = encoded.body.size() - 64;
    std::size_t undetected = 0;
    for (std::size_t bit = 0; bit < encoded.body.size() * 8; ++bit) {
      std::vector<std::byte> damaged = encoded.body;
      damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      const absl::Status status = of.Decode(block, damaged, encoded.section_bytes);
      EXPECT_TRUE(status.ok() || absl::IsDataLoss(status) || absl::IsInvalidArgument(status))
          << status;
      // Tokens and profile of the binding.
      const bool is_binding = bit / 8 >= 4 && bit / 8 < 24;
      EXPECT_TRUE(!is_binding || absl::IsInvalidArgument(status)) << bit;
      if (bit / 8 >= entropy_begin && status.ok()) ++undetected;
    }
    EXPECT_EQ(undetected, 0u) << "the coder's states end where they should only by chance";
  }
}

TEST(ResidualDamageTest, NoiseIsFoundOrDecodesToSomething) {
  Damageable of;
  TestRandom random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> noise = of.encoded().body;
    // Behind the binding, or behind the head as well.
    const std::size_t from = round % 2 == 0 ? 24 : 34;
    for (std::size_t i = from; i < noise.size(); ++i) {
      noise[i] = static_cast<std::byte>(random.Below(256));
    }
    const absl::Status status = of.Decode(1, noise, of.encoded().section_bytes);
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
  }
}

// Fields of the head, one by one: behind the binding come flags, 0, exact tokens (u16), sections
// (u16), layers of each section, exact tokens.
TEST(ResidualDamageTest, EveryFieldOfTheHeadIsChecked) {
  Damageable of;
  ASSERT_EQ(of.encoded().section_bytes.size(), 1u);
  const auto with = [&](std::size_t offset, std::uint8_t value) {
    std::vector<std::byte> damaged = of.encoded().body;
    EXPECT_NE(damaged[24 + offset], std::byte{value});
    damaged[24 + offset] = std::byte{value};
    return of.Decode(1, damaged, of.encoded().section_bytes);
  };
  EXPECT_TRUE(absl::IsDataLoss(with(0, 2))) << "a flag that there is not";
  EXPECT_TRUE(absl::IsDataLoss(with(0, 1))) << "not a first block";
  EXPECT_TRUE(absl::IsDataLoss(with(1, 1))) << "a zero byte";
  EXPECT_TRUE(absl::IsDataLoss(with(2, 17))) << "more exact tokens than there are";
  EXPECT_TRUE(absl::IsDataLoss(with(2, 0)));
  EXPECT_TRUE(absl::IsDataLoss(with(4, 2))) << "sections that the frame has not";
  EXPECT_TRUE(absl::IsDataLoss(with(4, 0)));
  EXPECT_TRUE(absl::IsDataLoss(with(6, 1))) << "too few layers";
  EXPECT_TRUE(absl::IsDataLoss(with(6, 3))) << "too many layers";
  EXPECT_TRUE(absl::IsDataLoss(with(8, 16))) << "a token behind the block";
}

TEST(ResidualDamageTest, SectionsThatDoNotCoverTheBodyAreDamage) {
  Damageable of;
  const EncodedBlock& encoded = of.encoded();
  const std::uint32_t bytes = encoded.section_bytes[0];
  EXPECT_TRUE(absl::IsDataLoss(of.Decode(1, encoded.body, {bytes - 1})));
  EXPECT_TRUE(absl::IsDataLoss(of.Decode(1, encoded.body, {bytes + 1})));
  EXPECT_TRUE(absl::IsDataLoss(of.Decode(1, encoded.body, {bytes - 1, 1})));
  EXPECT_TRUE(absl::IsDataLoss(of.Decode(1, encoded.body, {8, bytes - 8})));
}

TEST(ResidualDamageTest, OtherTokensOrAnotherProfileAreRefusedByName) {
  Damageable of;
  BlockToDecode block = of.coded.ToDecode(1, Quality::kHigh, of.raw);
  std::vector<TokenId> tokens(block.tokens.begin(), block.tokens.end());
  ++tokens[15];
  block.tokens = tokens;
  EXPECT_TRUE(absl::IsInvalidArgument(of.codec->Decode({&block, 1})));

  ProfileId other;
  other.bytes.fill(0xC3);
  auto codec = ResidualCodec::Create(of.spec, other, FitSynthetic(of.spec));
  ASSERT_TRUE(codec.ok());
  block = of.coded.ToDecode(1, Quality::kHigh, of.raw);
  const absl::Status status = (*codec)->Decode({&block, 1});
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(std::string(status.message()).find(SyntheticProfileId().ToHex()), std::string::npos)
      << status << " names the profile that is needed";
}

TEST(ResidualDamageTest, OneDamagedBlockIsFoundAmongOthers) {
  Damageable of;
  std::vector<std::byte> first(of.raw.size());
  std::vector<std::byte> damaged = of.encoded().body;
  damaged[damaged.size() - 3] ^= std::byte{4};
  std::vector<BlockToDecode> blocks = {of.coded.ToDecode(0, Quality::kHigh, first),
                                       of.coded.ToDecode(1, Quality::kHigh, of.raw)};
  EXPECT_TRUE(of.codec->Decode(blocks).ok());
  blocks[1].body = damaged;
  EXPECT_TRUE(absl::IsDataLoss(of.codec->Decode(blocks)));
}

TEST(ResidualCodecTest, ALevelThatTheProfileHasNotIsRefused) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, PlainProfile(spec));
  EXPECT_TRUE(codec->HasLevel(Quality::kHigh));
  EXPECT_FALSE(codec->HasLevel(Quality::kNearExact));
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 32, 99), Quality::kHigh);
  EXPECT_TRUE(absl::IsInvalidArgument(codec->Encode(coded.blocks, Quality::kNearExact).status()));
  std::vector<std::byte> raw(coded.raw[0].size());
  const BlockToDecode block = coded.ToDecode(0, Quality::kNearExact, raw);
  EXPECT_TRUE(absl::IsDataLoss(codec->Decode({&block, 1})));
}

TEST(ResidualCodecTest, NoBlocksAreFine) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, PlainProfile(spec));
  EXPECT_TRUE(codec->Encode({}, Quality::kHigh).value().empty());
  EXPECT_TRUE(codec->Decode({}).ok());
}

TEST(ResidualCodecTest, AProfileOfAnotherModelIsRefused) {
  const ResidualProfile profile = PlainProfile(SyntheticSpec());
  const auto create = [&](const ModelSpec& spec) {
    return ResidualCodec::Create(spec, SyntheticProfileId(), profile).status();
  };
  EXPECT_TRUE(create(SyntheticSpec()).ok());
  for (const std::vector<LayerRun>& runs : std::vector<std::vector<LayerRun>>{
           {{3, 2, 8, 8}}, {{5, 2, 8, 8}}, {{4, 1, 16, 16}}, {{4, 2, 8, 0}}, {{4, 2, 8, 4}}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(create(SyntheticSpec(runs))));
  }
  ResidualProfile broken = profile;
  broken.plane_profiles[2].bias[0] = kNan;
  EXPECT_TRUE(absl::IsInvalidArgument(
      ResidualCodec::Create(SyntheticSpec(), SyntheticProfileId(), broken).status()));
  broken = profile;
  ++broken.class_frequencies[kSymbolMax];
  EXPECT_TRUE(absl::IsInvalidArgument(
      ResidualCodec::Create(SyntheticSpec(), SyntheticProfileId(), broken).status()));
  broken = profile;
  broken.exponent_frequencies.assign(std::size_t{256} * kExponentSymbols, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(
      ResidualCodec::Create(SyntheticSpec(), SyntheticProfileId(), broken).status()));
}

}  // namespace
}  // namespace kvtrie
