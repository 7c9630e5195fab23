#include "client/put_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "storage/base/byte_order.h"
#include "storage/base/byte_reader.h"

namespace kvtrie {
namespace {

using ::testing::ElementsAre;

ModelSpec Spec(std::uint32_t layers, std::uint32_t dim) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights_revision = "1";
  spec.tokenizer_digest = "t";
  spec.dtype = DType::kUint8;
  spec.block_tokens = 4;
  spec.kv_groups = {{.layer_runs = {{layers, 1, dim, dim}}, .window_tokens = 0}};
  return spec;
}

class PutProgressTest : public ::testing::Test {
 protected:
  PutProgressTest() : geometry_(Spec(2, 2)), tokens_(14), bytes_(3, std::string(32, 'b')) {
    for (const std::string& block : bytes_) blocks_.push_back(AsBytes(block));
    path_.path.tokens = tokens_;
    path_.blocks = blocks_;
  }

  v1::PutPlan Plan(std::vector<std::uint32_t> missing) {
    v1::PutPlan plan;
    plan.set_put_id(1);
    for (const std::uint32_t index : missing) {
      char text[4];
      StoreLittle(text, index);
      plan.mutable_missing_blocks()->append(text, 4);
    }
    return plan;
  }

  v1::PutAck Ack(std::uint32_t block, std::uint32_t code = 0, bool duplicate = false) {
    v1::PutAck ack;
    ack.set_block_index(block);
    ack.mutable_status()->set_code(code);
    ack.set_duplicate(duplicate);
    ack.set_node_id(std::string(16, static_cast<char>('0' + block)));
    return ack;
  }

  KvGeometry geometry_;
  std::vector<TokenId> tokens_;
  std::vector<std::string> bytes_;
  std::vector<std::span<const std::byte>> blocks_;
  PutPath path_;
};

TEST_F(PutProgressTest, SendsOnlyWhatThePlanMisses) {
  PutProgress put(path_, geometry_);
  const v1::PutAnnounce announce = put.Announce(1);
  EXPECT_FALSE(announce.eager());
  EXPECT_EQ(announce.prefix().tokens().size(), 12u * sizeof(TokenId));  // the tail is not announced
  EXPECT_TRUE(put.to_send().empty());
  put.Accept(Plan({1, 2}));
  EXPECT_THAT(put.to_send(), ElementsAre(1, 2));
  put.Accept(Ack(1));
  put.Accept(Ack(2));
  put.Accept(v1::PutDone());
  ASSERT_TRUE(put.done());
  const PutReport report = put.TakeReport();
  EXPECT_TRUE(report.all_stored());
  EXPECT_EQ(report.duplicate_blocks, 1u);
  EXPECT_TRUE(report.blocks[0].duplicate);
  EXPECT_EQ(report.blocks[1].node.view(), std::string(16, '1'));
}

TEST_F(PutProgressTest, EagerSendsAllAtOnceAndNothingTwice) {
  path_.eager = true;
  PutProgress put(path_, geometry_);
  EXPECT_TRUE(put.Announce(1).eager());
  EXPECT_THAT(put.to_send(), ElementsAre(0, 1, 2));
  put.to_send().clear();
  put.Accept(Plan({0, 1, 2}));
  EXPECT_TRUE(put.to_send().empty());
}

TEST_F(PutProgressTest, SecondAttemptAsksFirstAndSkipsWhatWasAcknowledged) {
  path_.eager = true;
  PutProgress put(path_, geometry_);
  put.Announce(1);
  put.Accept(Ack(0));
  EXPECT_FALSE(put.Announce(1).eager());
  EXPECT_TRUE(put.to_send().empty());
  put.Accept(Plan({0, 1, 2}));
  EXPECT_THAT(put.to_send(), ElementsAre(1, 2));
}

TEST_F(PutProgressTest, BlockOfAnotherSizeFailsAloneWithWhatFollowsIt) {
  blocks_[1] = blocks_[1].first(31);
  PutProgress put(path_, geometry_);
  EXPECT_EQ(put.Announce(1).prefix().tokens().size(), 4u * sizeof(TokenId));
  put.Accept(Plan({0}));
  EXPECT_THAT(put.to_send(), ElementsAre(0));
  put.Accept(Ack(0));
  ASSERT_TRUE(put.done());
  const PutReport report = put.TakeReport();
  EXPECT_TRUE(report.blocks[0].status.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(report.blocks[1].status));
  EXPECT_TRUE(absl::IsInvalidArgument(report.blocks[2].status));
}

TEST_F(PutProgressTest, FramesHaveAnySizeAndALevel) {
  path_.form = BlockForm::kFrame;
  path_.quality = Quality::kHigh;
  path_.beside_exact = true;
  path_.compute_seconds_per_token = 0.25;
  const std::string large((std::size_t{2} << 20) + 5, 'f');
  blocks_[0] = blocks_[0].first(7);
  blocks_[1] = AsBytes(large);
  blocks_[2] = {};
  PutProgress put(path_, geometry_);
  const v1::PutAnnounce announce = put.Announce(1);
  EXPECT_EQ(announce.encoding(), v1::ENCODING_FRAME);
  EXPECT_EQ(announce.quality(), v1::QUALITY_HIGH);
  EXPECT_TRUE(announce.beside_exact());
  EXPECT_EQ(announce.compute_seconds_per_token(), 0.25);
  EXPECT_EQ(put.ChunkBytesAt(0, 0), 7u);
  EXPECT_EQ(put.ChunkBytesAt(1, 0), 1u << 20);
  EXPECT_EQ(put.ChunkBytesAt(1, std::size_t{2} << 20), 5u);
  put.Accept(Plan({0, 1}));
  put.Accept(Ack(0));
  put.Accept(Ack(1));
  ASSERT_TRUE(put.done());
  EXPECT_TRUE(absl::IsInvalidArgument(put.TakeReport().blocks[2].status));  // an empty one
}

TEST_F(PutProgressTest, RawBlocksAreExact) {
  PutProgress put(path_, geometry_);
  const v1::PutAnnounce announce = put.Announce(1);
  EXPECT_EQ(announce.encoding(), v1::ENCODING_RAW);
  EXPECT_EQ(announce.quality(), v1::QUALITY_EXACT);
  EXPECT_EQ(put.ChunkBytesAt(0, 0), 16u);
  EXPECT_EQ(put.ChunkBytesAt(0, 16), 16u);
}

TEST_F(PutProgressTest, BlockWithoutTokensIsRefused) {
  path_.path.tokens = std::span(tokens_).first(11);
  PutProgress put(path_, geometry_);
  put.Announce(1);
  put.Accept(Ack(0));
  put.Accept(Ack(1));
  ASSERT_TRUE(put.done());
  EXPECT_TRUE(absl::IsInvalidArgument(put.TakeReport().blocks[2].status));
}

TEST_F(PutProgressTest, RefusedPlanFailsThePut) {
  PutProgress put(path_, geometry_);
  put.Announce(1);
  v1::PutPlan plan;
  plan.mutable_status()->set_code(8);
  put.Accept(plan);
  ASSERT_TRUE(put.done());
  for (const PutBlockReport& block : put.TakeReport().blocks) {
    EXPECT_TRUE(absl::IsResourceExhausted(block.status));
  }
}

TEST_F(PutProgressTest, UnavailablePlanIsForALaterAttempt) {
  PutProgress put(path_, geometry_);
  put.Announce(1);
  v1::PutPlan plan;
  plan.mutable_status()->set_code(14);
  put.Accept(plan);
  EXPECT_TRUE(put.attempt_done());
  EXPECT_FALSE(put.done());
}

TEST_F(PutProgressTest, OneFailedBlockLeavesTheOthersStored) {
  PutProgress put(path_, geometry_);
  put.Announce(1);
  put.Accept(Plan({0, 1, 2}));
  put.Accept(Ack(0));
  put.Accept(Ack(1, /*code=*/3));
  put.Accept(Ack(2, /*code=*/9));
  put.Accept(v1::PutDone());
  const PutReport report = put.TakeReport();
  EXPECT_EQ(report.stored_blocks, 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(report.blocks[1].status));
  EXPECT_TRUE(absl::IsFailedPrecondition(report.blocks[2].status));
}

TEST_F(PutProgressTest, BlockWithoutAnAnswerIsNotStored) {
  PutProgress put(path_, geometry_);
  put.Announce(1);
  put.Accept(Plan({0, 1, 2}));
  put.Accept(Ack(0));
  put.Accept(v1::PutDone());
  const PutReport report = put.TakeReport();
  EXPECT_EQ(report.stored_blocks, 1u);
  EXPECT_FALSE(report.blocks[1].status.ok());
}

TEST(PutChunkBytesTest, NoChunkSpansTwoLayersOrIsOverAMebibyte) {
  EXPECT_THAT(PutChunkBytes(KvGeometry(Spec(3, 2))), ElementsAre(16, 16, 16));
  ModelSpec large = Spec(1, 4096);
  large.block_tokens = 300;  // 300 x 8,192 bytes
  EXPECT_THAT(PutChunkBytes(KvGeometry(large)), ElementsAre(1 << 20, 1 << 20, 360'448));
}

// A codec that codes without loss, since there is no profile; which frames use references is the
// encoder's own test.
class PutReferencesTest : public PutProgressTest {
 protected:
  PutReferencesTest() {
    path_.quality = Quality::kHigh;
    path_.use_references = true;
  }
  PutProgress Make(bool with_source = true) {
    PathEncoder::ReferencesOf source;
    if (with_source) source = [](std::span<const TrieNodeId>) { return DecodedReferences(); };
    return PutProgress(path_, geometry_, std::make_shared<FrameCodec>(Spec(2, 2), nullptr), 1,
                       source);
  }
};

TEST_F(PutReferencesTest, TheServerIsAskedWhereTheyCanBeUsed) {
  EXPECT_TRUE(Make().Announce(1).want_references());
  EXPECT_FALSE(Make(/*with_source=*/false).Announce(1).want_references());
  path_.eager = true;
  EXPECT_FALSE(Make().Announce(1).want_references());
  path_.eager = false;
  path_.quality = Quality::kExact;
  EXPECT_FALSE(Make().Announce(1).want_references());
  path_.quality = Quality::kHigh;
  path_.use_references = false;
  EXPECT_FALSE(Make().Announce(1).want_references());
}

TEST_F(PutReferencesTest, AFailureThatHasNothingToDoWithThemStands) {
  PutProgress put = Make();
  put.Announce(1);
  put.Accept(Plan({0, 1, 2}));
  while (!put.to_send().empty()) {
    EXPECT_FALSE(put.SendingBytes().empty());
    put.to_send().pop_front();
  }
  constexpr std::uint32_t kFailedPrecondition = 9;
  for (const std::uint32_t block : {0u, 1u, 2u}) put.Accept(Ack(block, kFailedPrecondition));
  put.Accept(v1::PutDone());
  EXPECT_FALSE(put.blocks_to_retry());
  ASSERT_TRUE(put.done());
  EXPECT_TRUE(absl::IsFailedPrecondition(put.TakeReport().blocks[0].status));
}

}  // namespace
}  // namespace kvtrie
