#include "gpu/decode_batch.h"

#include <vector>

#include "gtest/gtest.h"
#include "storage/base/byte_order.h"
#include "tests/gpu/gpu_fixture.h"

namespace kvtrie::gpu {
namespace {

// Two blocks that have all that a body can have: a token that is kept exact, and the first token.
struct Damageable {
  Shape shape = {.layers = {{2, 2, 4, 4}}, .group_count = 1, .first_token = true};
  ResidualProfile profile = RandomProfile(shape, 21);
  Twin twin{shape, profile};
  Blocks blocks = RandomBlocks(shape, profile, 2, 22);
  std::vector<EncodedBlock> encoded;
  std::vector<std::byte> by_codec, by_twin;

  Damageable() {
    StoreLittle(blocks.raw[1].data() + 2 * (4 * 8 + 1), std::uint16_t{0x7FC0});
    encoded = *twin.codec->Encode(blocks.to_encode, Quality::kHigh);
    EXPECT_EQ(encoded[1].exact_tokens, 1u);
    EXPECT_EQ(encoded[0].body[24], std::byte{1}) << "the profile's first token";
    by_codec.resize(blocks.raw[0].size());
    by_twin.resize(blocks.raw[0].size());
  }

  // Expects the same answer of both, and the same bytes where they answer OK.
  absl::Status Decode(std::size_t block, const std::vector<std::byte>& body,
                      const std::vector<std::uint32_t>& section_bytes) {
    BlockToDecode to_decode = {.body = body,
                               .section_bytes = section_bytes,
                               .quality = Quality::kHigh,
                               .tokens = blocks.tokens[block],
                               .raw = by_codec};
    const absl::Status expected = twin.codec->Decode({&to_decode, 1});
    to_decode.raw = by_twin;
    const absl::Status status = twin.coder->Decode({&to_decode, 1});
    EXPECT_EQ(status.code(), expected.code()) << status << expected;
    if (expected.ok()) {
      EXPECT_TRUE(by_twin == by_codec);
    }
    return status;
  }
};

TEST(DecodeBatchTest, ExactTokensAndTheFirstTokenComeBack) {
  Damageable of;
  for (std::size_t block = 0; block < 2; ++block) {
    EXPECT_TRUE(of.Decode(block, of.encoded[block].body, of.encoded[block].section_bytes).ok());
  }
}

TEST(DecodeBatchTest, EveryLengthIsRefusedAsByTheProcessor) {
  Damageable of;
  for (std::size_t block = 0; block < 2; ++block) {
    const std::vector<std::byte>& body = of.encoded[block].body;
    for (std::size_t length = 0; length < body.size() + 5; ++length) {
      // A copy, so that a sanitizer sees a read past its end.
      std::vector<std::byte> cut = body;
      cut.resize(length);
      const absl::Status status = of.Decode(block, cut, {static_cast<std::uint32_t>(length)});
      EXPECT_EQ(absl::IsDataLoss(status), length != body.size()) << length << status;
    }
  }
}

TEST(DecodeBatchTest, BitFlipsAreAnsweredAsByTheProcessor) {
  Damageable of;
  for (std::size_t block = 0; block < 2; ++block) {
    const EncodedBlock& encoded = of.encoded[block];
    for (std::size_t bit = 0; bit < encoded.body.size() * 8; ++bit) {
      std::vector<std::byte> damaged = encoded.body;
      damaged[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      of.Decode(block, damaged, encoded.section_bytes).IgnoreError();
    }
  }
}

TEST(DecodeBatchTest, NoiseIsAnsweredAsByTheProcessor) {
  Damageable of;
  TestRandom random(23);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::byte> noise = of.encoded[1].body;
    noise.resize(noise.size() + random.Below(300));
    for (std::size_t i = round % 2 == 0 ? 24 : 34 + 32; i < noise.size(); ++i) {
      noise[i] = static_cast<std::byte>(random.Below(256));
    }
    of.Decode(1, noise, {static_cast<std::uint32_t>(noise.size())}).IgnoreError();
  }
}

TEST(DecodeBatchTest, OneDamagedBlockIsFoundAmongOthers) {
  Damageable of;
  std::vector<std::byte> damaged = of.encoded[1].body;
  damaged[damaged.size() - 3] ^= std::byte{4};
  std::vector<std::vector<std::byte>> raw(4, of.by_twin);
  std::vector<BlockToDecode> blocks;
  for (std::size_t b = 0; b < 4; ++b) {
    blocks.push_back({.body = of.encoded[b % 2].body,
                      .section_bytes = of.encoded[b % 2].section_bytes,
                      .quality = Quality::kHigh,
                      .tokens = of.blocks.tokens[b % 2],
                      .raw = raw[b]});
  }
  EXPECT_TRUE(of.twin.coder->Decode(blocks).ok());
  EXPECT_TRUE(raw[0] == raw[2]);
  blocks[3].body = damaged;
  EXPECT_TRUE(absl::IsDataLoss(of.twin.coder->Decode(blocks)));
}

TEST(DecodeBatchTest, OtherTokensOrAnotherProfileAreRefusedByName) {
  Damageable of;
  BlockToDecode block = {.body = of.encoded[1].body,
                         .section_bytes = of.encoded[1].section_bytes,
                         .quality = Quality::kHigh,
                         .tokens = of.blocks.tokens[0],
                         .raw = of.by_twin};
  EXPECT_TRUE(absl::IsInvalidArgument(of.twin.coder->Decode({&block, 1})));
  std::vector<std::byte> other = of.encoded[1].body;
  other[8] ^= std::byte{1};
  block.tokens = of.blocks.tokens[1];
  block.body = other;
  EXPECT_TRUE(absl::IsInvalidArgument(of.twin.coder->Decode({&block, 1})));
}

TEST(DecodeBatchTest, BodiesBeyondReasonFallToTheProcessor) {
  Damageable of;
  std::vector<std::byte> long_body = of.encoded[1].body;
  long_body.resize(8 * of.by_twin.size() + 70'000);
  EXPECT_TRUE(
      absl::IsDataLoss(of.Decode(1, long_body, {static_cast<std::uint32_t>(long_body.size())})));
}

TEST(DecodeBatchTest, WhatABlockTakesIsKnown) {
  const Shape shape = {.layers = {{3, 2, 8, 8}}};
  const ResidualProfile profile = RandomProfile(shape, 24);
  const ModelSpec spec = SpecOf(shape);
  const auto device = MakeHostDevice(kTwinBytes);
  const DeviceModel model = {.geometry = KvGeometry(spec),
                             .pairing = spec.rope.pairing,
                             .codec = MakeCodec(spec, profile),
                             .profile = *DeviceProfile::Upload(*device, spec, profile),
                             .raw_kv = RawKv(KvGeometry(spec), spec.rope)};
  EXPECT_GT(DecodeBatch::DeviceBytesOfBlock(model), model.geometry.raw_block_bytes());
}

}  // namespace
}  // namespace kvtrie::gpu
