#include "storage/trie/ref_table.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

// A table whose refs know their hash, as the index's nodes do.
class RefTableTest : public testing::Test {
 protected:
  void Insert(std::uint32_t hash, NodeRef ref) {
    hashes_[ref] = hash;
    table_.Insert(hash, ref, [this](NodeRef r) { return hashes_.at(r); });
  }
  void Erase(NodeRef ref) {
    table_.Erase(hashes_.at(ref), ref);
    hashes_.erase(ref);
  }
  bool Holds(std::uint32_t hash, NodeRef ref) const {
    return table_.Find(hash, [ref](NodeRef found) { return found == ref; }) == ref;
  }

  RefTable table_;
  std::map<NodeRef, std::uint32_t> hashes_;
};

TEST_F(RefTableTest, EmptyTableFindsNothing) {
  EXPECT_EQ(table_.Guess(0), 0u);
  EXPECT_EQ(table_.Guess(0xffffffffu), 0u);
  table_.Prefetch(7);
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(RefTableTest, KeepsSeveralRefsOfOneHashApart) {
  constexpr std::uint32_t kHash = 0xab123456u;
  for (NodeRef ref = 1; ref <= 200; ++ref) Insert(kHash, ref);
  for (NodeRef ref = 1; ref <= 200; ++ref) EXPECT_TRUE(Holds(kHash, ref)) << ref;
  std::set<NodeRef> offered;
  table_.Find(kHash, [&](NodeRef ref) {
    offered.insert(ref);
    return false;
  });
  EXPECT_EQ(offered.size(), 200u);
  for (NodeRef ref = 1; ref <= 200; ref += 2) Erase(ref);
  for (NodeRef ref = 1; ref <= 200; ++ref) EXPECT_EQ(Holds(kHash, ref), ref % 2 == 0) << ref;
}

TEST_F(RefTableTest, NeverOffersARefThatWasErased) {
  for (NodeRef ref = 1; ref <= 5000; ++ref) Insert(ref * 0x9e3779b9u, ref);
  for (NodeRef ref = 1; ref <= 5000; ++ref) {
    const std::uint32_t hash = ref * 0x9e3779b9u;
    Erase(ref);
    table_.Find(hash, [&](NodeRef found) {
      EXPECT_TRUE(hashes_.contains(found)) << found;
      return false;
    });
  }
  EXPECT_EQ(table_.size(), 0u);
  EXPECT_EQ(table_.Guess(0x9e3779b9u), 0u);
}

TEST_F(RefTableTest, StaysWithinFiveBytesPerSlotAndSevenEighths) {
  std::mt19937 random(5);
  for (NodeRef ref = 1; ref <= 200'000; ++ref) Insert(static_cast<std::uint32_t>(random()), ref);
  // Between 7/16 and 7/8 full, 5 bytes per slot, beside the parts themselves.
  const std::size_t part_bytes = RefTable().memory_bytes();
  EXPECT_LE(table_.memory_bytes() - part_bytes, 200'000u * 5 * 16 / 7 * 11 / 10);
}

TEST_F(RefTableTest, ChurnDoesNotLetItGrow) {
  std::mt19937 random(6);
  std::vector<NodeRef> there;
  NodeRef next = 1;
  for (int i = 0; i < 2000; ++i) {
    Insert(static_cast<std::uint32_t>(random()), next);
    there.push_back(next++);
  }
  const std::size_t before = table_.memory_bytes();
  for (int i = 0; i < 200'000; ++i) {
    const std::size_t at = random() % there.size();
    Erase(there[at]);
    Insert(static_cast<std::uint32_t>(random()), next);
    there[at] = next++;
  }
  EXPECT_EQ(table_.size(), 2000u);
  EXPECT_LE(table_.memory_bytes(), 2 * before);
}

// Few hashes, so that probes run through one another and tombstones matter.
TEST_F(RefTableTest, AgreesWithAMapOverRandomOperations) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<std::uint32_t> hash_pool(300);
  for (std::uint32_t& hash : hash_pool) hash = static_cast<std::uint32_t>(random()) & 0x030000ffu;
  std::multimap<std::uint32_t, NodeRef> model;
  NodeRef next = 1;
  for (int step = 0; step < 20'000; ++step) {
    if (model.empty() || random() % 100 < (step / 2000 % 2 == 0 ? 70u : 30u)) {
      const std::uint32_t hash = hash_pool[random() % hash_pool.size()];
      Insert(hash, next);
      model.emplace(hash, next++);
    } else {
      auto at = model.begin();
      std::advance(at, random() % std::min<std::size_t>(model.size(), 50));
      Erase(at->second);
      model.erase(at);
    }
    if (step % 500 == 0) {
      ASSERT_EQ(table_.size(), model.size());
      for (const auto& [hash, ref] : model) ASSERT_TRUE(Holds(hash, ref));
      for (const std::uint32_t hash : hash_pool) {
        std::multiset<NodeRef> offered;
        table_.Find(hash, [&](NodeRef ref) {
          if (hashes_.at(ref) == hash) offered.insert(ref);
          return false;
        });
        ASSERT_EQ(offered.size(), model.count(hash));
      }
    }
  }
}

}  // namespace
}  // namespace kvtrie
