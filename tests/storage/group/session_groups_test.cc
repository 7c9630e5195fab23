#include "storage/group/session_groups.h"

#include <map>
#include <numeric>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "storage/group/group_tree.h"
#include "tests/storage/group/group_fixture.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

using SessionGroupsTest = GroupFixture;

TEST_F(SessionGroupsTest, TwoSessionsThatShareTheThresholdAreAGroup) {
  const NodeRef shared = GrowPath(0, 5);  // 100 bits
  GrowPath(shared, 1);
  EXPECT_THAT(AllGroups(), IsEmpty());
  GrowPath(shared, 3);
  EXPECT_THAT(AllGroups(), ElementsAre(shared));
  EXPECT_EQ(groups_.SessionCount(shared), 2u);
}

TEST_F(SessionGroupsTest, SessionsThatShareLessAreNone) {
  const NodeRef shared = GrowPath(0, 4);  // 80 bits
  GrowPath(shared, 3);
  GrowPath(shared, 3);
  EXPECT_THAT(AllGroups(), IsEmpty());
  EXPECT_EQ(groups_.CutOf(shared), 0u);
}

TEST_F(SessionGroupsTest, AGroupIsNamedByTheFirstNodeThatReachesTheThreshold) {
  const NodeRef cut = GrowPath(0, 5);
  const NodeRef shared = GrowPath(cut, 10);
  const NodeRef end = GrowPath(shared, 2);
  GrowPath(shared, 2);
  EXPECT_THAT(AllGroups(), ElementsAre(cut));
  for (const NodeRef ref : {cut, shared, end}) EXPECT_EQ(groups_.CutOf(ref), cut);
  EXPECT_EQ(groups_.CutOf(index_.parent(cut)), 0u);
}

TEST_F(SessionGroupsTest, ASessionThatGrowsStaysOne) {
  const NodeRef shared = GrowPath(0, 5);
  const NodeRef first = GrowPath(shared, 1);
  GrowPath(shared, 1);
  GrowPath(first, 20);
  EXPECT_EQ(groups_.SessionCount(shared), 2u);
}

TEST_F(SessionGroupsTest, AGroupDissolvesWithItsLastButOneSession) {
  const NodeRef shared = GrowPath(0, 5);
  const NodeRef ends[] = {GrowPath(shared, 3), GrowPath(shared, 3), GrowPath(shared, 3)};
  EXPECT_EQ(groups_.SessionCount(shared), 3u);
  DropPath(ends[1]);
  EXPECT_EQ(groups_.SessionCount(shared), 2u);
  DropPath(ends[0]);
  EXPECT_THAT(AllGroups(), IsEmpty());
  EXPECT_EQ(groups_.group_count(), 0u);
  GrowPath(shared, 1);
  EXPECT_THAT(AllGroups(), ElementsAre(shared));
}

TEST_F(SessionGroupsTest, NamesMakeSessionsOfInnerNodesAndOfEqualPaths) {
  const NodeRef cut = GrowPath(0, 5);
  const NodeRef middle = GrowPath(cut, 1);
  const NodeRef end = GrowPath(middle, 1);
  groups_.AddName(end);  // the leaf's own session
  EXPECT_THAT(AllGroups(), IsEmpty());
  groups_.AddName(middle);  // one that ends early
  EXPECT_EQ(groups_.SessionCount(cut), 2u);
  groups_.AddName(end);  // another one of the same path
  EXPECT_EQ(groups_.SessionCount(cut), 3u);
  groups_.RemoveName(middle);
  groups_.RemoveName(end);
  EXPECT_THAT(AllGroups(), IsEmpty());
  groups_.RemoveName(end);
  groups_.RemoveName(end);  // there is none left
  EXPECT_TRUE(groups_.CheckInvariants().ok());
}

TEST_F(SessionGroupsTest, WithoutAThresholdThereAreNoGroups) {
  SessionGroups off(index_, 0);
  const NodeRef shared = GrowPath(0, 5);
  for (int session = 0; session < 3; ++session) off.OnInserted(GrowPath(shared, 1));
  off.AddName(shared);
  off.Rebuild();
  EXPECT_EQ(off.group_count(), 0u);
  EXPECT_EQ(off.CutOf(shared), 0u);
}

TEST_F(SessionGroupsTest, ListsInPages) {
  std::vector<NodeRef> cuts;
  for (int group = 0; group < 10; ++group) {
    cuts.push_back(GrowPath(0, 5));
    GrowPath(cuts.back(), 1);
    GrowPath(cuts.back(), 1);
  }
  EXPECT_EQ(AllGroups(), cuts);
  std::vector<NodeRef> paged;
  NodeRef after = 0;
  while (true) {
    const auto page = groups_.List(after, 3, [&](NodeRef cut) { return cut != cuts[4]; });
    paged.insert(paged.end(), page.begin(), page.end());
    if (page.size() < 3) break;
    after = page.back();
  }
  cuts.erase(cuts.begin() + 4);
  EXPECT_EQ(paged, cuts);
}

// Agglomeration by the definition: all pairs, joined while they share enough.
class Agglomeration {
 public:
  Agglomeration(const TrieIndex& index, std::vector<NodeRef> ends, double threshold_bits)
      : ends_(std::move(ends)), group_of_(ends_.size()) {
    std::vector<std::set<NodeRef>> above(ends_.size());
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      for (NodeRef at = ends_[i]; at != 0; at = index.parent(at)) above[i].insert(at);
    }
    std::iota(group_of_.begin(), group_of_.end(), std::size_t{0});
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        double shared_bits = 0;
        for (const NodeRef at : above[i]) {
          if (!above[j].contains(at)) continue;
          shared_bits = std::max(shared_bits, static_cast<double>(index.node(at).surprisal_bits));
        }
        if (shared_bits >= threshold_bits) Join(i, j);
      }
    }
  }
  // Groups of two or more sessions, as the multisets of where they end.
  std::multiset<std::multiset<NodeRef>> Groups() const {
    std::map<std::size_t, std::multiset<NodeRef>> by_group;
    for (std::size_t i = 0; i < ends_.size(); ++i) by_group[group_of_[i]].insert(ends_[i]);
    std::multiset<std::multiset<NodeRef>> groups;
    for (const auto& [_, members] : by_group) {
      if (members.size() > 1) groups.insert(members);
    }
    return groups;
  }

 private:
  void Join(std::size_t a, std::size_t b) {
    const std::size_t from = group_of_[a];
    for (std::size_t& group : group_of_) {
      if (group == from) group = group_of_[b];
    }
  }

  std::vector<NodeRef> ends_;
  std::vector<std::size_t> group_of_;
};

TEST_F(SessionGroupsTest, AreWhatAgglomerationOfAllPairsFinds) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::size_t groups_seen = 0;
    for (int step = 0; step < 1500; ++step) {
      const auto alive = AliveNodes();
      const auto any = [&] { return alive[random() % alive.size()]; };
      const auto choice = random() % 100;
      if (alive.empty() || (choice < 45 && alive.size() < 80)) {
        const bool is_first = alive.empty() || random() % 8 == 0;
        // Some are not said, some reach the threshold at once.
        const float bits = static_cast<float>(random() % 4 == 0 ? 0 : 1 + random() % 60);
        Grow(is_first ? 0 : any(), random() % 20 == 0 ? 150 : bits);
      } else if (choice < 75) {
        const NodeRef ref = any();
        if (index_.node(ref).is_leaf()) Drop(ref);
      } else if (choice < 87) {
        groups_.AddName(any());
      } else if (choice < 97) {
        groups_.RemoveName(any());
      } else {
        index_.Touch(any(), 1);
      }
      if (step % 10 != 0) continue;
      ASSERT_TRUE(groups_.CheckInvariants().ok()) << groups_.CheckInvariants();
      const auto ends = SessionEnds();
      const auto expected = Agglomeration(index_, ends, kThresholdBits).Groups();
      std::multiset<std::multiset<NodeRef>> found;
      for (const NodeRef cut : AllGroups()) {
        std::multiset<NodeRef> members;
        for (const NodeRef end : ends) {
          if (groups_.CutOf(end) == cut) members.insert(end);
        }
        EXPECT_EQ(members.size(), groups_.SessionCount(cut));
        found.insert(std::move(members));
      }
      ASSERT_EQ(found, expected);
      groups_seen += expected.size();
    }
    EXPECT_GT(groups_seen, 100u);
  }
}

// Ids and counts, in the order of the list.
std::vector<std::pair<TrieNodeId, std::uint32_t>> Listed(const TrieIndex& index,
                                                         const SessionGroups& groups) {
  std::vector<std::pair<TrieNodeId, std::uint32_t>> listed;
  for (const NodeRef cut : groups.List(0, SIZE_MAX, [](NodeRef) { return true; })) {
    listed.emplace_back(index.node(cut).id, groups.SessionCount(cut));
  }
  return listed;
}

// Sessions of `blocks` each: nodes are named by what leads to them, as in the store.
struct Arrivals {
  explicit Arrivals(const std::vector<std::vector<int>>& sessions) : index(1 << 20) {
    slot = *index.AddModel(TenantId{1}, ModelId{}, 4);
    for (const auto& session : sessions) Arrive(session);
  }
  void Arrive(const std::vector<int>& session) {
    NodeRef parent = 0;
    std::string path;
    for (const int block : session) {
      path += std::to_string(block) + ",";
      const auto [found, is_new] = nodes.try_emplace(path, 0);
      if (is_new) {
        const auto number = std::hash<std::string>()(path);
        TrieNodeId id;
        std::mt19937_64 random(number);
        for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
        found->second = index.Insert({.id = id,
                                      .parent = parent,
                                      .model = slot,
                                      .path_hash = number,
                                      .block_surprisal_bits = 30});
        groups.OnInserted(found->second);
      }
      parent = found->second;
    }
  }
  TrieIndex index;
  SessionGroups groups{index, 100};
  ModelSlot slot = 0;
  std::map<std::string, NodeRef> nodes;
};

TEST(SessionGroupsOrderTest, TheSameOrderOfArrivalsGivesTheSameListAndAnyOtherTheSameGroups) {
  std::mt19937_64 random(11);
  std::vector<std::vector<int>> sessions;
  for (int i = 0; i < 300; ++i) {
    std::vector<int> session;
    for (int block = 0; block < 8; ++block) session.push_back(static_cast<int>(random() % 3));
    sessions.push_back(std::move(session));
  }
  const Arrivals first(sessions);
  const Arrivals again(sessions);
  const auto expected = Listed(first.index, first.groups);
  ASSERT_GT(expected.size(), 20u);
  EXPECT_EQ(Listed(again.index, again.groups), expected);
  std::shuffle(sessions.begin(), sessions.end(), random);
  const Arrivals shuffled(sessions);
  EXPECT_THAT(Listed(shuffled.index, shuffled.groups),
              testing::UnorderedElementsAreArray(expected));
}

TEST_F(SessionGroupsTest, RebuildFindsWhatWasKept) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 400; ++i) {
    const auto alive = AliveNodes();
    const bool is_first = alive.empty() || random() % 10 == 0;
    Grow(is_first ? 0 : alive[random() % alive.size()], static_cast<float>(1 + random() % 60));
    if (i % 5 == 0) groups_.AddName(alive.empty() ? 1 : alive[random() % alive.size()]);
  }
  SessionGroups anew(index_, kThresholdBits);
  anew.Rebuild();
  ASSERT_GT(anew.group_count(), 2u);
  EXPECT_EQ(Listed(index_, anew), Listed(index_, groups_));
}

// Prompts come in waves, in groups and alone, and each wave is deleted again.
TEST_F(SessionGroupsTest, WavesOfPromptsLeaveNothingBehind) {
  const NodeRef kept = GrowPath(0, 5);
  GrowPath(kept, 2);
  GrowPath(kept, 2);
  const std::size_t nodes_before = index_.node_count();
  std::size_t settled_bytes = 0;
  for (int wave = 0; wave < 6; ++wave) {
    std::vector<NodeRef> ends;
    for (int prompt = 0; prompt < 4000; ++prompt) {
      if (prompt % 10 == 0) {
        ends.push_back(GrowPath(0, 8));
      } else {
        const std::size_t back = std::min(ends.size() - 1, ends.size() % 3);
        ends.push_back(GrowPath(PathTo(ends[ends.size() - 1 - back])[5], 3));
      }
    }
    // One long prompt, and a branch at each of its blocks.
    const auto trunk = PathTo(GrowPath(0, 500));
    for (const NodeRef block : trunk) ends.push_back(GrowPath(block, 1));
    ends.push_back(trunk.back());
    EXPECT_GT(groups_.group_count(), 100u);
    EXPECT_LE(groups_.memory_bytes(), 16 * ends.size());
    for (const NodeRef end : ends) {
      if (index_.alive(end)) DropPath(end);
    }
    EXPECT_EQ(index_.node_count(), nodes_before);
    EXPECT_THAT(AllGroups(), ElementsAre(kept));
    if (wave == 1) settled_bytes = index_.memory_bytes();
    if (wave > 1) {
      // Parts of the tables are as large as what has once fallen into them.
      EXPECT_LE(index_.memory_bytes(), settled_bytes + settled_bytes / 20);
    }
  }
  EXPECT_TRUE(groups_.CheckInvariants().ok());
}

}  // namespace
}  // namespace kvtrie
