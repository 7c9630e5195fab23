#include "server/wire_conversion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

namespace kvtrie {
namespace {

v1::ModelSpec FullSpec() {
  v1::ModelSpec spec;
  spec.set_name("n");
  spec.set_weights_revision("w");
  spec.set_tokenizer_digest(std::string("\0\1", 2));
  spec.set_dtype(v1::DTYPE_FLOAT16);
  v1::KvGroup* group = spec.add_kv_groups();
  group->set_window_tokens(128);
  v1::LayerRun* run = group->add_layer_runs();
  run->set_layer_count(3);
  run->set_kv_heads(2);
  run->set_k_head_dim(64);
  run->set_v_head_dim(32);
  spec.mutable_rope()->set_pairing(v1::ROPE_PAIRING_HALF_SPLIT);
  spec.mutable_rope()->set_theta(10'000);
  spec.mutable_rope()->set_rotary_dims(16);
  spec.mutable_rope()->set_scaling("s");
  spec.set_tensor_parallel_rank(1);
  spec.set_tensor_parallel_size(2);
  spec.set_adapter("a");
  spec.set_block_tokens(16);
  spec.set_layout_tag("l");
  return spec;
}

TEST(WireConversionTest, ModelSpecGoesThereAndBack) {
  const auto spec = FromProto(FullSpec());
  ASSERT_TRUE(spec.ok());
  v1::ModelSpec back;
  ToProto(*spec, &back);
  EXPECT_EQ(back.SerializeAsString(), FullSpec().SerializeAsString());
}

TEST(WireConversionTest, UnknownEnumsOfASpecAreRefused) {
  v1::ModelSpec spec = FullSpec();
  spec.set_dtype(v1::DTYPE_UNSPECIFIED);
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(spec).status()));
  spec.set_dtype(static_cast<v1::DType>(77));
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(spec).status()));
  spec = FullSpec();
  spec.mutable_rope()->set_pairing(static_cast<v1::RopePairing>(77));
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(spec).status()));
}

TEST(WireConversionTest, NotSplitHasOneSpelling) {
  v1::ModelSpec zero = FullSpec();
  zero.set_tensor_parallel_rank(0);
  zero.set_tensor_parallel_size(0);
  v1::ModelSpec one = zero;
  one.set_tensor_parallel_size(1);
  EXPECT_EQ(FromProto(zero)->Digest(), FromProto(one)->Digest());
}

TEST(WireConversionTest, TokensAreSeenInPlaceOrCopiedWhenTheyAreNotAligned) {
  alignas(8) char bytes[16];
  const std::uint32_t tokens[] = {1, 2, 3};
  const google::protobuf::RepeatedPtrField<v1::BlockExtraKey> none;
  for (const std::size_t shift : {0, 1, 2, 3}) {
    std::memcpy(bytes + shift, tokens, sizeof tokens);
    RequestPath path({}, {bytes + shift, sizeof tokens}, "salt", none);
    const RequestPath moved = std::move(path);
    EXPECT_THAT(moved.view().tokens, ::testing::ElementsAre(1u, 2u, 3u));
    const bool in_place =
        reinterpret_cast<const char*>(moved.view().tokens.data()) == bytes + shift;
    EXPECT_EQ(in_place, shift == 0);
  }
}

TEST(WireConversionTest, UnspecifiedQualityIsExact) {
  EXPECT_EQ(FromProto(v1::QUALITY_UNSPECIFIED), Quality::kExact);
  EXPECT_EQ(FromProto(v1::QUALITY_HIGH), Quality::kHigh);
}

// The numbers of the wire are those that are stored.
TEST(WireConversionTest, QualitiesAndCodecsGoThereAndBack) {
  for (const Quality quality : kAllQualities) EXPECT_EQ(FromProto(ToProto(quality)), quality);
  EXPECT_EQ(ToProto(Quality::kSmall), v1::QUALITY_SMALL);
  EXPECT_EQ(ToProto(Quality::kUnrated), v1::QUALITY_UNRATED);
  EXPECT_EQ(ToProto(CodecId::kRaw), v1::CODEC_RAW);
  EXPECT_EQ(ToProto(CodecId::kLossless), v1::CODEC_LOSSLESS);
  EXPECT_EQ(ToProto(CodecId::kResidual), v1::CODEC_RESIDUAL);
  EXPECT_EQ(ToProto(CodecId::kRotated), v1::CODEC_ROTATED);
}

TEST(WireConversionTest, LookupResultIsColumns) {
  LookupResult result;
  result.matched_blocks = 2;
  result.block_tokens = 16;
  MatchedBlock block;
  block.node.bytes.fill(7);
  block.rungs = RungBit(Rung::kExact);
  block.stored_bytes = 99;
  result.blocks = {{block, block}};
  v1::LookupResult proto;
  ToProto(result, &proto);
  EXPECT_EQ(proto.matched_tokens(), 32u);
  EXPECT_EQ(proto.blocks(0).node_ids(), std::string(32, '\7'));
  EXPECT_EQ(proto.blocks(0).rungs(), std::string(2, '\x08'));
  EXPECT_THAT(proto.blocks(0).stored_bytes(), ::testing::ElementsAre(99u, 99u));
  EXPECT_EQ(proto.quality(), v1::QUALITY_EXACT);
  EXPECT_TRUE(proto.lease_id().empty());
}

TEST(HalfToFloatTest, KnownValues) {
  EXPECT_EQ(HalfToFloat(0x0000), 0.0f);
  EXPECT_EQ(HalfToFloat(0x3c00), 1.0f);
  EXPECT_EQ(HalfToFloat(0xc000), -2.0f);
  EXPECT_EQ(HalfToFloat(0xfbff), -65504.0f);
  EXPECT_EQ(HalfToFloat(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(HalfToFloat(0x8001), -std::ldexp(1.0f, -24));
  EXPECT_EQ(HalfToFloat(0x3555), 0.333251953125f);
  EXPECT_TRUE(std::isinf(HalfToFloat(0x7c00)));
  EXPECT_TRUE(std::isnan(HalfToFloat(0x7e00)));
}

std::string Halves(std::initializer_list<std::uint16_t> values) {
  const std::vector<std::uint16_t> halves(values);
  return {reinterpret_cast<const char*>(halves.data()), halves.size() * 2};
}

TEST(BlockSurprisalTest, SumsBitsOfFullBlocks) {
  // -1 nat each; the fifth token fills no block.
  const auto bits = BlockSurprisalBits(Halves({0xbc00, 0xbc00, 0xbc00, 0x0000, 0xbc00}), 2);
  ASSERT_TRUE(bits.ok());
  ASSERT_EQ(bits->size(), 2u);
  EXPECT_FLOAT_EQ((*bits)[0], 2 * 1.442695f);
  EXPECT_FLOAT_EQ((*bits)[1], 1.442695f);
}

TEST(BlockSurprisalTest, RefusesWhatIsNoLogProbability) {
  EXPECT_TRUE(absl::IsInvalidArgument(BlockSurprisalBits(Halves({0x3c00}), 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(BlockSurprisalBits(Halves({0x7e00}), 1).status()));
  // A probability that rounds to zero is allowed, and counts as the least that can be said.
  EXPECT_FLOAT_EQ((*BlockSurprisalBits(Halves({0xfc00}), 1))[0], 65504.0f * 1.442695f);
}

}  // namespace
}  // namespace kvtrie
