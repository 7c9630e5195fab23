#include "client/ctl/json_views.h"

#include <gtest/gtest.h>

#include <string>

namespace kvtrie {
namespace {

TEST(JsonViewsTest, NodeHasIdsInHexadecimalDigitsAndEnumsByName) {
  v1::NodeEntry node;
  node.set_node_id(std::string(16, '\x0f'));
  node.set_depth(3);
  node.set_quality(v1::QUALITY_NEAR_EXACT);
  v1::RungEntry* rung = node.add_rungs();
  rung->set_rung(v1::RUNG_CODED);
  rung->set_stored_bytes(100);
  rung->set_quality(v1::QUALITY_SMALL);
  rung->set_codec(v1::CODEC_RESIDUAL);
  const auto json = NodeToJson(node);
  EXPECT_EQ(json["node_id"], "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f");
  EXPECT_EQ(json["depth"], 3);
  EXPECT_EQ(json["quality"], "near-exact");
  EXPECT_EQ(json["rungs"][0]["rung"], "coded");
  EXPECT_EQ(json["rungs"][0]["quality"], "small");
  EXPECT_EQ(json["rungs"][0]["codec"], "residual");
  EXPECT_EQ(json["rungs"][0]["stored_bytes"], 100);
}

TEST(JsonViewsTest, ModelCountsLayersOverItsRunsAndGroups) {
  v1::ModelEntry model;
  model.mutable_spec()->add_kv_groups()->add_layer_runs()->set_layer_count(3);
  v1::KvGroup* group = model.mutable_spec()->add_kv_groups();
  group->add_layer_runs()->set_layer_count(4);
  group->add_layer_runs()->set_layer_count(5);
  EXPECT_EQ(ModelToJson(model)["layers"], 12);
}

TEST(JsonViewsTest, StatusHasItsCountersByName) {
  v1::GetStatusResponse status;
  status.set_state("serving");
  (*status.mutable_counters())["puts"] = 7;
  const auto json = StatusToJson(status);
  EXPECT_EQ(json["state"], "serving");
  EXPECT_EQ(json["counters"]["puts"], 7);
  EXPECT_TRUE(json["reasons"].empty());
}

TEST(JsonViewsTest, SimilarSessionsSayWhereTheirRunsLie) {
  v1::SimilarResponse similar;
  similar.set_matched_blocks(4);
  similar.add_sessions()->set_node_id(std::string(16, '\x01'));
  v1::SimilarSession* session = similar.add_sessions();
  session->set_node_id(std::string(16, '\x0f'));
  session->add_session_ids("chat");
  session->set_shared_prefix_bits(12.5);
  v1::SharedRun* run = session->add_runs();
  run->set_first_token(70);
  run->set_token_count(40);
  run->set_node_id(std::string(16, '\x02'));
  run->set_node_offset(3);
  const auto json = SimilarToJson(similar);
  EXPECT_EQ(json["matched_blocks"], 4);
  EXPECT_EQ(json["work_limit_reached"], false);
  EXPECT_TRUE(json["sessions"][0]["session_ids"].empty());
  EXPECT_TRUE(json["sessions"][0]["runs"].empty());
  EXPECT_EQ(json["sessions"][1]["session_ids"][0], "chat");
  EXPECT_EQ(json["sessions"][1]["shared_prefix_bits"], 12.5);
  EXPECT_EQ(json["sessions"][1]["runs"][0]["node_id"], "02020202020202020202020202020202");
  EXPECT_EQ(json["sessions"][1]["runs"][0]["first_token"], 70);
  EXPECT_EQ(json["sessions"][1]["runs"][0]["node_offset"], 3);
}

TEST(JsonViewsTest, GroupsAndBranchesHaveTheFieldsOfTheWire) {
  v1::GroupEntry group;
  group.set_group_id(std::string(16, '\x0f'));
  group.set_sessions(4);
  group.set_shared_bits(150.5);
  group.set_saved_bytes(900);
  const auto json = GroupToJson(group);
  EXPECT_EQ(json["group_id"], "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f");
  EXPECT_EQ(json["sessions"], 4);
  EXPECT_EQ(json["shared_bits"], 150.5);
  EXPECT_EQ(json["saved_bytes"], 900);
  EXPECT_EQ(json.size(), static_cast<std::size_t>(group.GetDescriptor()->field_count()));
  v1::GroupBranch branch;
  branch.set_parent(-1);
  branch.set_probability(0.5);
  const auto branch_json = GroupBranchToJson(branch);
  EXPECT_EQ(branch_json["parent"], -1);
  EXPECT_EQ(branch_json["probability"], 0.5);
  EXPECT_EQ(branch_json.size(), static_cast<std::size_t>(branch.GetDescriptor()->field_count()));
}

TEST(JsonViewsTest, BytesThatAreNotTextDoNotEndTheProgram) {
  const std::string text = DumpJson({{"name", "a\xff"}});
  EXPECT_NE(text.find("a\xef\xbf\xbd"), std::string::npos);
}

}  // namespace
}  // namespace kvtrie
