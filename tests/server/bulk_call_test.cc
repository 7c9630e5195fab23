#include "server/bulk_call.h"

#include <gmock/gmock.h>

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

class BulkCallTest : public ::testing::Test {
 protected:
  void Start(const std::function<void(ServerConfig*)>& change = {}) {
    server_ = std::make_unique<RunningServer>(change);
    model_ = server_->RegisterModel();
  }
  using Stream = grpc::ClientReaderWriter<v1::PutRequest, v1::PutResponse>;

  // Announces a path and waits for the plan.
  v1::PutPlan Plan(Stream& stream, std::uint64_t put_id, std::uint32_t block_count,
                   std::uint32_t seed = 1) {
    v1::PutRequest request;
    Announce(put_id, model_, PathTokens(block_count, seed), &request);
    EXPECT_TRUE(stream.Write(request));
    v1::PutResponse response;
    EXPECT_TRUE(stream.Read(&response));
    return response.plans_size() == 1 ? response.plans(0) : v1::PutPlan();
  }

  std::uint64_t Held() {
    return server_->server().engine().put_budget().used_bytes() +
           server_->server().stream_budget().used_bytes();
  }

  std::unique_ptr<RunningServer> server_;
  std::string model_;
};

TEST_F(BulkCallTest, PlanFirstThenTheMissingBlocks) {
  Start();
  PutPath(server_->cache(), model_, 2);
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  const v1::PutPlan plan = Plan(*stream, 5, 4);
  EXPECT_EQ(plan.block_count(), 4u);
  EXPECT_EQ(plan.block_bytes(), kTestBlockBytes);
  EXPECT_EQ(plan.missing_blocks(), std::string("\2\0\0\0\3\0\0\0", 8));
  v1::PutRequest request;
  AddBlock(5, 2, BlockContent(2), &request);
  AddBlock(5, 3, BlockContent(3), &request);
  ASSERT_TRUE(stream->Write(request));
  v1::PutResponse all;
  v1::PutResponse part;
  while (all.dones_size() == 0 && stream->Read(&part)) all.MergeFrom(part);
  ASSERT_EQ(all.acks_size(), 2);
  EXPECT_EQ(all.dones(0).stored_blocks(), 2u);
  EXPECT_EQ(all.dones(0).duplicate_blocks(), 2u);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(LookUp(server_->cache(), model_, PathTokens(4)).matched_blocks(), 4u);
}

TEST_F(BulkCallTest, ManyPutsShareAStream) {
  Start();
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  constexpr std::uint32_t kPuts = 20;
  for (std::uint32_t put = 1; put <= kPuts; ++put) {
    v1::PutRequest request;
    Announce(put, model_, PathTokens(2, put), &request)->set_eager(true);
    AddBlock(put, 0, BlockContent(0, put), &request);
    AddBlock(put, 1, BlockContent(1, put), &request);
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(all.dones_size(), static_cast<int>(kPuts));
  for (std::uint32_t put = 1; put <= kPuts; ++put) {
    EXPECT_EQ(LookUp(server_->cache(), model_, PathTokens(2, put)).matched_blocks(), 2u);
  }
}

// Answers of earlier blocks are ready while later messages arrive: whichever thread reads on, no
// message may pass another.
TEST_F(BulkCallTest, MessagesStayInOrderWhileAnswersCome) {
  Start();
  constexpr std::uint32_t kPuts = 400;
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  v1::PutResponse all;
  std::thread reader([&] {
    v1::PutResponse part;
    while (stream->Read(&part)) all.MergeFrom(part);
  });
  for (std::uint32_t put = 1; put <= kPuts; ++put) {
    v1::PutRequest request;
    Announce(put, model_, PathTokens(1, put), &request)->set_eager(true);
    ASSERT_TRUE(stream->Write(request));
    v1::PutRequest content;
    AddBlock(put, 0, BlockContent(0, put), &content);
    ASSERT_TRUE(stream->Write(content));
  }
  stream->WritesDone();
  reader.join();
  const grpc::Status status = stream->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(all.dones_size(), static_cast<int>(kPuts));
  for (const v1::PutDone& done : all.dones()) EXPECT_EQ(done.stored_blocks(), 1u);
}

TEST_F(BulkCallTest, FirstBlockBehindThePrefixIsRefused) {
  Start();
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  v1::PutRequest request;
  Announce(1, model_, PathTokens(4), &request)->set_first_block(5);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::PutResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.plans_size(), 1);
  EXPECT_EQ(response.plans(0).status().code(), 3u);  // INVALID_ARGUMENT
  EXPECT_THAT(response.plans(0).status().message(), HasSubstr("first_block"));
}

TEST_F(BulkCallTest, OneBadItemFailsAloneAndTheRestLands) {
  Start();
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  v1::PutRequest request;
  Announce(1, std::string(16, '?'), PathTokens(1, 1), &request)->set_eager(true);
  Announce(2, model_, "odd", &request)->set_eager(true);
  Announce(3, model_, PathTokens(1, 3), &request)->set_eager(true);
  Announce(4, model_, PathTokens(1, 4), &request)->set_eager(true);
  AddBlock(1, 0, BlockContent(0, 1), &request);
  AddBlock(2, 0, BlockContent(0, 2), &request);
  AddBlock(3, 0, BlockContent(0, 3), &request);
  AddBlock(4, 0, BlockContent(0, 4), &request);
  request.mutable_chunks(request.chunks_size() - 1)->set_crc32c(1);
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(all.plans_size(), 4);
  EXPECT_EQ(all.plans(0).status().code(), 5u);  // NOT_FOUND
  EXPECT_EQ(all.plans(1).status().code(), 3u);  // INVALID_ARGUMENT
  EXPECT_THAT(all.plans(1).status().message(), HasSubstr("tokens"));
  EXPECT_EQ(all.plans(2).status().code(), 0u);
  EXPECT_EQ(all.plans(3).status().code(), 0u);
  ASSERT_EQ(all.dones_size(), 2);
  EXPECT_EQ(LookUp(server_->cache(), model_, PathTokens(1, 3)).matched_blocks(), 1u);
  EXPECT_EQ(LookUp(server_->cache(), model_, PathTokens(1, 4)).matched_blocks(), 0u);
}

TEST_F(BulkCallTest, BytesThatAreNoMessageEndTheStream) {
  Start();
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  v1::PutRequest request;
  request.set_data("bytes of no chunk");
  ASSERT_TRUE(stream->Write(request));
  v1::PutResponse response;
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("data"));
}

TEST_F(BulkCallTest, StalledWriterIsEndedAndLeavesNothing) {
  Start([](ServerConfig* config) { config->stream_stall_limit = std::chrono::milliseconds(100); });
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  v1::PutRequest request;
  Announce(1, model_, PathTokens(1), &request)->set_eager(true);
  AddBlock(1, 0, BlockContent(0).substr(0, 10'000), &request);
  ASSERT_TRUE(stream->Write(request));
  v1::PutResponse all;
  v1::PutResponse part;
  while (stream->Read(&part)) all.MergeFrom(part);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(all.acks_size(), 0);
  AwaitTrue([this] { return Held() == 0; });

  // Another writer is not kept out.
  EXPECT_EQ(PutPath(server_->cache(), model_, 1).dones(0).stored_blocks(), 1u);
}

// A byte now and then is no progress: memory of an open block would be held for ever.
TEST_F(BulkCallTest, DrippingWriterIsEnded) {
  Start([](ServerConfig* config) { config->stream_stall_limit = std::chrono::milliseconds(200); });
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  const std::string content = BlockContent(0);
  v1::PutRequest request;
  Announce(1, model_, PathTokens(1), &request)->set_eager(true);
  AddBlock(1, 0, content.substr(0, 1), &request);
  ASSERT_TRUE(stream->Write(request));
  std::thread reader([&] {
    v1::PutResponse part;
    while (stream->Read(&part)) {
    }
  });
  std::size_t offset = 1;
  for (; offset < 4000; ++offset) {
    request.Clear();
    v1::Chunk* chunk = request.add_chunks();
    chunk->set_put_id(1);
    chunk->set_offset(offset);
    chunk->set_bytes(1);
    chunk->set_crc32c(CrcOf(content.substr(offset, 1)));
    request.set_data(content.substr(offset, 1));
    if (!stream->Write(request)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_LT(offset, 4000u);
  reader.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  AwaitTrue([this] { return Held() == 0; });
}

TEST_F(BulkCallTest, IdleStreamsDoNotStall) {
  Start([](ServerConfig* config) { config->stream_stall_limit = std::chrono::milliseconds(100); });
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  Plan(*stream, 1, 1);
  // Several stall limits of another stream go by.
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext stalling;
    auto other = server_->cache().Put(&stalling);
    v1::PutRequest request;
    Announce(1, model_, PathTokens(1, 50), &request)->set_eager(true);
    AddBlock(1, 0, BlockContent(0).substr(0, 10), &request);
    ASSERT_TRUE(other->Write(request));
    v1::PutResponse part;
    while (other->Read(&part)) {
    }
    EXPECT_EQ(other->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  v1::PutRequest request;
  AddBlock(1, 0, BlockContent(0), &request);
  EXPECT_TRUE(stream->Write(request));
  v1::PutResponse response;
  EXPECT_TRUE(stream->Read(&response));
  stream->WritesDone();
  while (stream->Read(&response)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(BulkCallTest, BrokenStreamsLeaveNothing) {
  Start();
  for (std::uint32_t i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    auto stream = server_->cache().Put(&context);
    v1::PutRequest request;
    Announce(1, model_, PathTokens(2, 100 + i), &request)->set_eager(true);
    AddBlock(1, 0, BlockContent(0).substr(0, 10'000), &request);
    ASSERT_TRUE(stream->Write(request));
    context.TryCancel();
    stream->Finish();
  }
  AwaitTrue([this] { return server_->server().streams().stream_count() == 0; });
  AwaitTrue([this] { return Held() == 0; });
  AwaitTrue([this] { return server_->server().engine().Stats().open_puts == 0; });
  EXPECT_EQ(LookUp(server_->cache(), model_, PathTokens(2, 100)).matched_blocks(), 0u);
}

TEST_F(BulkCallTest, WritersWaitForMemoryAndAllFinish) {
  Start([](ServerConfig* config) { config->engine.put_memory_bytes = std::uint64_t{1} << 20; });
  std::vector<std::thread> writers;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    writers.emplace_back([this, seed] {
      EXPECT_EQ(PutPath(server_->cache(), model_, 64, seed).dones(0).stored_blocks(), 64u);
    });
  }
  for (std::thread& writer : writers) writer.join();
  AwaitTrue([this] { return Held() == 0; });
}

TEST_F(BulkCallTest, TooManyStreamsAreUnavailable) {
  Start([](ServerConfig* config) { config->streams_max = 1; });
  grpc::ClientContext context;
  auto stream = server_->cache().Put(&context);
  Plan(*stream, 1, 1);
  grpc::ClientContext second_context;
  auto second = server_->cache().Put(&second_context);
  EXPECT_EQ(second->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace kvtrie
