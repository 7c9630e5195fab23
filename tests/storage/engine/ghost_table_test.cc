#include "storage/engine/ghost_table.h"

#include <map>
#include <random>

#include "gtest/gtest.h"

namespace kvtrie {
namespace {

TrieNodeId IdOf(std::uint64_t number) {
  std::mt19937_64 random(number);
  TrieNodeId id;
  for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
  return id;
}

GhostTable::Ghost GhostOf(std::uint32_t last_used_seconds) {
  return {NodeTraffic(NodeOrigin::kFork, 2).Used(last_used_seconds % 100), last_used_seconds};
}

TEST(GhostTableTest, WithoutPlacesAllIsForgottenAtOnce) {
  GhostTable table;
  const auto forgotten = table.Add(IdOf(1), GhostOf(5));
  ASSERT_TRUE(forgotten.has_value());
  EXPECT_EQ(forgotten->last_used_seconds, 5u);
  EXPECT_FALSE(table.Take(IdOf(1)).has_value());
}

TEST(GhostTableTest, RemembersUntilItIsAsked) {
  GhostTable table;
  table.Reserve(1000);
  for (std::uint32_t i = 0; i < 200; ++i)
    EXPECT_FALSE(table.Add(IdOf(i), GhostOf(1000 + i)).has_value());
  EXPECT_EQ(table.size(), 200u);
  for (std::uint32_t i = 0; i < 200; ++i) {
    const auto ghost = table.Take(IdOf(i));
    ASSERT_TRUE(ghost.has_value()) << i;
    EXPECT_EQ(ghost->last_used_seconds, 1000 + i);
    EXPECT_EQ(ghost->traffic, GhostOf(1000 + i).traffic);
    EXPECT_FALSE(table.Take(IdOf(i)).has_value());
  }
  EXPECT_EQ(table.size(), 0u);
}

TEST(GhostTableTest, AFullSetForgetsWhatWasUsedLongestAgoAndSaysSo) {
  GhostTable table;
  table.Reserve(8);  // one set
  for (std::uint32_t i = 0; i < 8; ++i)
    ASSERT_FALSE(table.Add(IdOf(i), GhostOf(100 + (i * 5) % 8)).has_value());
  for (std::uint32_t i = 8; i < 16; ++i) {
    const auto forgotten = table.Add(IdOf(i), GhostOf(1000 + i));
    ASSERT_TRUE(forgotten.has_value());
    EXPECT_EQ(forgotten->last_used_seconds, 100 + i - 8);
  }
  EXPECT_EQ(table.size(), 8u);
}

TEST(GhostTableTest, GrowingLosesNothing) {
  GhostTable table;
  table.Reserve(64);
  std::uint64_t kept = 0;
  for (std::uint32_t i = 0; i < 40; ++i)
    kept += table.Add(IdOf(i), GhostOf(i + 1)).has_value() ? 0 : 1;
  const std::size_t before = table.size();
  table.Reserve(100'000);
  table.Reserve(10);  // less than before: no change
  EXPECT_EQ(table.size(), before);
  EXPECT_GE(table.place_count(), 50'000u);
  std::size_t found = 0;
  for (std::uint32_t i = 0; i < 40; ++i) {
    if (const auto ghost = table.Take(IdOf(i))) {
      ++found;
      EXPECT_EQ(ghost->last_used_seconds, i + 1);
    }
  }
  EXPECT_EQ(found, kept);
}

// Random operations against a map, in which nothing is ever forgotten.
TEST(GhostTableTest, TellsOnlyWhatItWasTold) {
  GhostTable table;
  table.Reserve(256);
  std::map<std::uint32_t, std::uint32_t> told;
  std::mt19937 random(7);
  std::size_t taken = 0;
  for (std::uint32_t step = 1; step < 20'000; ++step) {
    const auto number = static_cast<std::uint32_t>(random() % 600);
    if (random() % 2 == 0) {
      table.Add(IdOf(number), GhostOf(step));
      told[number] = step;
    } else if (const auto ghost = table.Take(IdOf(number))) {
      ASSERT_TRUE(told.contains(number));
      ASSERT_EQ(ghost->last_used_seconds, told[number]);
      told.erase(number);
      ++taken;
    }
    ASSERT_LE(table.size(), table.place_count());
  }
  EXPECT_GT(taken, 2000u);
}

}  // namespace
}  // namespace kvtrie
