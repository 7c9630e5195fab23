#include "server/cache_service.h"

#include <gmock/gmock.h>

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

using ::testing::HasSubstr;

constexpr int kOk = 0;
constexpr int kInvalidArgument = 3;
constexpr int kNotFound = 5;
constexpr int kFailedPrecondition = 9;

TEST(CacheServiceTest, RegisterModelIsIdempotentAndSaysTheBlockSize) {
  RunningServer server;
  const std::string id = server.RegisterModel();
  EXPECT_EQ(id.size(), 16u);
  EXPECT_EQ(server.RegisterModel(), id);

  v1::RegisterModelRequest request;
  *request.mutable_spec() = TestSpec();
  request.set_expected_model_id(id);
  v1::RegisterModelResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.cache().RegisterModel(&context, request, &response).ok());
  EXPECT_EQ(response.block_tokens(), kTestBlockTokens);
  EXPECT_EQ(response.raw_block_bytes(), kTestBlockBytes);
}

TEST(CacheServiceTest, RegisterModelRefusesAnotherDigestThanExpected) {
  RunningServer server;
  v1::RegisterModelRequest request;
  *request.mutable_spec() = TestSpec();
  request.set_expected_model_id(std::string(16, 'x'));
  v1::RegisterModelResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(server.cache().RegisterModel(&context, request, &response).error_code(),
            kFailedPrecondition);
}

TEST(CacheServiceTest, WhatIsPutIsFoundAndReadBack) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  const v1::PutResponse put = PutPath(server.cache(), model, 5);
  ASSERT_EQ(put.dones_size(), 1);
  EXPECT_EQ(put.dones(0).stored_blocks(), 5u);

  const v1::LookupResult found = LookUp(server.cache(), model, PathTokens(6));
  EXPECT_EQ(found.matched_blocks(), 5u);
  EXPECT_EQ(found.matched_tokens(), 5 * kTestBlockTokens);
  ASSERT_EQ(found.blocks_size(), 1);
  EXPECT_EQ(found.blocks(0).node_ids().size(), 5u * 16);

  v1::FetchRequest request;
  request.set_model_id(model);
  request.set_node_ids(found.blocks(0).node_ids());
  const Fetched fetched = Fetch(server.cache(), request);
  ASSERT_TRUE(fetched.status.ok()) << fetched.status.error_message();
  ASSERT_EQ(fetched.results.size(), 5u);
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_EQ(fetched.content.at(i), BlockContent(i));
}

TEST(CacheServiceTest, MissIsOkWithZeroBlocks) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  const v1::LookupResult result = LookUp(server.cache(), model, PathTokens(3));
  EXPECT_EQ(result.status().code(), static_cast<std::uint32_t>(kOk));
  EXPECT_EQ(result.matched_blocks(), 0u);
}

TEST(CacheServiceTest, QueriesOfOneLookupAreAnsweredOneByOneInOrder) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 2);
  v1::LookupRequest request;
  const auto add = [&request](const std::string& model_id, const std::string& tokens) {
    v1::LookupQuery* query = request.add_queries();
    query->add_model_ids(model_id);
    query->set_tokens(tokens);
  };
  add(model, PathTokens(2));
  add(model, "odd");                         // not whole tokens
  add(std::string(16, 'q'), PathTokens(2));  // not registered
  add("short", PathTokens(2));               // not an id
  add(model, PathTokens(2, /*seed=*/9));     // a miss
  add(model, PathTokens(1));
  v1::LookupResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.cache().Lookup(&context, request, &response).ok());
  ASSERT_EQ(response.results_size(), 6);
  std::vector<std::pair<int, int>> code_and_blocks;
  for (const auto& result : response.results()) {
    code_and_blocks.emplace_back(result.status().code(), result.matched_blocks());
  }
  EXPECT_THAT(code_and_blocks,
              ::testing::ElementsAre(std::pair(kOk, 2), std::pair(kInvalidArgument, 0),
                                     std::pair(kNotFound, 0), std::pair(kInvalidArgument, 0),
                                     std::pair(kOk, 0), std::pair(kOk, 1)));
}

TEST(CacheServiceTest, LookupWithoutQueriesIsAnEmptyAnswer) {
  RunningServer server;
  v1::LookupResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(server.cache().Lookup(&context, v1::LookupRequest(), &response).ok());
  EXPECT_EQ(response.results_size(), 0);
}

TEST(CacheServiceTest, AMillionTokensAreLookedUpWithDefaultLimits) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 3);
  const v1::LookupResult result = LookUp(server.cache(), model, PathTokens(131'072));
  EXPECT_EQ(result.matched_blocks(), 3u);
}

TEST(CacheServiceTest, BadRequestsAreRefusedWithTheNameOfTheField) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  const auto code = [](const grpc::Status& status, const char* field) {
    EXPECT_THAT(status.error_message(), HasSubstr(field));
    return static_cast<int>(status.error_code());
  };
  {
    v1::PinRequest request;
    request.mutable_selection()->set_session_id("s");
    request.set_seconds(1);
    v1::PinResponse response;
    grpc::ClientContext context;
    EXPECT_EQ(code(server.cache().Pin(&context, request, &response), "selection"),
              kInvalidArgument);
  }
  {
    v1::UnpinRequest request;
    v1::UnpinResponse response;
    grpc::ClientContext context;
    EXPECT_EQ(code(server.cache().Unpin(&context, request, &response), "pin_id"), kInvalidArgument);
  }
  {
    v1::SetRetentionRequest request;
    request.mutable_selection()->set_model_id(model);
    request.set_priority(16);
    v1::SetRetentionResponse response;
    grpc::ClientContext context;
    EXPECT_EQ(code(server.cache().SetRetention(&context, request, &response), "priority"),
              kInvalidArgument);
  }
  {
    v1::DeleteRequest request;
    v1::DeleteResponse response;
    grpc::ClientContext context;
    EXPECT_EQ(code(server.cache().Delete(&context, request, &response), "selection"),
              kInvalidArgument);
  }
}

TEST(CacheServiceTest, PinTouchRetainDeleteWorkOnAPath) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 3);
  v1::Selection path;
  path.mutable_prefix()->set_model_id(model);
  path.mutable_prefix()->set_tokens(PathTokens(3));

  v1::PinRequest pin_request;
  *pin_request.mutable_selection() = path;
  pin_request.set_seconds(60);
  v1::PinResponse pin;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().Pin(&context, pin_request, &pin).ok());
  }
  EXPECT_EQ(pin.pinned_blocks(), 3u);
  for (const bool expected : {true, false}) {
    v1::UnpinRequest request;
    request.set_pin_id(pin.pin_id());
    v1::UnpinResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().Unpin(&context, request, &response).ok());
    EXPECT_EQ(response.existed(), expected);
  }
  {
    v1::TouchRequest request;
    *request.mutable_selection() = path;
    v1::TouchResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().Touch(&context, request, &response).ok());
    EXPECT_EQ(response.touched_blocks(), 3u);
  }
  {
    v1::SetRetentionRequest request;
    *request.mutable_selection() = path;
    request.set_priority(7);
    v1::SetRetentionResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().SetRetention(&context, request, &response).ok());
    EXPECT_EQ(response.changed_blocks(), 3u);
  }
  {
    v1::DeleteRequest request;
    request.mutable_selection()->set_model_id(model);
    v1::DeleteResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().Delete(&context, request, &response).ok());
    EXPECT_EQ(response.deleted_blocks(), 3u);
  }
  EXPECT_EQ(LookUp(server.cache(), model, PathTokens(3)).matched_blocks(), 0u);
}

TEST(CacheServiceTest, SimilarNamesSessionsByPrefixAndByText) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 6, /*seed=*/1);
  PutPath(server.cache(), model, 12, /*seed=*/2);
  v1::SimilarRequest request;
  request.mutable_prefix()->set_model_id(model);
  // Two blocks of the first, then, a token off, ten of the second.
  const std::string first = PathTokens(2, 1);
  const std::string second = PathTokens(12, 2);
  request.mutable_prefix()->set_tokens(first + std::string(4, '\x7f') +
                                       second.substr(kTestBlockTokens * 4));
  v1::SimilarResponse response;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(server.cache().Similar(&context, request, &response).ok());
  }
  EXPECT_EQ(response.matched_blocks(), 2u);
  EXPECT_FALSE(response.work_limit_reached());
  ASSERT_EQ(response.sessions_size(), 2);
  const v1::SimilarSession& by_text = response.sessions(0);
  EXPECT_EQ(by_text.blocks(), 12u);
  EXPECT_EQ(by_text.shared_prefix_blocks(), 0u);
  EXPECT_EQ(by_text.shared_run_tokens(), 11 * kTestBlockTokens);
  ASSERT_EQ(by_text.runs_size(), 1);
  EXPECT_EQ(by_text.runs(0).first_token(), 2 * kTestBlockTokens + 1);
  const v1::LookupResult stored = LookUp(server.cache(), model, second);
  EXPECT_EQ(by_text.runs(0).node_id(), stored.blocks(0).node_ids().substr(16, 16));
  EXPECT_EQ(by_text.runs(0).node_offset(), 0u);
  EXPECT_EQ(by_text.node_id(), stored.blocks(0).node_ids().substr(11 * 16));
  EXPECT_EQ(response.sessions(1).shared_prefix_blocks(), 2u);
  EXPECT_DOUBLE_EQ(response.sessions(1).shared_prefix_bits(), 2 * kTestBlockTokens * 3.75);

  request.mutable_prefix()->set_model_id(std::string(16, 'x'));
  {
    grpc::ClientContext context;
    EXPECT_EQ(server.cache().Similar(&context, request, &response).error_code(), kNotFound);
  }
  request.set_session_count(65);
  {
    grpc::ClientContext context;
    const grpc::Status status = server.cache().Similar(&context, request, &response);
    EXPECT_EQ(status.error_code(), kInvalidArgument);
    EXPECT_THAT(status.error_message(), HasSubstr("session_count: 65"));
  }
}

TEST(CacheServiceTest, LaneIsUnavailableWhenItIsOff) {
  RunningServer server([](ServerConfig* config) { config->local_socket.clear(); });
  v1::OpenLocalLaneResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(
      server.cache().OpenLocalLane(&context, v1::OpenLocalLaneRequest(), &response).error_code(),
      grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace kvtrie
