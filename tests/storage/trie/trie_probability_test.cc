#include "storage/trie/trie_probability.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {
namespace {

class TrieProbabilityTest : public testing::Test {
 protected:
  TrieProbabilityTest() { slot_ = *index_.AddModel(TenantId{1}, ModelId{}, 4); }

  NodeRef Grow(NodeRef parent, float bits, std::uint32_t uses = 0) {
    const std::uint64_t number = next_++;
    TrieNodeId id;
    std::mt19937_64 random(number);
    for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
    const NodeRef ref = index_.Insert({.id = id,
                                       .parent = parent,
                                       .model = slot_,
                                       .path_hash = number * 0x9e3779b97f4a7c15u,
                                       .block_surprisal_bits = bits});
    for (std::uint32_t use = 0; use < uses; ++use) index_.Touch(ref, 1);
    return ref;
  }
  // A random trie; all of its nodes.
  std::vector<NodeRef> GrowMany(std::uint64_t seed, int count) {
    std::mt19937_64 random(seed);
    std::vector<NodeRef> nodes;
    for (int i = 0; i < count; ++i) {
      const NodeRef parent =
          nodes.empty() || random() % 10 == 0 ? 0 : nodes[random() % nodes.size()];
      nodes.push_back(Grow(parent, static_cast<float>(1 + random() % 64),
                           static_cast<std::uint32_t>(random() % 20)));
    }
    return nodes;
  }

  TrieIndex index_{1 << 20};
  ModelSlot slot_ = 0;
  std::uint64_t next_ = 1;
};

TEST_F(TrieProbabilityTest, SharedSurprisalIsThatOfTheLowestCommonAncestor) {
  const NodeRef a = Grow(0, 10);
  const NodeRef b = Grow(a, 20);
  const NodeRef c = Grow(b, 5);
  const NodeRef d = Grow(b, 7);
  const NodeRef other = Grow(0, 3);
  EXPECT_EQ(LowestCommonAncestor(index_, c, d), b);
  EXPECT_EQ(LowestCommonAncestor(index_, c, a), a);
  EXPECT_EQ(LowestCommonAncestor(index_, c, other), 0u);
  EXPECT_DOUBLE_EQ(SharedSurprisalBits(index_, c, d), 30);
  EXPECT_DOUBLE_EQ(SharedSurprisalBits(index_, c, c), 35);
  EXPECT_DOUBLE_EQ(SharedSurprisalBits(index_, c, other), 0);
  EXPECT_DOUBLE_EQ(SurprisalDistanceBits(index_, c, d), 12);
  EXPECT_DOUBLE_EQ(SurprisalDistanceBits(index_, c, other), 38);
  EXPECT_DOUBLE_EQ(BlockSurprisalBitsOf(index_, d), 7);
  EXPECT_DOUBLE_EQ(BlockSurprisalBitsOf(index_, a), 10);
}

TEST_F(TrieProbabilityTest, TheDistanceIsAMetricAndWhatIsSharedAnUltrametric) {
  const auto nodes = GrowMany(1, 120);
  std::mt19937_64 random(2);
  const auto any = [&] { return nodes[random() % nodes.size()]; };
  for (int round = 0; round < 5000; ++round) {
    const NodeRef a = any(), b = any(), c = any();
    EXPECT_EQ(SurprisalDistanceBits(index_, a, a), 0);
    const double ab = SurprisalDistanceBits(index_, a, b);
    EXPECT_EQ(ab, SurprisalDistanceBits(index_, b, a));
    EXPECT_EQ(ab > 0, a != b);
    EXPECT_LE(ab, SurprisalDistanceBits(index_, a, c) + SurprisalDistanceBits(index_, c, b));
    double shared[] = {SharedSurprisalBits(index_, a, b), SharedSurprisalBits(index_, b, c),
                       SharedSurprisalBits(index_, a, c)};
    std::sort(std::begin(shared), std::end(shared));
    EXPECT_EQ(shared[0], shared[1]);
  }
}

TEST_F(TrieProbabilityTest, ChildrenTheUnseenAndTheEndSumUpToOne) {
  auto nodes = GrowMany(3, 200);
  nodes.push_back(0);  // the root
  for (const NodeRef parent : nodes) {
    const NextBlocks next = NextBlocksAfter(index_, slot_, parent);
    double sum = next.unseen;
    for (const NextBlock& block : next.seen) {
      EXPECT_GT(block.probability, 0);
      EXPECT_DOUBLE_EQ(block.probability, NextBlockProbability(index_, block.child));
      EXPECT_EQ(index_.parent(block.child), parent);
      sum += block.probability;
    }
    EXPECT_GT(next.unseen, 0);
    EXPECT_GE(next.end, 0);
    EXPECT_LE(sum, 1 + 1e-12);
    EXPECT_NEAR(sum + next.end, 1, 1e-12);
    EXPECT_TRUE(std::is_sorted(
        next.seen.begin(), next.seen.end(),
        [](const NextBlock& a, const NextBlock& b) { return a.probability > b.probability; }));
  }
}

TEST_F(TrieProbabilityTest, TheLikelyNextBlockIsTheOneThatIsAsLikely) {
  const auto nodes = GrowMany(4, 300);
  int likely = 0;
  for (const NodeRef node : nodes) {
    const NextBlocks all = NextBlocksAfter(index_, slot_, node);
    for (const double least : {0.5, 0.7, 0.9}) {
      const auto next = LikelyNextBlock(index_, node, least);
      const bool is_there = !all.seen.empty() && all.seen.front().probability >= least;
      ASSERT_EQ(next.has_value(), is_there);
      if (!next) continue;
      ++likely;
      EXPECT_EQ(next->child, all.seen.front().child);
      EXPECT_EQ(next->probability, all.seen.front().probability);
    }
  }
  EXPECT_GT(likely, 20);
}

TEST_F(TrieProbabilityTest, AmongVeryManyChildrenNoneIsSoughtForLong) {
  const NodeRef parent = Grow(0, 1, 1'000'000);
  const NodeRef likely = Grow(parent, 1, 1'000'000);
  ASSERT_TRUE(LikelyNextBlock(index_, parent, 0.9).has_value());
  EXPECT_EQ(LikelyNextBlock(index_, parent, 0.9)->child, likely);
  for (int i = 0; i < 100; ++i) Grow(parent, 1);
  EXPECT_FALSE(LikelyNextBlock(index_, parent, 0.9).has_value());
}

TEST_F(TrieProbabilityTest, IsTheChineseRestaurantByHand) {
  const NodeRef up = Grow(0, 1, 9);      // 10 passes
  const NodeRef often = Grow(up, 1, 5);  // 6
  const NodeRef once = Grow(up, 1);      // 1; so 3 ended
  EXPECT_DOUBLE_EQ(NextBlockProbability(index_, often), 5.5 / 11);
  EXPECT_DOUBLE_EQ(NextBlockProbability(index_, once), 0.5 / 11);
  const NextBlocks next = NextBlocksAfter(index_, slot_, up);
  EXPECT_DOUBLE_EQ(next.unseen, 2.0 / 11);
  EXPECT_DOUBLE_EQ(next.end, 3.0 / 11);
  EXPECT_DOUBLE_EQ(UnseenBlockBits(next, 16), std::log2(5.5) + 16 * kPriorBitsPerToken);
  // Nothing seen: all is unseen.
  EXPECT_DOUBLE_EQ(NextBlocksAfter(index_, slot_, once).unseen, 1.0 / 2);
  EXPECT_DOUBLE_EQ(NextBlocksAfter(index_, slot_, once).end, 1.0 / 2);
}

// A put without a lookup before it counts no pass of what it extends.
TEST_F(TrieProbabilityTest, MoreChildrenThanPassesAreNoMassAboveOne) {
  const NodeRef up = Grow(0, 1);
  for (int child = 0; child < 10; ++child) Grow(up, 1, 3);
  const NextBlocks next = NextBlocksAfter(index_, slot_, up);
  double sum = next.unseen;
  for (const NextBlock& block : next.seen) sum += block.probability;
  EXPECT_NEAR(sum, 1, 1e-12);
  EXPECT_EQ(next.end, 0);
}

}  // namespace
}  // namespace kvtrie
