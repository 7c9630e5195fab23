#include "server/admin_service.h"

#include <gmock/gmock.h>

#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

TEST(AdminServiceTest, StatusShowsWhatIsStored) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 4);
  v1::GetStatusResponse status;
  grpc::ClientContext context;
  ASSERT_TRUE(server.admin().GetStatus(&context, v1::GetStatusRequest(), &status).ok());
  EXPECT_EQ(status.state(), "serving");
  EXPECT_EQ(status.node_count(), 4u);
  EXPECT_EQ(status.model_count(), 1u);
  EXPECT_GT(status.stored_bytes(), 4 * kTestBlockBytes);
  EXPECT_EQ(status.counters().at("kvtrie_put_stored_blocks_total"), 4u);
}

TEST(AdminServiceTest, GroupsAreListedInPagesAndDescribed) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  // Two sessions with one path each time.
  for (const std::uint32_t seed : {1u, 2u}) {
    for (const char* name : {"a", "b"}) {
      PutPath(server.cache(), model, 40, seed, name + std::to_string(seed));
    }
  }
  v1::ListGroupsResponse all;
  std::string token;
  do {
    v1::ListGroupsRequest request;
    request.set_page_size(1);
    request.set_page_token(token);
    v1::ListGroupsResponse page;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().ListGroups(&context, request, &page).ok());
    ASSERT_LE(page.groups_size(), 1);
    token = page.next_page_token();
    all.MergeFrom(page);
  } while (!token.empty());
  ASSERT_EQ(all.groups_size(), 2);
  EXPECT_EQ(all.groups(0).model_id(), model);
  EXPECT_EQ(all.groups(0).sessions(), 2u);
  EXPECT_EQ(all.groups(0).shared_blocks(), 40u);
  EXPECT_EQ(all.groups(0).saved_bytes(), all.groups(0).stored_bytes());
  {
    v1::DescribeGroupRequest request;
    request.set_group_id(all.groups(1).group_id());
    v1::DescribeGroupResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().DescribeGroup(&context, request, &response).ok());
    EXPECT_EQ(response.group().group_id(), all.groups(1).group_id());
    ASSERT_EQ(response.branches_size(), 1);
    EXPECT_EQ(response.branches(0).parent(), -1);
    EXPECT_EQ(response.branches(0).blocks(), 40u);
    EXPECT_FALSE(response.more());
  }
  {
    v1::GetGroupRequest request;
    request.set_node_id(all.groups(1).centroid_end_id());
    v1::GetGroupResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().GetGroup(&context, request, &response).ok());
    EXPECT_EQ(response.group_id(), all.groups(1).group_id());
    request.set_node_id(std::string(16, 'x'));
    grpc::ClientContext unknown;
    EXPECT_EQ(server.admin().GetGroup(&unknown, request, &response).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
  const v1::LookupResult found = LookUp(server.cache(), model, PathTokens(40, 2));
  EXPECT_EQ(found.group_id().size(), 16u);
}

TEST(AdminServiceTest, ModelsNodesAndUsageAreListed) {
  RunningServer server;
  const std::string model = server.RegisterModel();
  PutPath(server.cache(), model, 3);
  {
    v1::ListModelsResponse models;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().ListModels(&context, v1::ListModelsRequest(), &models).ok());
    ASSERT_EQ(models.models_size(), 1);
    EXPECT_EQ(models.models(0).model_id(), model);
    EXPECT_EQ(models.models(0).spec().name(), "test-model");
    EXPECT_EQ(models.models(0).node_count(), 3u);
  }
  v1::ListNodesResponse nodes;
  {
    v1::ListNodesRequest request;
    request.set_model_id(model);
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().ListNodes(&context, request, &nodes).ok());
    ASSERT_EQ(nodes.nodes_size(), 1);
    EXPECT_EQ(nodes.nodes(0).depth(), 1u);
    EXPECT_EQ(nodes.nodes(0).child_count(), 1u);
  }
  {
    v1::DescribeNodeRequest request;
    request.mutable_prefix()->set_model_id(model);
    request.mutable_prefix()->set_tokens(PathTokens(5));
    v1::DescribeNodeResponse node;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().DescribeNode(&context, request, &node).ok());
    EXPECT_EQ(node.node().depth(), 3u);
    EXPECT_EQ(node.path_size(), 2);
    // The same by its id.
    v1::DescribeNodeRequest by_id;
    by_id.set_node_id(node.node().node_id());
    v1::DescribeNodeResponse same;
    grpc::ClientContext second_context;
    ASSERT_TRUE(server.admin().DescribeNode(&second_context, by_id, &same).ok());
    EXPECT_EQ(same.node().depth(), 3u);
    EXPECT_EQ(same.path_size(), 2);
  }
  {
    v1::DescribeNodeRequest request;
    request.set_node_id(std::string(16, 'n'));
    v1::DescribeNodeResponse node;
    grpc::ClientContext context;
    EXPECT_EQ(server.admin().DescribeNode(&context, request, &node).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
  {
    v1::GetUsageResponse usage;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().GetUsage(&context, v1::GetUsageRequest(), &usage).ok());
    EXPECT_EQ(usage.raw_bytes(), 3 * kTestBlockBytes);
  }
}

TEST(AdminServiceTest, VerifyReportsASoundStore) {
  RunningServer server;
  PutPath(server.cache(), server.RegisterModel(), 10);
  for (const bool structure_only : {false, true}) {
    SCOPED_TRACE(structure_only);
    v1::VerifyRequest request;
    request.set_structure_only(structure_only);
    grpc::ClientContext context;
    auto stream = server.admin().Verify(&context, request);
    v1::VerifyResponse last;
    v1::VerifyResponse response;
    while (stream->Read(&response)) {
      EXPECT_EQ(response.findings_size(), 0);
      last = response;
    }
    EXPECT_TRUE(stream->Finish().ok());
    EXPECT_TRUE(last.done());
    EXPECT_EQ(last.nodes_checked(), 10u);
  }
}

TEST(AdminServiceTest, ConfigShowsSettingsAndLimits) {
  RunningServer server;
  v1::GetConfigResponse config;
  grpc::ClientContext context;
  ASSERT_TRUE(server.admin().GetConfig(&context, v1::GetConfigRequest(), &config).ok());
  bool found = false;
  for (const auto& setting : config.settings()) {
    if (setting.name() != "prefix_tokens_max") continue;
    found = true;
    EXPECT_EQ(setting.source(), "limit");
    EXPECT_EQ(setting.value(), "1048576");
  }
  EXPECT_TRUE(found);
}

TEST(AdminServiceTest, DrainIsIdempotentAndClean) {
  RunningServer server;
  for (int i = 0; i < 2; ++i) {
    v1::DrainRequest request;
    request.set_deadline_ms(5000);
    v1::DrainResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(server.admin().Drain(&context, request, &response).ok());
    EXPECT_TRUE(response.clean());
  }
  v1::GetStatusResponse status;
  grpc::ClientContext context;
  ASSERT_TRUE(server.admin().GetStatus(&context, v1::GetStatusRequest(), &status).ok());
  EXPECT_EQ(status.state(), "draining");
}

}  // namespace
}  // namespace kvtrie
