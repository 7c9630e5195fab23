#include "storage/trie/run_index_table.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Hashes as different as those of text.
std::uint64_t HashOf(std::uint64_t number) {
  std::uint64_t hash = (number + 1) * 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return hash ^ hash >> 31;
}

std::vector<NodeRef> PlacesOf(const RunIndexTable& table, std::uint64_t hash,
                              bool are_of_use = false) {
  std::vector<NodeRef> places;
  table.Find(hash, [&](NodeRef ref) {
    places.push_back(ref);
    return are_of_use;
  });
  std::sort(places.begin(), places.end());
  return places;
}

absl::Status Check(const RunIndexTable& table) {
  return table.CheckInvariants([](NodeRef) { return true; });
}

TEST(RunIndexTableTest, FindsTheFirstPlacesOfAHash) {
  RunIndexTable table(kMiB);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::IsEmpty());
  for (NodeRef ref = 1; ref <= 6; ++ref) table.Insert(HashOf(1), ref);
  table.Insert(HashOf(1), 2);  // is there
  table.Insert(HashOf(2), 7);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(PlacesOf(table, HashOf(2)), testing::ElementsAre(7));
  EXPECT_EQ(table.crowded_total(), 2u);
  EXPECT_EQ(table.size(), 5u);
}

TEST(RunIndexTableTest, APlaceThatGoesMakesRoomForTheNext) {
  RunIndexTable table(kMiB);
  for (NodeRef ref = 1; ref <= 5; ++ref) table.Insert(HashOf(1), ref);
  table.Remove(3, 1);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::ElementsAre(1, 2, 4));
  table.Insert(HashOf(1), 9);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::ElementsAre(1, 2, 4, 9));
}

TEST(RunIndexTableTest, ARefThatIsUsedAgainHasNotTheEntriesOfTheNodeBefore) {
  RunIndexTable table(kMiB);
  table.Insert(HashOf(1), 5);
  table.Remove(5, 1);
  table.Insert(HashOf(2), 5);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::IsEmpty());
  EXPECT_THAT(PlacesOf(table, HashOf(2)), testing::ElementsAre(5));
}

TEST(RunIndexTableTest, KeepsEverythingBelowItsLimit) {
  RunIndexTable table(8 * kMiB);
  constexpr NodeRef kCount = 200'000;
  for (NodeRef ref = 1; ref <= kCount; ++ref) table.Insert(HashOf(ref), ref);
  EXPECT_EQ(table.size(), kCount);
  EXPECT_EQ(table.forgotten_total(), 0u);
  for (NodeRef ref = 1; ref <= kCount; ++ref) {
    ASSERT_THAT(PlacesOf(table, HashOf(ref)), testing::Contains(ref));
  }
  // 8 bytes in tables at least 5/8 full, a generation, and the parts themselves.
  EXPECT_LE(table.memory_bytes(), kCount * 14.5 + 33'000);
  EXPECT_TRUE(Check(table).ok()) << Check(table);
}

TEST(RunIndexTableTest, AFullTableForgetsAndSaysSo) {
  constexpr std::size_t kLimit = kMiB;
  RunIndexTable table(kLimit);
  constexpr NodeRef kCount = 300'000;
  std::size_t largest_bytes = 0;
  for (NodeRef ref = 1; ref <= kCount; ++ref) {
    table.Insert(HashOf(ref), ref);
    largest_bytes = std::max(largest_bytes, table.memory_bytes());
  }
  // The generations of 300,000 nodes leave room for some 50,000 entries.
  EXPECT_LE(largest_bytes, kLimit + kCount);
  EXPECT_EQ(table.size() + table.forgotten_total(), kCount);
  EXPECT_GT(table.size(), 30'000u);
  EXPECT_TRUE(Check(table).ok()) << Check(table);
  // What comes is kept, as long as there is a part for it.
  std::size_t found = 0;
  for (NodeRef ref = kCount - 1000; ref <= kCount; ++ref) {
    found += PlacesOf(table, HashOf(ref)).empty() ? 0 : 1;
  }
  EXPECT_GT(found, 900u);
}

TEST(RunIndexTableTest, AFullTableSparesWhatWasOfUse) {
  RunIndexTable table(kMiB);
  NodeRef ref = 1;
  while (table.forgotten_total() == 0) {
    table.Insert(HashOf(ref), ref);
    ++ref;
  }
  std::vector<NodeRef> all;
  for (NodeRef known = 1; known < ref; ++known) {
    if (!PlacesOf(table, HashOf(known)).empty()) all.push_back(known);
  }
  const std::size_t half = all.size() / 2;
  for (std::size_t i = 0; i < half; ++i) PlacesOf(table, HashOf(all[i]), /*are_of_use=*/true);
  for (const NodeRef end = ref + static_cast<NodeRef>(all.size() / 2); ref < end; ++ref) {
    table.Insert(HashOf(ref), ref);
  }
  std::size_t kept_of_use = 0;
  std::size_t kept_others = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool is_kept = !PlacesOf(table, HashOf(all[i])).empty();
    (i < half ? kept_of_use : kept_others) += is_kept ? 1 : 0;
  }
  EXPECT_GT(kept_of_use, half * 9 / 10);
  EXPECT_LT(kept_others, half * 6 / 10);
}

TEST(RunIndexTableTest, MemoryComesBackWhenNodesGo) {
  RunIndexTable table(8 * kMiB);
  constexpr NodeRef kCount = 100'000;
  for (NodeRef ref = 1; ref <= kCount; ++ref) table.Insert(HashOf(ref), ref);
  const std::size_t full_bytes = table.memory_bytes();
  for (NodeRef ref = 1; ref <= kCount; ++ref) table.Remove(ref, 1);
  // What stays is what the last sweep came by too early for, a byte per ref, and the parts.
  EXPECT_LT(table.size(), kCount / 50);
  EXPECT_LT(table.memory_bytes(), full_bytes / 5);
  EXPECT_TRUE(Check(table).ok()) << Check(table);
}

TEST(RunIndexTableTest, WithoutRoomItKeepsNothing) {
  RunIndexTable table(0);
  table.Insert(HashOf(1), 1);
  table.Remove(1, 1);
  EXPECT_THAT(PlacesOf(table, HashOf(1)), testing::IsEmpty());
  EXPECT_EQ(table.size(), 0u);
}

// Random insertions and removals of nodes with several entries, refs used again, against a map.
TEST(RunIndexTableTest, IsAMultimapWithABoundPerHash) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    RunIndexTable table(64 * kMiB);
    std::map<std::uint64_t, std::set<NodeRef>> expected;
    std::map<NodeRef, std::set<std::uint64_t>> hashes_of;
    for (int step = 0; step < 60'000; ++step) {
      const auto ref = static_cast<NodeRef>(random() % 3000 + 1);
      if (hashes_of.contains(ref)) {
        table.Remove(ref, hashes_of[ref].size());
        for (const std::uint64_t number : hashes_of[ref]) expected[number].erase(ref);
        hashes_of.erase(ref);
      } else {
        for (std::uint64_t i = random() % 4; i > 0; --i) {
          const std::uint64_t number = random() % 2000;
          table.Insert(HashOf(number), ref);
          if (expected[number].size() < RunIndexTable::kPlacesMax) expected[number].insert(ref);
          hashes_of[ref].insert(number);
        }
        if (!hashes_of.contains(ref)) hashes_of[ref] = {};
      }
      if (step % 5000 == 0) {
        const absl::Status status =
            table.CheckInvariants([&](NodeRef named) { return hashes_of.contains(named); });
        ASSERT_TRUE(status.ok()) << status;
        for (const auto& [number, refs] : expected) {
          ASSERT_EQ(PlacesOf(table, HashOf(number)), std::vector(refs.begin(), refs.end()));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie
