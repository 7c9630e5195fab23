// Frames of quality exact, which a profile makes smaller and nothing else.
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "storage/codec/residual_codec.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

ModelSpec Bfloat16Spec(std::uint32_t block_tokens) {
  ModelSpec spec = WithBlocks(SyntheticSpec(), block_tokens);
  spec.dtype = DType::kBfloat16;
  return spec;
}

// Encodes and decodes; blocks whose body is empty are told by the count that comes back.
std::size_t ExpectBitForBit(const ResidualCodec& codec, const ModelSpec& spec,
                            const CodedText& coded) {
  std::size_t given_up = 0;
  for (std::size_t b = 0; b < coded.raw.size(); ++b) {
    if (coded.encoded[b].body.empty()) {
      ++given_up;
      continue;
    }
    std::vector<std::byte> restored(KvGeometry(spec).raw_block_bytes(), std::byte{0xA5});
    const BlockToDecode block = coded.ToDecode(b, Quality::kExact, restored);
    const absl::Status decoded = codec.Decode(std::span(&block, 1));
    EXPECT_TRUE(decoded.ok()) << decoded;
    EXPECT_EQ(std::memcmp(restored.data(), coded.raw[b].data(), restored.size()), 0) << b;
  }
  return given_up;
}

TEST(ResidualExactTest, EveryFloatOf16And8BitsComesBackBitForBit) {
  for (const DType dtype :
       {DType::kFloat16, DType::kBfloat16, DType::kFloat8E4m3, DType::kFloat8E5m2}) {
    for (const std::uint32_t block_tokens : {1u, 5u, 16u, 17u, 64u}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(dtype) << ", " << block_tokens);
      ModelSpec spec = WithBlocks(SyntheticSpec(), block_tokens);
      spec.dtype = dtype;
      const auto codec = MakeCodec(spec, FitSynthetic(spec));
      ASSERT_NE(codec, nullptr);
      const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 128, 77), Quality::kExact);
      EXPECT_EQ(ExpectBitForBit(*codec, spec, coded), 0u);
    }
  }
}

TEST(ResidualExactTest, FittedKvTakesLessThanItsBytes) {
  const ModelSpec spec = Bfloat16Spec(64);
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  ASSERT_NE(codec, nullptr);
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 128, 78), Quality::kExact);
  // The second block has no first token, which is kept as it is.
  EXPECT_LT(coded.encoded[1].body.size() * 4, coded.raw[1].size() * 3);
}

TEST(ResidualExactTest, OtherDTypesHaveNoExactLevel) {
  for (const DType dtype : {DType::kFloat32, DType::kInt8, DType::kUint8}) {
    ModelSpec spec = SyntheticSpec();
    spec.dtype = dtype;
    const auto codec = MakeCodec(spec, PlainProfile(spec));
    ASSERT_NE(codec, nullptr);
    EXPECT_FALSE(codec->HasLevel(Quality::kExact));
  }
}

// All bit patterns of a format, finite or not, signed zeros and subnormals among them.
TEST(ResidualExactTest, EveryBitPatternComesBack) {
  for (const DType dtype :
       {DType::kFloat16, DType::kBfloat16, DType::kFloat8E4m3, DType::kFloat8E5m2}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    ModelSpec spec = WithBlocks(SyntheticSpec(), 64);
    spec.dtype = dtype;
    const auto codec = MakeCodec(spec, PlainProfile(spec));
    ASSERT_NE(codec, nullptr);
    const CodedText plain = EncodeText(*codec, spec, MakeText(spec, 64, 79), Quality::kExact);
    std::size_t number = 0;
    std::size_t given_up = 0, blocks = 0;
    const std::size_t bytes = DTypeBytes(dtype);
    const std::size_t patterns = bytes == 2 ? 65'536 : 256;
    const KvGeometry geometry(spec);
    while (number < patterns) {
      // One token of the block takes the next patterns, so that the others stay what they are.
      std::vector<std::byte> raw = plain.raw[0];
      for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
        for (const KvKind kind : {KvKind::kK, KvKind::kV}) {
          const std::size_t row = geometry.row_components(layer, kind);
          for (std::size_t c = 0; c < row; ++c, ++number) {
            std::byte* const at =
                raw.data() + geometry.kind_begin(layer, kind) + (9 * row + c) * bytes;
            const auto pattern = static_cast<std::uint16_t>(number % patterns);
            std::memcpy(at, &pattern, bytes);
          }
        }
      }
      const BlockToEncode block = {
          .first_position = 640, .session_tokens = 704, .tokens = plain.tokens[0], .raw = raw};
      const auto encoded = codec->Encode(std::span(&block, 1), Quality::kExact);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      CodedText coded;
      coded.raw = {raw};
      coded.tokens = {plain.tokens[0]};
      coded.encoded = *encoded;
      given_up += ExpectBitForBit(*codec, spec, coded);
      ++blocks;
    }
    EXPECT_EQ(given_up, 0u) << "of " << blocks;
  }
}

TEST(ResidualExactTest, EveryKernelSetWritesTheSameBytes) {
  const ModelSpec spec = Bfloat16Spec(17);
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  ASSERT_NE(codec, nullptr);
  const SyntheticText text = MakeText(spec, 68, 80);
  std::vector<std::vector<std::byte>> bodies;
  WithEachKernelSet([&] {
    const CodedText coded = EncodeText(*codec, spec, text, Quality::kExact);
    EXPECT_EQ(ExpectBitForBit(*codec, spec, coded), 0u);
    if (bodies.empty()) {
      for (const EncodedBlock& block : coded.encoded) bodies.push_back(block.body);
      return;
    }
    for (std::size_t b = 0; b < bodies.size(); ++b) EXPECT_EQ(coded.encoded[b].body, bodies[b]);
  });
}

TEST(ResidualExactTest, DamageIsFoundOrDecodesToSomething) {
  const ModelSpec spec = Bfloat16Spec(16);
  const auto codec = MakeCodec(spec, FitSynthetic(spec));
  ASSERT_NE(codec, nullptr);
  const CodedText coded = EncodeText(*codec, spec, MakeText(spec, 32, 81), Quality::kExact);
  const std::vector<std::byte>& body = coded.encoded[1].body;
  std::vector<std::byte> restored(KvGeometry(spec).raw_block_bytes());
  std::size_t found = 0;
  for (std::size_t bit = 24 * 8; bit < body.size() * 8; bit += 3) {
    std::vector<std::byte> damaged = body;
    damaged[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    BlockToDecode block = coded.ToDecode(1, Quality::kExact, restored);
    block.body = damaged;
    const absl::Status status = codec->Decode(std::span(&block, 1));
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    ++found;
  }
  EXPECT_GT(found, body.size() * 2);
}

}  // namespace
}  // namespace kvtrie
