#include <string>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"
#include "storage/codec/frame.h"
#include "tests/storage/codec/residual_fixture.h"

namespace kvtrie {
namespace {

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

TEST(ResidualDecoderTest, LayersDecodeWithTheSectionsThatTheyNeed) {
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
}  // namespace
}  // namespace kvtrie
