#include "storage/trie/node_traffic.h"

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

TEST(NodeTrafficTest, KeepsHowANodeCameOverAllItsUses) {
  NodeTraffic traffic(NodeOrigin::kContinuation, 3);
  EXPECT_EQ(traffic.uses(), 0u);
  for (std::uint32_t use = 1; use <= 1000; ++use) {
    traffic = traffic.Used(use % 100);
    ASSERT_EQ(traffic.uses(), use);
    ASSERT_EQ(traffic.origin(), NodeOrigin::kContinuation);
    ASSERT_EQ(traffic.trait(), 3u);
    ASSERT_EQ(NodeTraffic(traffic.bits()), traffic);
  }
}

TEST(NodeTrafficTest, CountsUpToItsMaximumAndStaysThere) {
  NodeTraffic traffic(NodeTraffic::kUsesMax - 1);
  traffic = traffic.Used(0);
  EXPECT_EQ(traffic.uses(), NodeTraffic::kUsesMax);
  traffic = traffic.Used(0);
  EXPECT_EQ(traffic.uses(), NodeTraffic::kUsesMax);
  EXPECT_EQ(traffic.origin(), NodeOrigin::kRoot);  // nothing ran over
  EXPECT_EQ(traffic.trait(), 0u);
}

TEST(NodeTrafficTest, TheGapFollowsTheLastUsesAndArrives) {
  NodeTraffic traffic;
  traffic = traffic.Used(100);  // 2^6 <= 100 < 2^7
  EXPECT_EQ(traffic.gap_class(), 7u);
  traffic = traffic.Used(1);
  EXPECT_LT(traffic.gap_class(), 7u);
  EXPECT_GT(traffic.gap_class(), 1u);
  for (int use = 0; use < 8; ++use) traffic = traffic.Used(1);
  EXPECT_EQ(traffic.gap_class(), 1u);
  for (int use = 0; use < 8; ++use) traffic = traffic.Used(0xffffffffu);
  EXPECT_EQ(traffic.gap_class(), NodeTraffic::kGapClasses - 1);
  for (int use = 0; use < 8; ++use) traffic = traffic.Used(0);
  EXPECT_EQ(traffic.gap_class(), 0u);
}

}  // namespace
}  // namespace kvtrie
