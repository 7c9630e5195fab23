#include "storage/group/group_tree.h"

#include <map>
#include <set>

#include "gmock/gmock.h"
#include "storage/trie/trie_probability.h"
#include "tests/storage/group/group_fixture.h"

namespace kvtrie {
namespace {

class GroupTreeTest : public GroupFixture {
 protected:
  GroupTree TreeOf(NodeRef cut) const {
    return {index_, cut, [this](NodeRef ref) { return BytesOf(ref); }};
  }
  static std::uint64_t BytesOf(NodeRef ref) { return 100 + ref % 7; }
  std::vector<GroupBranch> BranchesOf(NodeRef cut, std::size_t most = 1000) const {
    bool is_all = false;
    auto branches = TreeOf(cut).Branches(most, &is_all);
    EXPECT_TRUE(is_all);
    return branches;
  }
};

TEST_F(GroupTreeTest, TheSharedPrefixEndsWhereMembersPart) {
  const NodeRef cut = GrowPath(0, 5);
  const NodeRef shared = GrowPath(cut, 2);
  GrowPath(shared, 3);
  const NodeRef second = GrowPath(shared, 1);
  GroupSums sums = TreeOf(cut).sums();
  EXPECT_EQ(sums.shared_end, shared);
  EXPECT_EQ(sums.shared_blocks, 7u);
  EXPECT_DOUBLE_EQ(sums.shared_bits, 140);
  EXPECT_FALSE(sums.is_estimated);
  // One that leaves earlier moves it up; when that goes, it moves down again.
  const NodeRef early = GrowPath(cut, 1);
  EXPECT_EQ(TreeOf(cut).sums().shared_end, cut);
  DropPath(early);
  EXPECT_EQ(TreeOf(cut).sums().shared_end, shared);
  GrowPath(second, 1);
  GrowPath(second, 1);
  groups_.AddName(second);
  EXPECT_EQ(TreeOf(cut).sums().sessions, 4u);
}

TEST_F(GroupTreeTest, ASessionThatEndsOnTheWayEndsTheSharedPrefix) {
  const NodeRef cut = GrowPath(0, 5);
  const NodeRef middle = GrowPath(cut, 2);
  GrowPath(middle, 3);
  groups_.AddName(middle);
  const GroupSums sums = TreeOf(cut).sums();
  EXPECT_EQ(sums.sessions, 2u);
  EXPECT_EQ(sums.shared_end, middle);
  const auto branches = BranchesOf(cut);
  ASSERT_EQ(branches.size(), 2u);
  EXPECT_EQ(branches[0].sessions, 2u);
  EXPECT_EQ(branches[1].sessions, 1u);
  EXPECT_EQ(branches[1].blocks, 3u);
}

TEST_F(GroupTreeTest, EstimatesAreMarked) {
  const NodeRef cut = Grow(GrowPath(0, 5), 0);
  GrowPath(cut, 1);
  Grow(cut, 0);
  const NodeRef group = groups_.CutOf(cut);
  EXPECT_TRUE(TreeOf(group).sums().is_estimated);
  const auto branches = BranchesOf(group);
  ASSERT_EQ(branches.size(), 3u);
  EXPECT_TRUE(branches[0].is_estimated);
  EXPECT_NE(branches[1].is_estimated, branches[2].is_estimated);
}

TEST_F(GroupTreeTest, BranchesAreASketchOfTheSubtree) {
  const NodeRef cut = GrowPath(0, 5);
  const NodeRef often = GrowPath(cut, 2);
  const NodeRef seldom = GrowPath(cut, 4);
  const NodeRef ends[] = {GrowPath(often, 1), GrowPath(often, 3)};
  for (const NodeRef ref : PathTo(ends[1])) {
    for (int use = 0; use < 9; ++use) index_.Touch(ref, 1);
  }
  const auto branches = BranchesOf(cut);
  ASSERT_EQ(branches.size(), 5u);
  EXPECT_EQ(branches[0].parent, -1);
  EXPECT_EQ(branches[0].first, PathTo(cut).front());
  EXPECT_EQ(branches[0].last, cut);
  EXPECT_EQ(branches[0].blocks, 5u);
  EXPECT_EQ(branches[0].sessions, 3u);
  EXPECT_TRUE(branches[0].on_centroid);
  EXPECT_EQ(branches[1].parent, 0);
  EXPECT_EQ(branches[1].last, often);
  EXPECT_EQ(branches[1].sessions, 2u);
  EXPECT_DOUBLE_EQ(branches[1].surprisal_bits, 40);
  EXPECT_TRUE(branches[1].on_centroid);
  // Ten passes to one of its ends and one to the other; and one to the branch beside it.
  EXPECT_DOUBLE_EQ(branches[1].probability, (11 - kDiscount) / (12 + kConcentration));
  EXPECT_EQ(branches[2].parent, 1);
  EXPECT_EQ(branches[3].parent, 1);
  EXPECT_EQ(branches[4].parent, 0);
  EXPECT_EQ(branches[4].last, seldom);
  EXPECT_FALSE(branches[4].on_centroid);
  const GroupSums sums = TreeOf(cut).sums();
  EXPECT_EQ(sums.centroid_end, ends[1]);
  EXPECT_EQ(sums.centroid_blocks, 10u);
  EXPECT_NE(branches[2].on_centroid, branches[3].on_centroid);
}

TEST_F(GroupTreeTest, OfManyBranchesThoseThatMostSessionsPassAreGiven) {
  const NodeRef cut = GrowPath(0, 5);
  std::vector<NodeRef> forks;
  for (int fork = 0; fork < 20; ++fork) {
    forks.push_back(GrowPath(cut, 2));
    for (int session = 0; session <= fork; ++session) GrowPath(forks.back(), 1);
  }
  bool is_all = true;
  const auto branches = TreeOf(cut).Branches(6, &is_all);
  EXPECT_FALSE(is_all);
  ASSERT_EQ(branches.size(), 6u);
  for (std::size_t i = 1; i < branches.size(); ++i) {
    EXPECT_EQ(branches[i].parent, 0);
    EXPECT_EQ(branches[i].last, forks[20 - i]);
    EXPECT_EQ(branches[i].sessions, 21 - i);
  }
}

// After a start of the store nothing is counted; the stored paths are what is known of traffic.
TEST_F(GroupTreeTest, WithoutCountedUsesTheCentroidGoesWhereMostSessionsAre) {
  const NodeRef cut = GrowPath(0, 5);
  for (int lone = 0; lone < 5; ++lone) GrowPath(cut, 9);
  const NodeRef often = GrowPath(cut, 2);
  for (int session = 0; session < 4; ++session) GrowPath(often, 1);
  const GroupTree tree = TreeOf(cut);
  EXPECT_EQ(tree.sums().centroid_blocks, 8u);
  EXPECT_EQ(index_.parent(tree.sums().centroid_end), often);
  double sum = 0;
  for (const GroupBranch& branch : BranchesOf(cut)) {
    if (branch.parent != 0) continue;
    sum += branch.probability;
    // 9 passes went on to 6 children.
    EXPECT_DOUBLE_EQ(branch.probability, (branch.last == often ? 3.5 : 0.5) / 10);
  }
  EXPECT_DOUBLE_EQ(sum, 0.6);
}

// Sums by the definition: paths of all members, and their union.
TEST_F(GroupTreeTest, SumsAreThoseOfTheMembersPaths) {
  std::mt19937_64 random(7);
  std::size_t groups_seen = 0;
  for (int round = 0; round < 60; ++round) {
    for (int step = 0; step < 20; ++step) {
      const auto alive = AliveNodes();
      const bool is_first = alive.empty() || random() % 10 == 0;
      const NodeRef grown = Grow(is_first ? 0 : alive[random() % alive.size()],
                                 static_cast<float>(5 + random() % 60));
      if (random() % 4 == 0) groups_.AddName(is_first ? grown : alive[random() % alive.size()]);
      if (alive.size() > 60) {
        const NodeRef leaf = alive[random() % alive.size()];
        if (index_.node(leaf).is_leaf()) Drop(leaf);
      }
    }
    for (const NodeRef cut : AllGroups()) {
      ++groups_seen;
      std::map<NodeRef, std::uint64_t> passes;
      std::uint64_t alone_bytes = 0;
      std::uint64_t sessions = 0;
      for (const NodeRef end : SessionEnds()) {
        if (groups_.CutOf(end) != cut) continue;
        ++sessions;
        for (const NodeRef ref : PathTo(end)) {
          ++passes[ref];
          alone_bytes += BytesOf(ref);
        }
      }
      std::uint64_t stored_bytes = 0;
      NodeRef shared_end = 0;
      for (const auto& [ref, count] : passes) {
        stored_bytes += BytesOf(ref);
        if (count == sessions &&
            (shared_end == 0 || index_.node(ref).depth > index_.node(shared_end).depth)) {
          shared_end = ref;
        }
      }
      const GroupTree tree = TreeOf(cut);
      const GroupSums sums = tree.sums();
      ASSERT_EQ(sums.sessions, sessions);
      ASSERT_EQ(sums.sessions, groups_.SessionCount(cut));
      ASSERT_EQ(sums.blocks, passes.size());
      ASSERT_EQ(sums.stored_bytes, stored_bytes);
      ASSERT_EQ(sums.saved_bytes, alone_bytes - stored_bytes);
      ASSERT_EQ(sums.shared_end, shared_end);
      // The branches are all of it, and each is as many sessions pass.
      std::uint64_t blocks = 0;
      std::uint64_t bytes = 0;
      for (const GroupBranch& branch : BranchesOf(cut)) {
        blocks += branch.blocks;
        bytes += branch.stored_bytes;
        ASSERT_EQ(branch.sessions, passes[branch.last]);
        ASSERT_EQ(branch.sessions, passes[branch.first]);
      }
      ASSERT_EQ(blocks, passes.size());
      ASSERT_EQ(bytes, stored_bytes);
    }
  }
  EXPECT_GT(groups_seen, 60u);
}

}  // namespace
}  // namespace kvtrie
