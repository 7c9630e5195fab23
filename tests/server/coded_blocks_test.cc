// Coded frames over the wire: put, looked up, fetched as they are and decoded.

#include "tests/server/coded_blocks.h"

#include <gmock/gmock.h>

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr int kInvalidArgument = 3;
constexpr int kFailedPrecondition = 9;
constexpr std::uint32_t kBlocks = 4;

class CodedBlocksTest : public testing::Test {
 protected:
  explicit CodedBlocksTest(std::shared_ptr<const BlockCodec> codec = std::make_shared<FakeCodec>())
      : codec_(std::move(codec)), server_({}, codec_) {
    model_ = server_.RegisterModel();
    profile_ = MustPutProfile(server_.cache(), TestProfile());
  }

  v1::LookupResult LookUpAt(v1::Quality quality) {
    v1::LookupRequest request;
    v1::LookupQuery* query = request.add_queries();
    query->add_model_ids(model_);
    query->set_tokens(PathTokens(kBlocks));
    query->set_want_blocks(true);
    query->set_min_quality(quality);
    v1::LookupResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(server_.cache().Lookup(&context, request, &response).ok());
    return response.results(0);
  }
  v1::FetchRequest FetchAt(v1::Quality quality, v1::Encoding encoding = v1::ENCODING_RAW) {
    v1::FetchRequest request;
    request.set_model_id(model_);
    request.set_node_ids(LookUpAt(v1::QUALITY_UNRATED).blocks(0).node_ids());
    request.set_min_quality(quality);
    request.set_encoding(encoding);
    return request;
  }

  const FakeCodec& codec() const { return dynamic_cast<const FakeCodec&>(*codec_); }

  const std::shared_ptr<const BlockCodec> codec_;
  RunningServer server_;
  std::string model_;
  ProfileId profile_;
};

class CodedBlocksWithoutDecoderTest : public CodedBlocksTest {
 protected:
  CodedBlocksWithoutDecoderTest() : CodedBlocksTest(nullptr) {}
};

TEST_F(CodedBlocksTest, AreServedAsTheyAreAndDecoded) {
  const v1::PutResponse put = PutCodedPath(server_.cache(), model_, profile_, kBlocks);
  ASSERT_EQ(put.dones(0).stored_blocks(), kBlocks);
  EXPECT_EQ(LookUpAt(v1::QUALITY_EXACT).matched_blocks(), 0u);
  const v1::LookupResult found = LookUpAt(v1::QUALITY_SMALL);
  EXPECT_EQ(found.matched_blocks(), kBlocks);
  EXPECT_EQ(found.quality(), v1::QUALITY_HIGH);

  const Fetched frames = Fetch(server_.cache(), FetchAt(v1::QUALITY_HIGH, v1::ENCODING_FRAME));
  const Fetched raw = Fetch(server_.cache(), FetchAt(v1::QUALITY_HIGH));
  ASSERT_TRUE(raw.status.ok()) << raw.status.error_message();
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(frames.content.at(i), MakeCodedFrame(model_, profile_, i));
    EXPECT_EQ(raw.content.at(i), DecodedContent(i));
    for (const Fetched* fetched : {&frames, &raw}) {
      const v1::BlockResult* result = fetched->result(i);
      EXPECT_EQ(result->rung(), v1::RUNG_CODED);
      EXPECT_EQ(result->quality(), v1::QUALITY_HIGH);
      EXPECT_EQ(result->codec(), v1::CODEC_RESIDUAL);
    }
    EXPECT_EQ(raw.result(i)->bytes(), kTestBlockBytes);
  }
  // Never less than asked.
  const Fetched better = Fetch(server_.cache(), FetchAt(v1::QUALITY_NEAR_EXACT));
  EXPECT_TRUE(better.content.empty());
  for (const v1::BlockResult& result : better.results) EXPECT_EQ(result.status().code(), 5u);
}

TEST_F(CodedBlocksTest, LayersOfDecodedBlocksComeInOrderAndInRanges) {
  PutCodedPath(server_.cache(), model_, profile_, kBlocks);
  v1::FetchRequest request = FetchAt(v1::QUALITY_HIGH);
  request.set_order(v1::FETCH_ORDER_LAYER_MAJOR);
  const Fetched layers = Fetch(server_.cache(), request);
  ASSERT_TRUE(layers.status.ok()) << layers.status.error_message();
  ASSERT_EQ(layers.chunks.size(), 2 * kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(layers.content.at(i), DecodedContent(i));
    EXPECT_EQ(layers.chunks[i].offset(), 0u);
    EXPECT_EQ(layers.chunks[kBlocks + i].offset(), kTestLayerBytes);
  }
  request = FetchAt(v1::QUALITY_HIGH);
  request.set_first_layer(1);
  request.set_layer_count(1);
  const Fetched second = Fetch(server_.cache(), request);
  ASSERT_TRUE(second.status.ok()) << second.status.error_message();
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(second.content.at(i).substr(kTestLayerBytes),
              DecodedContent(i).substr(kTestLayerBytes));
  }
}

TEST_F(CodedBlocksTest, BlocksAreDecodedTogetherAndOnceForAllTheirLayers) {
  constexpr std::uint32_t kMany = 300;
  ASSERT_EQ(PutCodedPath(server_.cache(), model_, profile_, kMany).dones(0).stored_blocks(), kMany);
  v1::FetchRequest request;
  request.mutable_prefix()->set_model_id(model_);
  request.mutable_prefix()->set_tokens(PathTokens(kMany));
  request.set_min_quality(v1::QUALITY_HIGH);
  for (const v1::FetchOrder order : {v1::FETCH_ORDER_BLOCK_MAJOR, v1::FETCH_ORDER_LAYER_MAJOR}) {
    const int calls_before = codec().calls;
    const std::size_t blocks_before = codec().blocks;
    request.set_order(order);
    const Fetched fetched = Fetch(server_.cache(), request);
    ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
    for (std::uint32_t i = 0; i < kMany; ++i) EXPECT_EQ(fetched.content.at(i), DecodedContent(i));
    EXPECT_EQ(codec().blocks - blocks_before, kMany);
    // 2 MiB at least: 64 blocks of 32 KiB.
    EXPECT_LE(codec().calls - calls_before, 6);
  }
}

TEST_F(CodedBlocksTest, FramesComeLayerByLayer) {
  PutPath(server_.cache(), model_, kBlocks);
  v1::FetchRequest request = FetchAt(v1::QUALITY_EXACT, v1::ENCODING_FRAME);
  request.set_order(v1::FETCH_ORDER_LAYER_MAJOR);
  const Fetched exact = Fetch(server_.cache(), request);
  ASSERT_TRUE(exact.status.ok()) << exact.status.error_message();
  ASSERT_EQ(exact.chunks.size(), 3 * kBlocks);  // head and first layer of each, then the second one
  for (std::uint32_t i = 0; i < 3 * kBlocks; ++i) {
    EXPECT_EQ(exact.chunks[i].block_index(), i < 2 * kBlocks ? i / 2 : i - 2 * kBlocks) << i;
  }
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    const std::string& frame = exact.content.at(i);
    EXPECT_EQ(frame.size(), exact.result(i)->bytes());
    EXPECT_EQ(frame.substr(frame.size() - kTestBlockBytes), BlockContent(i));
  }
}

TEST_F(CodedBlocksTest, BothFramesOfABlockServeWhatTheyAreGoodFor) {
  PutPath(server_.cache(), model_, kBlocks);
  EXPECT_EQ(PutCodedPath(server_.cache(), model_, profile_, kBlocks).dones(0).duplicate_blocks(),
            kBlocks);
  const v1::PutResponse put =
      PutCodedPath(server_.cache(), model_, profile_, kBlocks, 1, /*beside_exact=*/true);
  EXPECT_EQ(put.dones(0).stored_blocks(), kBlocks);
  const Fetched small = Fetch(server_.cache(), FetchAt(v1::QUALITY_SMALL));
  const Fetched exact = Fetch(server_.cache(), FetchAt(v1::QUALITY_EXACT));
  v1::FetchRequest by_prefix;
  by_prefix.mutable_prefix()->set_model_id(model_);
  by_prefix.mutable_prefix()->set_tokens(PathTokens(kBlocks));
  const Fetched whole = Fetch(server_.cache(), by_prefix);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    EXPECT_EQ(small.content.at(i), DecodedContent(i));
    EXPECT_EQ(small.result(i)->rung(), v1::RUNG_CODED);
    EXPECT_EQ(exact.content.at(i), BlockContent(i));
    EXPECT_EQ(exact.result(i)->rung(), v1::RUNG_EXACT);
    EXPECT_EQ(exact.result(i)->codec(), v1::CODEC_RAW);
    EXPECT_EQ(whole.content.at(i), BlockContent(i));
  }
  // The level that is kept.
  v1::SetRetentionRequest request;
  request.mutable_selection()->mutable_prefix()->set_model_id(model_);
  request.mutable_selection()->mutable_prefix()->set_tokens(PathTokens(kBlocks));
  request.set_quality(v1::QUALITY_HIGH);
  v1::SetRetentionResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server_.cache().SetRetention(&context, request, &response).ok());
  EXPECT_EQ(response.dropped_frames(), kBlocks);
  EXPECT_EQ(response.changed_blocks(), kBlocks);
  EXPECT_EQ(response.unchanged_blocks(), 0u);
  EXPECT_EQ(LookUpAt(v1::QUALITY_EXACT).matched_blocks(), 0u);
  EXPECT_EQ(LookUpAt(v1::QUALITY_HIGH).matched_blocks(), kBlocks);
}

TEST_F(CodedBlocksTest, BadFramesFailAlone) {
  grpc::ClientContext context;
  auto stream = server_.cache().Put(&context);
  v1::PutRequest request;
  v1::PutAnnounce* announce = Announce(1, model_, PathTokens(kBlocks), &request);
  announce->set_eager(true);
  announce->set_encoding(v1::ENCODING_FRAME);
  announce->set_quality(v1::QUALITY_HIGH);
  AddBlock(1, 0, MakeCodedFrame(model_, profile_, 0), &request);
  AddBlock(1, 1, MakeCodedFrame(model_, profile_, 0), &request);  // of another place
  AddBlock(1, 2, MakeCodedFrame(model_, profile_, 2), &request);  // hangs on the one before
  AddBlock(1, 3, MakeCodedFrame(model_, profile_, 3, 1, Quality::kSmall), &request);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  ASSERT_TRUE(stream->Finish().ok());
  std::map<std::uint32_t, v1::ItemStatus> acks;
  for (const v1::PutAck& ack : all.acks()) acks[ack.block_index()] = ack.status();
  ASSERT_EQ(acks.size(), kBlocks);
  EXPECT_EQ(acks[0].code(), 0u);
  EXPECT_EQ(acks[1].code(), static_cast<std::uint32_t>(kInvalidArgument));
  EXPECT_THAT(acks[1].message(), HasSubstr("first_position"));
  EXPECT_EQ(acks[2].code(), static_cast<std::uint32_t>(kFailedPrecondition));
  EXPECT_EQ(acks[3].code(), static_cast<std::uint32_t>(kInvalidArgument));
  EXPECT_THAT(acks[3].message(), HasSubstr("announced at least high"));
  EXPECT_EQ(LookUpAt(v1::QUALITY_HIGH).matched_blocks(), 1u);
}

TEST_F(CodedBlocksTest, AProfileThatIsNotHereIsNamed) {
  ProfileId missing;
  missing.bytes.fill(0x42);
  const v1::PutResponse put = PutCodedPath(server_.cache(), model_, missing, 1);
  ASSERT_EQ(put.acks_size(), 1);
  EXPECT_EQ(put.acks(0).status().code(), static_cast<std::uint32_t>(kFailedPrecondition));
  EXPECT_THAT(put.acks(0).status().message(),
              testing::AllOf(HasSubstr(missing.ToHex()), HasSubstr("PutProfile")));
}

TEST_F(CodedBlocksTest, NodesTellTheirFrames) {
  PutCodedPath(server_.cache(), model_, profile_, kBlocks);
  PutPath(server_.cache(), model_, kBlocks);
  v1::DescribeNodeRequest request;
  request.set_node_id(LookUpAt(v1::QUALITY_HIGH).blocks(0).node_ids().substr(0, 16));
  v1::DescribeNodeResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server_.admin().DescribeNode(&context, request, &response).ok());
  ASSERT_EQ(response.node().rungs_size(), 2);
  EXPECT_EQ(response.node().rungs(0).rung(), v1::RUNG_CODED);
  EXPECT_EQ(response.node().rungs(0).quality(), v1::QUALITY_HIGH);
  EXPECT_EQ(response.node().rungs(0).codec(), v1::CODEC_RESIDUAL);
  EXPECT_EQ(response.node().rungs(1).rung(), v1::RUNG_EXACT);
  EXPECT_EQ(response.node().quality(), v1::QUALITY_EXACT);
  v1::GetStatusResponse status;
  grpc::ClientContext status_context;
  ASSERT_TRUE(server_.admin().GetStatus(&status_context, {}, &status).ok());
  ASSERT_EQ(status.codecs_size(), 2);
  EXPECT_EQ(status.codecs(0).codec(), v1::CODEC_RAW);
  EXPECT_EQ(status.codecs(0).frames(), kBlocks);
  EXPECT_EQ(status.codecs(1).codec(), v1::CODEC_RESIDUAL);
  EXPECT_EQ(status.profile_count(), 1u);
}

TEST_F(CodedBlocksWithoutDecoderTest, CodedBlocksAreServedAsFramesOnly) {
  PutCodedPath(server_.cache(), model_, profile_, kBlocks);
  PutPath(server_.cache(), model_, 1);
  const Fetched frames = Fetch(server_.cache(), FetchAt(v1::QUALITY_HIGH, v1::ENCODING_FRAME));
  EXPECT_EQ(frames.content.size(), kBlocks);
  for (const v1::FetchOrder order : {v1::FETCH_ORDER_BLOCK_MAJOR, v1::FETCH_ORDER_LAYER_MAJOR}) {
    v1::FetchRequest request = FetchAt(v1::QUALITY_HIGH);
    request.set_order(order);
    const Fetched raw = Fetch(server_.cache(), request);
    ASSERT_TRUE(raw.status.ok()) << raw.status.error_message();
    // What is stored exact besides is served so.
    EXPECT_EQ(raw.content.size(), 1u);
    EXPECT_EQ(raw.content.at(0), BlockContent(0));
    ASSERT_EQ(raw.results.size(), kBlocks);
    for (const v1::BlockResult& result : raw.results) {
      if (result.block_index() == 0) continue;
      EXPECT_EQ(result.status().code(), static_cast<std::uint32_t>(kFailedPrecondition));
      EXPECT_EQ(result.status().message(), "stored coded; fetch it as ENCODING_FRAME");
    }
  }
}

}  // namespace
}  // namespace kvtrie
