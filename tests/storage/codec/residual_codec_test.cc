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
    std::vector<float> from(64 * shape.components()), to(from.size());
    raw_kv.ReadRows(coded.raw[1], shape.layer, shape.kind(), angles, from);
    raw_kv.ReadRows(decoded, shape.layer, shape.kind(), angles, to);
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
