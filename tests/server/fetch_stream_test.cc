#include "server/fetch_stream.h"

#include <gmock/gmock.h>

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t kNotFound = 5;

class FetchStreamTest : public ::testing::Test {
 protected:
  void Start(const std::function<void(ServerConfig*)>& change = {}) {
    server_ = std::make_unique<RunningServer>(change);
    model_ = server_->RegisterModel();
  }
  v1::FetchRequest ByPath(std::uint32_t block_count, std::uint32_t seed = 1) {
    v1::FetchRequest request;
    request.mutable_prefix()->set_model_id(model_);
    request.mutable_prefix()->set_tokens(PathTokens(block_count, seed));
    return request;
  }

  std::unique_ptr<RunningServer> server_;
  std::string model_;
};

TEST_F(FetchStreamTest, BlocksOfAPathComeInOrderOfTheirRange) {
  Start();
  PutPath(server_->cache(), model_, 8);
  v1::FetchRequest request = ByPath(8);
  request.set_first_block(2);
  request.set_block_count(3);
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  ASSERT_EQ(fetched.results.size(), 3u);
  // The index counts within the request.
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(fetched.results[i].block_index(), i);
    EXPECT_EQ(fetched.results[i].bytes(), kTestBlockBytes);
    EXPECT_EQ(fetched.content.at(i), BlockContent(2 + i));
  }
}

TEST_F(FetchStreamTest, MissingBlocksAreNotFoundInTheirPlace) {
  Start();
  PutPath(server_->cache(), model_, 2);
  const std::string nodes = LookUp(server_->cache(), model_, PathTokens(2)).blocks(0).node_ids();
  v1::FetchRequest request;
  request.set_model_id(model_);
  request.set_node_ids(nodes.substr(0, 16) + std::string(16, 'n') + nodes.substr(16) +
                       std::string(16, 'm'));
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok());
  ASSERT_EQ(fetched.results.size(), 4u);
  EXPECT_EQ(fetched.result(1)->status().code(), kNotFound);
  EXPECT_EQ(fetched.result(3)->status().code(), kNotFound);
  EXPECT_EQ(fetched.content.size(), 2u);
  EXPECT_EQ(fetched.content.at(2), BlockContent(1));
}

TEST_F(FetchStreamTest, NothingAskedIsAnEmptyAnswer) {
  Start();
  v1::FetchRequest request;
  request.set_model_id(model_);
  const Fetched fetched = Fetch(server_->cache(), request);
  EXPECT_TRUE(fetched.status.ok());
  EXPECT_EQ(fetched.message_count, 0u);
}

TEST_F(FetchStreamTest, ManyMissesFitIntoMessages) {
  Start();
  v1::FetchRequest request;
  request.set_model_id(model_);
  std::string nodes;
  for (std::uint32_t i = 0; i < 20'000; ++i) {
    std::string id(16, '\1');
    std::memcpy(id.data(), &i, sizeof i);
    nodes += id;
  }
  request.set_node_ids(nodes);
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  EXPECT_EQ(fetched.results.size(), 20'000u);
}

TEST_F(FetchStreamTest, LayerMajorSendsAllBlocksOfALayerBeforeTheNext) {
  Start();
  PutPath(server_->cache(), model_, 4);
  v1::FetchRequest request = ByPath(4);
  request.set_order(v1::FETCH_ORDER_LAYER_MAJOR);
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  EXPECT_EQ(fetched.results.size(), 4u);
  std::size_t layer_before = 0;
  for (const v1::Chunk& chunk : fetched.chunks) {
    const std::size_t layer = chunk.offset() / kTestLayerBytes;
    EXPECT_GE(layer, layer_before);
    layer_before = layer;
  }
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(fetched.content.at(i), BlockContent(i));
}

TEST_F(FetchStreamTest, LayerRangeSendsOnlyThoseLayers) {
  Start();
  PutPath(server_->cache(), model_, 2);
  v1::FetchRequest request = ByPath(2);
  request.set_first_layer(1);
  request.set_layer_count(1);
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  for (const v1::Chunk& chunk : fetched.chunks) EXPECT_GE(chunk.offset(), kTestLayerBytes);
  for (std::uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(fetched.content.at(i).substr(kTestLayerBytes),
              BlockContent(i).substr(kTestLayerBytes));
    EXPECT_EQ(fetched.result(i)->bytes(), kTestBlockBytes);
  }
  request.set_first_layer(2);
  EXPECT_EQ(Fetch(server_->cache(), request).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(FetchStreamTest, FramesTravelWholeAndCanBePutAgain) {
  Start();
  PutPath(server_->cache(), model_, 1);
  v1::FetchRequest request = ByPath(1);
  request.set_encoding(v1::ENCODING_FRAME);
  const Fetched fetched = Fetch(server_->cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  const std::string& frame = fetched.content.at(0);
  EXPECT_EQ(fetched.result(0)->bytes(), frame.size());
  EXPECT_GT(frame.size(), kTestBlockBytes);

  // Into another server, as it is.
  RunningServer other;
  const std::string model = other.RegisterModel();
  grpc::ClientContext context;
  auto stream = other.cache().Put(&context);
  v1::PutRequest put;
  v1::PutAnnounce* announce = Announce(1, model, PathTokens(1), &put);
  announce->set_eager(true);
  announce->set_encoding(v1::ENCODING_FRAME);
  AddBlock(1, 0, frame, &put);
  ASSERT_TRUE(stream->Write(put));
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  ASSERT_TRUE(stream->Finish().ok());
  ASSERT_EQ(all.dones_size(), 1);
  EXPECT_EQ(all.dones(0).stored_blocks(), 1u) << all.DebugString();
  v1::FetchRequest raw;
  raw.mutable_prefix()->set_model_id(model);
  raw.mutable_prefix()->set_tokens(PathTokens(1));
  EXPECT_EQ(Fetch(other.cache(), raw).content.at(0), BlockContent(0));
}

TEST_F(FetchStreamTest, MessagesStayNearTheirAim) {
  Start([](ServerConfig* config) { config->read_ahead_bytes = std::size_t{64} << 10; });
  PutPath(server_->cache(), model_, 100);
  const Fetched fetched = Fetch(server_->cache(), ByPath(100));
  ASSERT_TRUE(fetched.status.ok());
  EXPECT_EQ(fetched.content.size(), 100u);
  EXPECT_LE(fetched.message_bytes_max, FetchMessage::kTargetBytes + (1u << 20));
}

TEST_F(FetchStreamTest, FramesThatLeftMemoryAreReadFromTheDisk) {
  Start([](ServerConfig* config) { config->engine.memory_tier_bytes = std::uint64_t{1} << 20; });
  PutPath(server_->cache(), model_, 128);
  for (const auto order : {v1::FETCH_ORDER_BLOCK_MAJOR, v1::FETCH_ORDER_LAYER_MAJOR}) {
    v1::FetchRequest request = ByPath(128);
    request.set_order(order);
    const Fetched fetched = Fetch(server_->cache(), request);
    ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
    for (std::uint32_t i = 0; i < 128; ++i) ASSERT_EQ(fetched.content.at(i), BlockContent(i));
  }
  EXPECT_GT(server_->server().engine().Stats().disk_reads_total, 0u);
  // gRPC lets go of the last slices a moment after the client has them.
  AwaitTrue([this] { return server_->server().stream_budget().used_bytes() == 0; });
}

TEST_F(FetchStreamTest, StreamsShareALimitOfMemoryAndAllEnd) {
  Start([](ServerConfig* config) {
    config->stream_memory_bytes = std::size_t{128} << 10;
    config->read_ahead_bytes = std::size_t{64} << 10;
  });
  PutPath(server_->cache(), model_, 64);
  std::vector<std::thread> readers;
  for (int i = 0; i < 8; ++i) {
    readers.emplace_back([this, i] {
      v1::FetchRequest request = ByPath(64);
      request.set_order(i % 2 == 0 ? v1::FETCH_ORDER_BLOCK_MAJOR : v1::FETCH_ORDER_LAYER_MAJOR);
      const Fetched fetched = Fetch(server_->cache(), request);
      EXPECT_TRUE(fetched.status.ok()) << fetched.status.error_message();
      for (std::uint32_t b = 0; b < 64; ++b) EXPECT_EQ(fetched.content.at(b), BlockContent(b));
    });
  }
  for (std::thread& reader : readers) reader.join();
}

TEST_F(FetchStreamTest, SlowReaderIsEndedAndHoldsNothing) {
  Start([](ServerConfig* config) {
    config->stream_stall_limit = std::chrono::milliseconds(200);
    config->read_ahead_bytes = std::size_t{1} << 20;
  });
  PutPath(server_->cache(), model_, 400);  // 12.5 MiB: more than all windows and buffers
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65'536);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto stub =
      v1::Cache::NewStub(RunningServer::Connect(server_->server().addresses().listen, arguments));
  grpc::ClientContext context;
  auto stream = stub->Fetch(&context, ByPath(400));
  v1::FetchResponse first;
  ASSERT_TRUE(stream->Read(&first));
  AwaitTrue([this] { return server_->server().streams().stalled_total() == 1; });
  v1::FetchResponse response;
  while (stream->Read(&response)) {
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("no progress"));
  AwaitTrue([this] { return server_->server().stream_budget().used_bytes() == 0; });
  AwaitTrue([this] { return server_->server().streams().stream_count() == 0; });
}

TEST_F(FetchStreamTest, ReadersThatStopDoNotKeepOthersWaiting) {
  Start([](ServerConfig* config) {
    config->stream_memory_bytes = std::size_t{8} << 20;
    config->read_ahead_bytes = std::size_t{4} << 20;
  });
  PutPath(server_->cache(), model_, 400);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65'536);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto stub =
      v1::Cache::NewStub(RunningServer::Connect(server_->server().addresses().listen, arguments));
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::FetchResponse>>> stopped;
  for (int i = 0; i < 16; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    stopped.push_back(stub->Fetch(contexts.back().get(), ByPath(400)));
    v1::FetchResponse first;
    ASSERT_TRUE(stopped.back()->Read(&first));
  }
  // Well below the stall limit, which would end them.
  const auto began = std::chrono::steady_clock::now();
  for (std::uint32_t seed = 2; seed < 6; ++seed) {
    EXPECT_EQ(PutPath(server_->cache(), model_, 2, seed).dones(0).stored_blocks(), 2u);
    const Fetched fetched = Fetch(server_->cache(), ByPath(2, seed));
    EXPECT_TRUE(fetched.status.ok()) << fetched.status.error_message();
    EXPECT_EQ(fetched.content.at(1), BlockContent(1, seed));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  for (const auto& context : contexts) context->TryCancel();
  for (const auto& stream : stopped) stream->Finish();
}

TEST_F(FetchStreamTest, CancelledReaderHoldsNothing) {
  Start();
  PutPath(server_->cache(), model_, 400);
  grpc::ClientContext context;
  auto stream = server_->cache().Fetch(&context, ByPath(400));
  v1::FetchResponse first;
  ASSERT_TRUE(stream->Read(&first));
  context.TryCancel();
  AwaitTrue([this] { return server_->server().streams().stream_count() == 0; });
  AwaitTrue([this] { return server_->server().stream_budget().used_bytes() == 0; });
  AwaitTrue([this] { return server_->server().metrics().in_flight() == 0; });
}

TEST_F(FetchStreamTest, LeaseIsReleasedWithTheStream) {
  Start();
  PutPath(server_->cache(), model_, 1);
  v1::LookupRequest lookup;
  v1::LookupQuery* query = lookup.add_queries();
  query->add_model_ids(model_);
  query->set_tokens(PathTokens(1));
  query->set_lease_ms(60'000);
  v1::LookupResponse found;
  grpc::ClientContext context;
  ASSERT_TRUE(server_->cache().Lookup(&context, lookup, &found).ok());
  ASSERT_EQ(server_->server().engine().Stats().lease_count, 1u);
  v1::FetchRequest request = ByPath(1);
  request.set_release_lease_id(found.results(0).lease_id());
  EXPECT_TRUE(Fetch(server_->cache(), request).status.ok());
  AwaitTrue([this] { return server_->server().engine().Stats().lease_count == 0; });
}

}  // namespace
}  // namespace kvtrie
