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

TEST(WireConversionTest, LookupNamesTheGroupOfItsMatch) {
  LookupResult result;
  v1::LookupResult proto;
  ToProto(result, &proto);
  EXPECT_TRUE(proto.group_id().empty());
  result.group.bytes.fill(5);
  ToProto(result, &proto);
  EXPECT_EQ(proto.group_id(), std::string(16, '\5'));
}

TEST(WireConversionTest, ReusableRunsKeepTheirFields) {
  LookupResult result;
  ReusableRun run;
  run.first_token = 1;
  run.token_count = 2;
  run.nodes.resize(2);
  run.nodes[1].bytes.fill(3);
  run.node_offset = 4;
  run.first_position = 5;
  run.source_quality = Quality::kSmall;
  run.fetch_bytes = 6;
  result.reusable_runs = {run};
  v1::LookupResult proto;
  ToProto(result, &proto);
  ASSERT_EQ(proto.reusable_runs_size(), 1);
  EXPECT_EQ(proto.reusable_runs(0).first_token(), 1u);
  EXPECT_EQ(proto.reusable_runs(0).token_count(), 2u);
  EXPECT_EQ(proto.reusable_runs(0).node_ids(), std::string(16, '\0') + std::string(16, '\3'));
  EXPECT_EQ(proto.reusable_runs(0).node_offset(), 4u);
  EXPECT_EQ(proto.reusable_runs(0).first_position(), 5u);
  EXPECT_EQ(proto.reusable_runs(0).source_quality(), v1::QUALITY_SMALL);
  EXPECT_EQ(proto.reusable_runs(0).fetch_bytes(), 6u);
  EXPECT_EQ(proto.text_reuse_forbidden(), v1::TEXT_REUSE_FORBIDDEN_UNSPECIFIED);
  for (const auto& [why, name] :
       {std::pair(TextReuseForbidden::kServer, v1::TEXT_REUSE_FORBIDDEN_SERVER),
        std::pair(TextReuseForbidden::kTenant, v1::TEXT_REUSE_FORBIDDEN_TENANT),
        std::pair(TextReuseForbidden::kModel, v1::TEXT_REUSE_FORBIDDEN_MODEL),
        std::pair(TextReuseForbidden::kPositions, v1::TEXT_REUSE_FORBIDDEN_POSITIONS)}) {
    result.text_reuse_forbidden = why;
    ToProto(result, &proto);
    EXPECT_EQ(proto.text_reuse_forbidden(), name);
  }
}

TEST(WireConversionTest, ProbabilitiesAreSeenInPlace) {
  v1::TokenProbabilities proto;
  proto.set_log_probs("ab");
  proto.set_top_k(3);
  proto.set_top_token_ids("cdef");
  proto.set_top_log_probs("gh");
  proto.set_vocabulary_tokens(9);
  const TokenProbabilities view = FromProto(proto);
  EXPECT_EQ(view.log_probs.data(), proto.log_probs().data());
  EXPECT_EQ(view.top_k, 3u);
  EXPECT_EQ(view.top_token_ids, "cdef");
  EXPECT_EQ(view.top_log_probs, "gh");
  EXPECT_EQ(view.vocabulary_tokens, 9u);
  EXPECT_TRUE(FromProto(v1::TokenProbabilities()).empty());
}

TEST(WireConversionTest, GroupsAndTheirBranchesKeepTheirFields) {
  GroupInfo group;
  group.id.bytes.fill(1);
  group.model.bytes.fill(2);
  group.sessions = 3;
  group.shared_blocks = 4;
  group.shared_bits = 5.5;
  group.shared_bits_estimated = true;
  group.shared_end.bytes.fill(6);
  group.blocks = 7;
  group.stored_bytes = 8;
  group.saved_bytes = 9;
  group.centroid_end.bytes.fill(10);
  group.centroid_blocks = 11;
  v1::GroupEntry entry;
  ToProto(group, &entry);
  EXPECT_EQ(entry.group_id(), std::string(16, '\x01'));
  EXPECT_EQ(entry.model_id(), std::string(16, '\x02'));
  EXPECT_EQ(entry.sessions(), 3u);
  EXPECT_EQ(entry.shared_blocks(), 4u);
  EXPECT_EQ(entry.shared_bits(), 5.5);
  EXPECT_TRUE(entry.shared_bits_estimated());
  EXPECT_EQ(entry.shared_end_id(), std::string(16, '\x06'));
  EXPECT_EQ(entry.blocks(), 7u);
  EXPECT_EQ(entry.stored_bytes(), 8u);
  EXPECT_EQ(entry.saved_bytes(), 9u);
  EXPECT_EQ(entry.centroid_end_id(), std::string(16, '\x0a'));
  EXPECT_EQ(entry.centroid_blocks(), 11u);

  GroupBranchInfo branch;
  branch.first.bytes.fill(1);
  branch.last.bytes.fill(2);
  branch.blocks = 3;
  branch.surprisal_bits = 4.5;
  branch.surprisal_estimated = true;
  branch.stored_bytes = 5;
  branch.sessions = 6;
  branch.probability = 0.25;
  branch.on_centroid = true;
  v1::GroupBranch proto;
  ToProto(branch, &proto);
  EXPECT_EQ(proto.parent(), -1);
  EXPECT_EQ(proto.first_id(), std::string(16, '\x01'));
  EXPECT_EQ(proto.last_id(), std::string(16, '\x02'));
  EXPECT_EQ(proto.blocks(), 3u);
  EXPECT_EQ(proto.surprisal_bits(), 4.5);
  EXPECT_TRUE(proto.surprisal_estimated());
  EXPECT_EQ(proto.stored_bytes(), 5u);
  EXPECT_EQ(proto.sessions(), 6u);
  EXPECT_EQ(proto.probability(), 0.25);
  EXPECT_TRUE(proto.on_centroid());
}

}  // namespace
}  // namespace kvtrie
