#include "storage/trie/session_ends.h"

#include <map>
#include <random>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr TenantId kTenant{1};

TEST(SessionEndsTest, ASessionEndsWhereItWasLastSetTo) {
  SessionEnds ends;
  ends.Set(kTenant, "a", 5);
  ends.Set(kTenant, "b", 5);
  ends.Set(kTenant, "b", 5);
  EXPECT_THAT(ends.SessionsAt(5), testing::ElementsAre("b", "a"));
  ends.Set(kTenant, "a", 7);
  EXPECT_THAT(ends.SessionsAt(5), testing::ElementsAre("b"));
  EXPECT_THAT(ends.SessionsAt(7), testing::ElementsAre("a"));
  EXPECT_EQ(ends.EndOf(kTenant, "a"), 7u);
  EXPECT_EQ(ends.EndOf(kTenant, "b"), 5u);
  ends.Remove(kTenant, "b");
  EXPECT_EQ(ends.EndOf(kTenant, "b"), 0u);
  ends.Remove(kTenant, "unknown");
  EXPECT_FALSE(ends.IsEnd(5));
  EXPECT_TRUE(ends.IsEnd(7));
  EXPECT_EQ(ends.size(), 1u);
  EXPECT_TRUE(ends.CheckInvariants().ok());
}

TEST(SessionEndsTest, TenantsHaveNamesOfTheirOwn) {
  SessionEnds ends;
  ends.Set(kTenant, "a", 5);
  ends.Set(TenantId{2}, "a", 6);
  EXPECT_THAT(ends.SessionsAt(5), testing::ElementsAre("a"));
  EXPECT_EQ(ends.EndOf(TenantId{2}, "a"), 6u);
  ends.Remove(TenantId{2}, "a");
  EXPECT_TRUE(ends.IsEnd(5));
  EXPECT_FALSE(ends.IsEnd(6));
}

TEST(SessionEndsTest, ANodeThatGoesTakesItsSessionsAlong) {
  SessionEnds ends;
  for (int i = 0; i < 5; ++i) ends.Set(kTenant, absl::StrCat("s", i), 3);
  ends.Set(kTenant, "other", 4);
  ends.RemoveAt(3);
  ends.RemoveAt(9);
  EXPECT_EQ(ends.size(), 1u);
  EXPECT_THAT(ends.SessionsAt(4), testing::ElementsAre("other"));
  EXPECT_TRUE(ends.CheckInvariants().ok());
}

// Names are the client's to choose: as many as it likes take no memory.
TEST(SessionEndsTest, ANodeHasTheLatestNamesOnly) {
  SessionEnds ends;
  for (int i = 0; i < 1000; ++i) ends.Set(kTenant, absl::StrCat("s", i), 3);
  EXPECT_EQ(ends.size(), SessionEnds::kNamesPerEndMax);
  EXPECT_EQ(ends.SessionsAt(3).front(), "s999");
  EXPECT_EQ(ends.SessionsAt(3).back(), "s984");
  EXPECT_LT(ends.memory_bytes(), 16u * 150);
  ends.RemoveAt(3);
  EXPECT_EQ(ends.memory_bytes(), 0u);
}

TEST(SessionEndsTest, IsAMapBothWays) {
  std::mt19937_64 random(7);
  SessionEnds ends;
  std::map<std::string, NodeRef> expected;
  for (int step = 0; step < 20'000; ++step) {
    const std::string name = absl::StrCat("s", random() % 300);
    const auto end = static_cast<NodeRef>(random() % 200 + 1);
    switch (random() % 4) {
      case 0:
        ends.Remove(kTenant, name);
        expected.erase(name);
        break;
      case 1:
        ends.RemoveAt(end);
        std::erase_if(expected, [end](const auto& one) { return one.second == end; });
        break;
      default:
        ends.Set(kTenant, name, end);
        expected[name] = end;
    }
    if (step % 1000 != 0) continue;
    ASSERT_TRUE(ends.CheckInvariants().ok()) << ends.CheckInvariants();
    ASSERT_EQ(ends.size(), expected.size());
    for (const auto& [session, at] : expected) {
      ASSERT_THAT(ends.SessionsAt(at), testing::Contains(session));
    }
  }
}

}  // namespace
}  // namespace kvtrie
