#include "server/worker/codec_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/worker/worker_blocks.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

class CodecChecksTest : public testing::Test {
 protected:
  std::string Message(const v1::CodecItem& item, CodecOp op) const {
    return std::string(CheckItem(item, op, model_, limits_).message());
  }

  const WorkerBlocks blocks_{1};
  const CodecModel model_{blocks_.spec()};
  CodecLimits limits_;
};

TEST_F(CodecChecksTest, GoodItemsBecomeJobs) {
  v1::CodecItem item = blocks_.ToEncode(0);
  item.set_importance(std::string(64, '\0'));
  ASSERT_TRUE(CheckItem(item, CodecOp::kEncode, model_, limits_).ok());
  const auto job = JobOf(item, CodecOp::kEncode, std::make_shared<const CodecModel>(model_));
  EXPECT_EQ(job->tokens.size(), 16u);
  EXPECT_EQ(job->importance.size(), 16u);
  EXPECT_EQ(job->session_tokens, 16u);
  EXPECT_EQ(job->quality, Quality::kHigh);
  EXPECT_EQ(job->profile, blocks_.profile_id());
  EXPECT_TRUE(CheckItem(blocks_.ToDecode(0, 500), CodecOp::kDecode, model_, limits_).ok());
}

TEST_F(CodecChecksTest, AnOversizedItemIsRefusedByTheLimitThatItExceeds) {
  limits_.item_bytes_max = blocks_.raw_bytes() - 1;
  EXPECT_THAT(Message(blocks_.ToEncode(0), CodecOp::kEncode), HasSubstr("--item_bytes_max"));
  EXPECT_THAT(Message(blocks_.ToDecode(0, 500), CodecOp::kDecode), HasSubstr("--item_bytes_max"));
}

TEST_F(CodecChecksTest, ADecodingItemSaysNothingThatItsFrameSays) {
  v1::CodecItem item = blocks_.ToDecode(0, 500);
  item.set_quality(v1::QUALITY_HIGH);
  EXPECT_THAT(Message(item, CodecOp::kDecode), HasSubstr("quality"));
  item = blocks_.ToDecode(0, 500);
  item.add_runs();
  EXPECT_THAT(Message(item, CodecOp::kDecode), HasSubstr("runs"));
  EXPECT_THAT(Message(blocks_.ToDecode(0, std::size_t{1} << 40), CodecOp::kDecode),
              HasSubstr("block_bytes"));
  EXPECT_THAT(Message(blocks_.ToDecode(0, 0), CodecOp::kDecode), HasSubstr("block_bytes"));
}

TEST_F(CodecChecksTest, ReferencesAreThoseThatAFrameMayHave) {
  const auto with_references = [&](int count) {
    v1::CodecItem item = blocks_.ToEncode(0);
    for (int i = 0; i < count; ++i) {
      v1::CodecReference* const reference = item.add_references();
      reference->set_node_id(std::string(15, 'n') + static_cast<char>('a' + i));
      reference->set_tokens(item.tokens());
      reference->set_frame_bytes(1000);
    }
    return item;
  };
  v1::CodecItem item = with_references(1);
  item.add_runs()->set_token_count(16);
  EXPECT_EQ(Message(item, CodecOp::kEncode), "");
  EXPECT_THAT(Message(with_references(17), CodecOp::kEncode), HasSubstr("references: 17"));
  EXPECT_THAT(Message(with_references(1), CodecOp::kEncode), HasSubstr("runs"));
  item.mutable_runs(0)->set_first_token(1);  // one token behind the block's end
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("runs"));
  item.mutable_runs(0)->set_first_token(0);
  item.mutable_references(0)->mutable_tokens()->back() ^= 1;
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("runs[0]: tokens from 0"));
  item = with_references(2);
  item.mutable_references(1)->set_node_id(item.references(0).node_id());
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("twice"));
  item = with_references(1);
  item.mutable_references(0)->set_node_id(std::string(16, '\0'));
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("zero"));
  item = with_references(1);
  item.mutable_references(0)->set_frame_bytes(std::uint64_t{1} << 62);
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("frame_bytes"));
  item = with_references(1);
  item.mutable_references(0)->set_tokens("1234");
  EXPECT_THAT(Message(item, CodecOp::kEncode), HasSubstr("references[0].tokens"));
}

TEST_F(CodecChecksTest, BlocksWithALayoutOfTheirOwnAreCodedExactOnly) {
  ModelSpec spec = blocks_.spec();
  spec.layout_tag = "engine:1";
  const CodecModel opaque{spec};
  EXPECT_TRUE(
      CheckItem(blocks_.ToEncode(0, v1::QUALITY_EXACT), CodecOp::kEncode, opaque, limits_).ok());
  EXPECT_THAT(
      std::string(CheckItem(blocks_.ToEncode(0), CodecOp::kEncode, opaque, limits_).message()),
      HasSubstr("layout_tag"));
}

TEST_F(CodecChecksTest, AFitNeedsLevelsWithSteps) {
  v1::FitOpen open;
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("open.model"));
  *open.mutable_model() = ModelSpecToProto(blocks_.spec());
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("open.levels"));
  v1::FitLevel* const level = open.add_levels();
  level->set_quality(v1::QUALITY_HIGH);
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("step"));
  level->set_step(0.5);
  EXPECT_TRUE(CheckFitOpen(open, limits_).ok());
  *open.add_levels() = *level;
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("twice"));
  open.mutable_levels(1)->set_quality(v1::QUALITY_EXACT);
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("quality"));
  open.mutable_levels()->RemoveLast();
  open.set_material_bytes(std::uint64_t{1} << 60);
  EXPECT_THAT(std::string(CheckFitOpen(open, limits_).message()), HasSubstr("--fit_bytes_max"));
}

}  // namespace
}  // namespace kvtrie
