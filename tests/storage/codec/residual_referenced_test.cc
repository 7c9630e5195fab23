// Blocks that are coded against others (REFERENCED.md).
#include <functional>
#include <limits>
#include <set>
#include <string>

#include "storage/base/byte_order.h"
#include "storage/codec/frame.h"
#include "storage/codec/residual_codec.h"
#include "tests/storage/codec/kernel_sets.h"
#include "tests/storage/codec/shared_text.h"

namespace kvtrie {
namespace {

constexpr float kNoise = 0.03f;

ResidualProfile ProfileOf(const ModelSpec& spec) {
  return WithDifferences(PlainProfile(spec), spec);
}

// 20 tokens of their own, then 60 of the other text from token 13 on, then 16 of their own.
SyntheticText Other(const ModelSpec& spec) { return MakeText(spec, 96, 5); }
SyntheticText Text(const ModelSpec& spec, float noise = kNoise) {
  return ShareTokens(spec, Other(spec), 13, 60, 20, 96, 6, noise);
}

std::vector<EncodedBlock> Encode(const ResidualCodec& codec, std::span<const BlockToEncode> blocks,
                                 Quality quality = Quality::kHigh) {
  auto encoded = codec.Encode(blocks, quality);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  return encoded.ok() ? *std::move(encoded) : std::vector<EncodedBlock>(blocks.size());
}

std::vector<std::vector<std::byte>> Decode(const ResidualCodec& codec, const SharedBlocks& of,
                                           std::span<const EncodedBlock> encoded,
                                           Quality quality = Quality::kHigh) {
  std::vector<std::vector<std::byte>> raw(
      encoded.size(), std::vector<std::byte>(of.raw[0].size(), std::byte{0xAA}));
  std::vector<BlockToDecode> to_decode;
  for (std::size_t b = 0; b < encoded.size(); ++b) {
    to_decode.push_back(of.ToDecode(encoded[b], b, quality, raw[b]));
  }
  const absl::Status status = codec.Decode(to_decode);
  EXPECT_TRUE(status.ok()) << status;
  return raw;
}

std::size_t BytesOf(std::span<const EncodedBlock> encoded) {
  std::size_t bytes = 0;
  for (const EncodedBlock& block : encoded) bytes += block.body.size();
  return bytes;
}

std::size_t TokensOf(const SharedBlocks& of, std::size_t block) {
  std::size_t tokens = 0;
  for (const ReferenceRun& run : of.runs[block]) tokens += run.token_count;
  return tokens;
}

// All tokens but the session's first come back within a step, in less than half the bytes; alone,
// together, and layer by layer they are the same.
void ExpectRoundTrip(const ModelSpec& spec) {
  const ResidualProfile profile = ProfileOf(spec);
  const auto codec = MakeCodec(spec, profile);
  const SharedBlocks of(spec, Other(spec), Text(spec));
  const std::vector<EncodedBlock> encoded = Encode(*codec, of.blocks);
  const std::vector<EncodedBlock> alone = Encode(*codec, of.Alone());
  const auto decoded = Decode(*codec, of, encoded);
  std::size_t referenced = 0;
  for (std::size_t b = 0; b < encoded.size(); ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    ASSERT_FALSE(encoded[b].body.empty());
    EXPECT_EQ(encoded[b].referenced_tokens, TokensOf(of, b));
    EXPECT_EQ(alone[b].referenced_tokens, 0u);
    referenced += encoded[b].referenced_tokens;
    if (encoded[b].referenced_tokens == 0) {
      EXPECT_EQ(encoded[b].body, alone[b].body);
    }
    const std::vector<std::size_t> skip(b == 0 ? 1 : 0, 0);
    ExpectWithinBound(spec, profile, 0, of.raw[b], decoded[b], skip);
    if (testing::Test::HasFatalFailure()) return;

    const auto by_itself = Encode(*codec, std::span(of.blocks).subspan(b, 1));
    EXPECT_EQ(by_itself[0].body, encoded[b].body);
    std::vector<std::byte> raw(of.raw[b].size(), std::byte{0xAA});
    const BlockToDecode to_decode = of.ToDecode(encoded[b], b, Quality::kHigh, raw);
    auto decoder = ResidualCodec::Decoder::Start(*codec, {&to_decode, 1});
    ASSERT_TRUE(decoder.ok()) << decoder.status();
    const KvGeometry geometry(spec);
    for (std::uint32_t layer = 0; layer < geometry.layer_count(); ++layer) {
      ASSERT_TRUE(decoder->DecodeLayer().ok());
      const std::size_t end = geometry.layer_end(layer);
      EXPECT_TRUE(std::equal(raw.begin(), raw.begin() + static_cast<std::ptrdiff_t>(end),
                             decoded[b].begin()));
    }
  }
  EXPECT_EQ(referenced, 60u);
  EXPECT_LT(BytesOf(encoded), BytesOf(alone));
}

TEST(ResidualReferencedTest, EveryBlockSizeComesBackWithinTheStep) {
  for (const std::uint32_t block_tokens : {16, 17, 32, 96}) {
    SCOPED_TRACE(block_tokens);
    ExpectRoundTrip(WithBlocks(SyntheticSpec(), block_tokens));
    if (HasFatalFailure()) return;
  }
}

TEST(ResidualReferencedTest, BlocksOf256TokensComeBack) {
  const ModelSpec spec = WithBlocks(SyntheticSpec({{2, 2, 8, 8}}, DType::kBfloat16), 256);
  const SyntheticText other = MakeText(spec, 512, 5);
  const SharedBlocks of(spec, other, ShareTokens(spec, other, 100, 300, 180, 512, 6, kNoise));
  const ResidualProfile profile = ProfileOf(spec);
  const auto codec = MakeCodec(spec, profile);
  const auto encoded = Encode(*codec, of.blocks);
  EXPECT_EQ(encoded[0].referenced_tokens + encoded[1].referenced_tokens, 300u);
  const auto decoded = Decode(*codec, of, encoded);
  for (std::size_t b = 0; b < 2; ++b) {
    const std::vector<std::size_t> skip(b == 0 ? 1 : 0, 0);
    ExpectWithinBound(spec, profile, 0, of.raw[b], decoded[b], skip);
  }
}

TEST(ResidualReferencedTest, ShapesOfModelsComeBack) {
  const std::vector<LayerRun> kShapes[] = {{{3, 4, 4, 4}},
                                           {{3, 2, 12, 8}},
                                           {{3, 1, 20, 0}},
                                           {{1, 2, 8, 8}, {2, 4, 4, 6}, {1, 1, 16, 0}},
                                           {{9, 1, 4, 4}}};
  for (const auto& shape : kShapes) {
    SCOPED_TRACE(shape[0].k_head_dim);
    ExpectRoundTrip(SyntheticSpec(shape));
    if (HasFatalFailure()) return;
  }
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    ExpectRoundTrip(SyntheticSpec({{3, 2, 8, 8}}, dtype));
    if (HasFatalFailure()) return;
  }
}

TEST(ResidualReferencedTest, EveryRopeComesBack) {
  const RopeSpec kRopes[] = {
      {.pairing = RopePairing::kNone, .theta = 0, .rotary_dims = 0, .scaling = {}},
      {.pairing = RopePairing::kHalfSplit, .theta = 5e5, .rotary_dims = 4, .scaling = {}},
      {.pairing = RopePairing::kInterleaved, .theta = 10000, .rotary_dims = 6, .scaling = {}}};
  for (const RopeSpec& rope : kRopes) {
    SCOPED_TRACE(static_cast<int>(rope.pairing));
    ModelSpec spec = SyntheticSpec();
    spec.rope = rope;
    ExpectRoundTrip(spec);
    if (HasFatalFailure()) return;
  }
}

// A token's KV depends on its own way of coding alone.
TEST(ResidualReferencedTest, TokensWithoutAReferenceAreAsTheyAreAlone) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  const SharedBlocks of(spec, Other(spec), Text(spec));
  const auto with = Decode(*codec, of, Encode(*codec, of.blocks));
  const auto alone = Decode(*codec, of, Encode(*codec, of.Alone()));
  std::size_t mixed = 0;
  for (std::size_t b = 0; b < with.size(); ++b) {
    std::set<std::size_t> referenced;
    for (const ReferenceRun& run : of.runs[b]) {
      for (std::size_t t = 0; t < run.token_count; ++t) referenced.insert(run.first_token + t);
    }
    mixed += !referenced.empty() && referenced.size() < spec.block_tokens ? 1 : 0;
    for (std::size_t t = 0; t < spec.block_tokens; ++t) {
      const bool same = BytesOfToken(spec, with[b], t) == BytesOfToken(spec, alone[b], t);
      EXPECT_EQ(same, !referenced.contains(t)) << b << " " << t;
    }
  }
  EXPECT_EQ(mixed, 1u);
}

// As they were: K and V of a token whose difference is less than a step.
TEST(ResidualReferencedTest, WhatDoesNotDifferTakesTheReferences) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  const SharedBlocks of(spec, Other(spec), Text(spec, 0));
  const auto encoded = Encode(*codec, of.blocks);
  const auto decoded = Decode(*codec, of, encoded);
  const auto values = ValuesOf(spec, decoded[2]), exact = ValuesOf(spec, of.raw[2]);
  ASSERT_EQ(encoded[2].referenced_tokens, 16u);
  for (std::size_t p = 0; p < values.size(); ++p) {
    for (std::size_t i = 0; i < values[p].size(); ++i) {
      EXPECT_NEAR(values[p][i], exact[p][i], 1e-5f);
    }
  }
}

TEST(ResidualReferencedTest, EveryKernelSetWritesAndReadsTheSame) {
  const ModelSpec spec = WithBlocks(SyntheticSpec({{4, 2, 8, 8}}, DType::kBfloat16), 24);
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  const SharedBlocks of(spec, Other(spec), Text(spec));
  std::vector<std::vector<std::byte>> bodies, raws;
  WithEachKernelSet([&] {
    const auto encoded = Encode(*codec, of.blocks);
    const auto decoded = Decode(*codec, of, encoded);
    for (std::size_t b = 0; b < encoded.size(); ++b) {
      if (bodies.size() <= b) {
        bodies.push_back(encoded[b].body);
        raws.push_back(decoded[b]);
      }
      EXPECT_EQ(encoded[b].body, bodies[b]);
      EXPECT_EQ(decoded[b], raws[b]);
    }
  });
  EXPECT_EQ(bodies.size(), 4u);
}

TEST(ResidualReferencedTest, NumbersThatAreNoneHaveNoReference) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  SharedBlocks of(spec, Other(spec), Text(spec));
  ASSERT_EQ(TokensOf(of, 2), 16u);
  const KvGeometry geometry(spec);
  const auto set = [&](std::vector<std::byte>& raw, std::size_t token, float value) {
    StoreLittle(raw.data() + geometry.kind_begin(1, KvKind::kV) +
                    token * geometry.kind_bytes(1, KvKind::kV) / spec.block_tokens,
                value);
  };
  // Token 3 itself; the reference of token 8; a difference that is out of range, of token 11.
  set(of.raw[2], 3, std::numeric_limits<float>::quiet_NaN());
  const auto place = [&](std::size_t token) {
    for (const ReferenceRun& run : of.runs[2]) {
      if (token >= run.first_token && token < std::size_t{run.first_token} + run.token_count) {
        return std::pair{of.of_block[2][run.reference].first_position / 16,
                         run.offset + token - run.first_token};
      }
    }
    return std::pair{0u, std::size_t{0}};
  };
  set(of.reference_raw[place(8).first], place(8).second, std::numeric_limits<float>::infinity());
  set(of.reference_raw[place(11).first], place(11).second, 1e9f);
  const auto encoded = Encode(*codec, of.blocks);
  EXPECT_EQ(encoded[2].exact_tokens, 1u);
  EXPECT_EQ(encoded[2].referenced_tokens, 13u);
  const auto decoded = Decode(*codec, of, encoded);
  EXPECT_EQ(BytesOfToken(spec, decoded[2], 3), BytesOfToken(spec, of.raw[2], 3));
  const std::size_t skip[] = {3};
  ExpectWithinBound(spec, ProfileOf(spec), 0, of.raw[2], decoded[2], skip);
}

TEST(ResidualReferencedTest, WithoutDifferencesOrExactTheyAreLeftAside) {
  const ModelSpec spec = SyntheticSpec({{3, 2, 8, 8}}, DType::kBfloat16);
  const SharedBlocks of(spec, Other(spec), Text(spec));
  const auto without = MakeCodec(spec, PlainProfile(spec));
  EXPECT_FALSE(without->HasDifferences());
  const auto with = MakeCodec(spec, ProfileOf(spec));
  EXPECT_TRUE(with->HasDifferences());
  const auto plain = Encode(*without, of.blocks), alone = Encode(*with, of.Alone());
  const auto exact = Encode(*with, of.blocks, Quality::kExact);
  for (std::size_t b = 0; b < of.blocks.size(); ++b) {
    EXPECT_EQ(plain[b].referenced_tokens, 0u);
    EXPECT_EQ(plain[b].body, alone[b].body);
    EXPECT_EQ(exact[b].referenced_tokens, 0u);
  }
}

TEST(ResidualReferencedTest, ReferencesAreFinerThanWhatIsCoded) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  const SharedBlocks of(spec, Other(spec), Text(spec));
  const auto referenced = [&](Quality reference, Quality level) {
    std::vector<ReferenceBlock> references = of.of_block[2];
    for (ReferenceBlock& block : references) block.quality = reference;
    BlockToEncode block = of.blocks[2];
    block.references = references;
    return Encode(*codec, {&block, 1}, level)[0].referenced_tokens > 0;
  };
  EXPECT_TRUE(referenced(Quality::kExact, Quality::kHigh));
  EXPECT_TRUE(referenced(Quality::kNearExact, Quality::kHigh));
  EXPECT_FALSE(referenced(Quality::kHigh, Quality::kHigh));
  EXPECT_FALSE(referenced(Quality::kSmall, Quality::kHigh));
  EXPECT_FALSE(referenced(Quality::kUnrated, Quality::kHigh));
  EXPECT_TRUE(referenced(Quality::kHigh, Quality::kSmall));
  EXPECT_FALSE(referenced(Quality::kSmall, Quality::kSmall));
}

TEST(ResidualReferencedTest, AnEncoderRefusesWhatIsNoReference) {
  const ModelSpec spec = SyntheticSpec();
  const auto codec = MakeCodec(spec, ProfileOf(spec));
  const SharedBlocks of(spec, Other(spec), Text(spec));
  const auto refused = [&](const std::function<void(std::vector<ReferenceBlock>&,
                                                    std::vector<ReferenceRun>&)>& change) {
    std::vector<ReferenceBlock> references = of.of_block[2];
    std::vector<ReferenceRun> runs = of.runs[2];
    change(references, runs);
    BlockToEncode block = of.blocks[2];
    block.references = references;
    block.runs = runs;
    return absl::IsInvalidArgument(codec->Encode({&block, 1}, Quality::kHigh).status());
  };
  EXPECT_FALSE(refused([](auto&, auto&) {}));
  EXPECT_TRUE(refused([](auto&, auto& runs) { runs[0].offset ^= 1; })) << "other tokens";
  EXPECT_TRUE(refused([](auto& references, auto&) { references.pop_back(); }));
  EXPECT_TRUE(refused([](auto&, auto& runs) { runs.pop_back(); })) << "a reference without a run";
  EXPECT_TRUE(refused([](auto&, auto& runs) { runs[1].first_token = 0; })) << "runs overlap";
  EXPECT_TRUE(refused([](auto& references, auto&) { references.clear(); }));
}

class ReferencedDamageTest : public testing::Test {
 protected:
  absl::Status Decode(const std::vector<std::byte>& body,
                      std::span<const ReferenceBlock> references) {
    std::vector<std::byte> raw(of_.raw[0].size());
    const std::uint32_t section_bytes[] = {static_cast<std::uint32_t>(body.size())};
    BlockToDecode to_decode = of_.ToDecode(encoded_, kBlock, Quality::kHigh, raw);
    to_decode.body = body;
    to_decode.section_bytes = section_bytes;
    to_decode.references = references;
    return codec_->Decode({&to_decode, 1});
  }
  // With one block changed, whose name is given back.
  absl::Status With(const std::function<void(ReferenceBlock&)>& change) {
    std::vector<ReferenceBlock> references = of_.of_block[kBlock];
    change(references[1]);
    return Decode(encoded_.body, references);
  }

  static constexpr std::size_t kBlock = 1;  // mixed
  static constexpr std::size_t kTable = 24 + 6 + 2;
  const ModelSpec spec_ = SyntheticSpec();
  const std::unique_ptr<const ResidualCodec> codec_ = MakeCodec(spec_, ProfileOf(spec_));
  const SharedBlocks of_{spec_, Other(spec_), Text(spec_)};
  const EncodedBlock encoded_ = Encode(*codec_, of_.blocks)[kBlock];
};

TEST_F(ReferencedDamageTest, OtherReferencesAreRefusedByName) {
  ASSERT_EQ(of_.of_block[kBlock].size(), 2u);
  ASSERT_EQ(encoded_.section_bytes.size(), 1u);
  EXPECT_TRUE(With([](ReferenceBlock&) {}).ok());
  std::vector<ReferenceBlock> all(of_.references.rbegin(), of_.references.rend());
  EXPECT_TRUE(Decode(encoded_.body, all).ok()) << "in any order, and others";

  std::vector<std::byte> raw(of_.of_block[kBlock][1].raw.begin(),
                             of_.of_block[kBlock][1].raw.end());
  raw.back() ^= std::byte{1};
  std::vector<TokenId> tokens(of_.of_block[kBlock][1].tokens.begin(),
                              of_.of_block[kBlock][1].tokens.end());
  for (TokenId& token : tokens) ++token;
  const std::string name = of_.of_block[kBlock][1].node.ToHex();
  const struct {
    const char* what;
    std::function<void(ReferenceBlock&)> change;
  } kCases[] = {
      {"is missing", [](ReferenceBlock& block) { block.node.bytes[3] ^= 1; }},
      {"another position", [](ReferenceBlock& block) { ++block.first_position; }},
      {"other KV", [&](ReferenceBlock& block) { block.raw = raw; }},
      {"are not those of block", [&](ReferenceBlock& block) { block.tokens = tokens; }},
  };
  for (const auto& wrong : kCases) {
    const absl::Status status = With(wrong.change);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong.what;
    EXPECT_NE(status.message().find(wrong.what), absl::string_view::npos) << status;
    EXPECT_NE(std::string(status.message()).find(name), std::string::npos) << status;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Decode(encoded_.body, {})));
}

// Nothing of the table can change and still decode.
TEST_F(ReferencedDamageTest, EveryBitOfTheTableMatters) {
  const std::size_t size = 4 + 2 * 36 + 8 * of_.runs[kBlock].size();
  for (std::size_t bit = 8 * kTable; bit < 8 * (kTable + size); ++bit) {
    std::vector<std::byte> damaged = encoded_.body;
    damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const absl::Status status = Decode(damaged, of_.references);
    EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsInvalidArgument(status))
        << bit / 8 - kTable << " " << status;
  }
}

TEST_F(ReferencedDamageTest, EveryTruncationIsDamage) {
  for (std::size_t length = 0; length < encoded_.body.size(); ++length) {
    const std::vector<std::byte> cut(encoded_.body.begin(),
                                     encoded_.body.begin() + static_cast<std::ptrdiff_t>(length));
    const absl::Status status = Decode(cut, of_.references);
    EXPECT_TRUE(absl::IsDataLoss(status) ||
                (length < kFrameBindingBytes && absl::IsInvalidArgument(status)))
        << length << status;
  }
}

TEST_F(ReferencedDamageTest, AnExactTokenOfARunIsDamage) {
  std::vector<std::byte> damaged = encoded_.body;
  const std::size_t table_bytes = 4 + 2 * 36 + 8 * of_.runs[kBlock].size();
  damaged[24 + 2] = std::byte{1};  // exact tokens
  const std::size_t token_bytes = of_.raw[0].size() / spec_.block_tokens;
  std::vector<std::byte> row(2 + token_bytes);
  row[0] = static_cast<std::byte>(of_.runs[kBlock][0].first_token);
  damaged.insert(damaged.begin() + static_cast<std::ptrdiff_t>(kTable + table_bytes), row.begin(),
                 row.end());
  const absl::Status status = Decode(damaged, of_.references);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_NE(status.message().find("a token of a run"), absl::string_view::npos) << status;
}

TEST_F(ReferencedDamageTest, OfAProfileWithoutDifferencesItIsDamage) {
  const auto plain = MakeCodec(spec_, PlainProfile(spec_));
  std::vector<std::byte> raw(of_.raw[0].size());
  BlockToDecode to_decode = of_.ToDecode(encoded_, kBlock, Quality::kHigh, raw);
  EXPECT_TRUE(absl::IsDataLoss(plain->Decode({&to_decode, 1})));
  to_decode.is_referenced = false;
  EXPECT_TRUE(absl::IsDataLoss(codec_->Decode({&to_decode, 1}))) << "a table where rows should be";
}

}  // namespace
}  // namespace kvtrie
