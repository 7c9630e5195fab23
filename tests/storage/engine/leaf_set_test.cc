#include "storage/engine/leaf_set.h"

#include <algorithm>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/storage/engine/index_fixture.h"

namespace kvtrie {
namespace {

class LeafSetTest : public IndexFixture {
 protected:
  NodeRef AddNode(NodeRef parent) {
    const NodeRef ref = Insert(parent);
    leaves_.Add(index_, ref);
    return ref;
  }
  void EraseLeaf(NodeRef ref) {
    const NodeRef parent = index_.parent(ref);
    index_.Erase(ref);
    if (parent != 0 && index_.node(parent).is_leaf()) leaves_.Add(index_, parent);
  }
  std::set<NodeRef> Leaves() const {
    std::set<NodeRef> leaves;
    for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
      if (index_.alive(ref) && index_.node(ref).is_leaf()) leaves.insert(ref);
    }
    return leaves;
  }
  LeafSet leaves_;
};

TEST_F(LeafSetTest, DrawsAllLeavesAndNothingElse) {
  std::mt19937 random(3);
  std::vector<NodeRef> nodes;
  for (int step = 0; step < 5000; ++step) {
    std::erase_if(nodes, [this](NodeRef ref) { return !index_.alive(ref); });
    if (!nodes.empty() && random() % 3 == 0) {
      const NodeRef ref = nodes[random() % nodes.size()];
      if (index_.node(ref).is_leaf()) EraseLeaf(ref);
    } else {
      nodes.push_back(
          AddNode(nodes.empty() || random() % 4 == 0 ? 0 : nodes[random() % nodes.size()]));
    }
    if (step % 100 == 0) {
      const std::vector<NodeRef> drawn = leaves_.Draw(index_, 100'000);
      EXPECT_EQ(std::set<NodeRef>(drawn.begin(), drawn.end()), Leaves()) << step;
      EXPECT_EQ(drawn.size(), Leaves().size());
    }
  }
}

TEST_F(LeafSetTest, ADrawOfSomeIsOfDifferentLeavesAndGoesRound) {
  for (int i = 0; i < 2000; ++i) AddNode(0);
  std::set<NodeRef> seen;
  for (int draw = 0; draw < 60; ++draw) {
    const std::vector<NodeRef> drawn = leaves_.Draw(index_, 100);
    EXPECT_EQ(drawn.size(), 100u);
    EXPECT_EQ(std::set<NodeRef>(drawn.begin(), drawn.end()).size(), 100u);
    seen.insert(drawn.begin(), drawn.end());
  }
  // Of 60 x 100 even draws from 2,000, all but 5 % are expected to come up.
  EXPECT_GT(seen.size(), 1800u);
}

TEST_F(LeafSetTest, StaleEntriesStayFewInLongPaths) {
  for (int path = 0; path < 100; ++path) {
    NodeRef at = 0;
    for (int block = 0; block < 200; ++block) at = AddNode(at);
  }
  EXPECT_EQ(Leaves().size(), 100u);
  EXPECT_LE(leaves_.size(), 300u);
}

}  // namespace
}  // namespace kvtrie
