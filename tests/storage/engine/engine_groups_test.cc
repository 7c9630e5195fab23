#include <bit>
#include <cmath>
#include <set>

#include "gmock/gmock.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

// Blocks of 16 tokens are estimated at 60 bits, so 3 of them make the default threshold of 128.
constexpr std::uint32_t kCutBlocks = 3;
constexpr double kBlockBits = 60;

class EngineGroupsTest : public EngineFixture {
 protected:
  // `shared` blocks of the group `group`, and `own` of the session.
  static std::vector<TokenId> Member(std::uint64_t group, std::size_t shared, std::uint64_t session,
                                     std::size_t own) {
    auto tokens = SessionTokens(group, shared * kTestBlockTokens);
    const auto rest = SessionTokens(1'000'000 + session, own * kTestBlockTokens);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    return tokens;
  }
  void MustPutNamed(std::span<const TokenId> tokens, std::string_view name) {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    put.session_id = name;
    for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  }
  std::vector<GroupInfo> Groups() const {
    const auto page = engine_->ListGroups(tenant_, {}, 1000);
    EXPECT_TRUE(page.ok()) << page.status();
    return page.ok() ? page->groups : std::vector<GroupInfo>();
  }
  std::vector<TrieNodeId> NodesOf(std::span<const TokenId> tokens) {
    std::vector<TrieNodeId> ids;
    const LookupResult found = Lookup(tokens);
    for (const MatchedBlock& block : found.blocks.front()) ids.push_back(block.node);
    return ids;
  }
  GroupDescription Described(const TrieNodeId& id, std::size_t branches_max = 100) const {
    const auto described = engine_->DescribeGroup(tenant_, id, branches_max);
    EXPECT_TRUE(described.ok()) << described.status();
    return described.ok() ? *described : GroupDescription{};
  }
};

TEST_F(EngineGroupsTest, SessionsThatShareAPrefixAreAGroupThatLookupsName) {
  Open();
  const auto first = Member(1, 5, 1, 2);
  const auto second = Member(1, 5, 2, 4);
  MustPut(first);
  EXPECT_THAT(Groups(), IsEmpty());
  EXPECT_TRUE(Lookup(first).group.empty());
  MustPut(second);
  MustPut(SessionTokens(77, 160));  // alone
  ASSERT_THAT(Groups(), SizeIs(1));
  const GroupInfo group = Groups()[0];
  const auto nodes = NodesOf(first);
  EXPECT_EQ(group.id, nodes[kCutBlocks - 1]);
  EXPECT_EQ(group.model, model_);
  EXPECT_EQ(group.sessions, 2u);
  EXPECT_EQ(group.shared_blocks, 5u);
  EXPECT_EQ(group.shared_end, nodes[4]);
  EXPECT_DOUBLE_EQ(group.shared_bits, 5 * kBlockBits);
  EXPECT_TRUE(group.shared_bits_estimated);
  EXPECT_EQ(group.blocks, 11u);
  // All blocks are equally large: five of them would be stored twice.
  EXPECT_EQ(group.saved_bytes, group.stored_bytes / 11 * 5);
  EXPECT_EQ(Lookup(first).group, group.id);
  EXPECT_EQ(Lookup(std::span(first).first(kCutBlocks * kTestBlockTokens)).group, group.id);
  EXPECT_TRUE(Lookup(std::span(first).first(2 * kTestBlockTokens)).group.empty());
  EXPECT_TRUE(Lookup(SessionTokens(77, 160)).group.empty());
  EXPECT_EQ(*engine_->GroupOf(tenant_, nodes.back()), group.id);
  EXPECT_EQ(*engine_->GroupOf(tenant_, nodes.front()), std::nullopt);
  EXPECT_TRUE(absl::IsNotFound(engine_->GroupOf(tenant_, TrieNodeId{}).status()));
  EXPECT_EQ(engine_->Stats().group_count, 1u);
  ExpectSound();
}

TEST_F(EngineGroupsTest, AGroupIsDescribedWithItsBranchesAndCentroid) {
  Open();
  const auto rare = Member(1, 5, 1, 2);
  const auto usual = Member(1, 5, 2, 4);
  MustPut(rare);
  MustPut(usual);
  for (int i = 0; i < 5; ++i) Lookup(usual);
  const auto nodes = NodesOf(usual);
  const GroupDescription described = Described(nodes[kCutBlocks - 1]);
  EXPECT_TRUE(described.is_all);
  EXPECT_EQ(described.group.centroid_end, nodes.back());
  EXPECT_EQ(described.group.centroid_blocks, 9u);
  ASSERT_THAT(described.branches, SizeIs(3));
  EXPECT_EQ(described.branches[0].first, nodes[0]);
  EXPECT_EQ(described.branches[0].last, nodes[4]);
  EXPECT_EQ(described.branches[0].sessions, 2u);
  double probability = 0;
  for (const std::size_t i : {1u, 2u}) {
    const GroupBranchInfo& branch = described.branches[i];
    EXPECT_EQ(branch.parent, 0);
    EXPECT_EQ(branch.sessions, 1u);
    EXPECT_EQ(branch.on_centroid, branch.first == nodes[5]);
    EXPECT_EQ(branch.blocks, branch.on_centroid ? 4u : 2u);
    EXPECT_EQ(branch.probability > 0.5, branch.on_centroid);
    probability += branch.probability;
  }
  EXPECT_LT(probability, 1);
  EXPECT_FALSE(Described(nodes[kCutBlocks - 1], 2).is_all);
  EXPECT_TRUE(absl::IsNotFound(engine_->DescribeGroup(tenant_, nodes[4], 10).status()));
  EXPECT_TRUE(absl::IsNotFound(engine_->DescribeGroup(TenantId{9}, nodes[2], 10).status()));
}

TEST_F(EngineGroupsTest, NamedSessionsAreCountedWhereTheyEnd) {
  Open();
  const auto tokens = Member(1, 5, 1, 3);
  MustPutNamed(tokens, "a");
  EXPECT_THAT(Groups(), IsEmpty());
  // The same path once more, and the beginning of it.
  MustPutNamed(tokens, "b");
  ASSERT_THAT(Groups(), SizeIs(1));
  EXPECT_EQ(Groups()[0].sessions, 2u);
  MustPutNamed(std::span(tokens).first(6 * kTestBlockTokens), "c");
  EXPECT_EQ(Groups()[0].sessions, 3u);
  EXPECT_EQ(Groups()[0].shared_blocks, 6u);
  // One that grows leaves its old end.
  MustPutNamed(tokens, "c");
  EXPECT_EQ(Groups()[0].sessions, 3u);
  EXPECT_EQ(Groups()[0].shared_blocks, 8u);
  const auto longer = [&] {
    auto grown = tokens;
    const auto more = SessionTokens(5, 2 * kTestBlockTokens);
    grown.insert(grown.end(), more.begin(), more.end());
    return grown;
  }();
  MustPutNamed(longer, "a");
  EXPECT_EQ(Groups()[0].sessions, 3u);
  EXPECT_EQ(Groups()[0].blocks, 10u);
  ExpectSound();
  const auto before = Groups();
  Reopen();
  ASSERT_THAT(Groups(), SizeIs(1));
  EXPECT_EQ(Groups()[0].id, before[0].id);
  EXPECT_EQ(Groups()[0].sessions, 3u);
  EXPECT_EQ(Groups()[0].saved_bytes, before[0].saved_bytes);
  ExpectSound();

  Selection selection;
  selection.session_id = "b";
  ASSERT_TRUE(engine_->Delete(tenant_, selection).ok());
  EXPECT_EQ(Groups()[0].sessions, 2u);
  selection.session_id = "a";
  ASSERT_TRUE(engine_->Delete(tenant_, selection).ok());
  EXPECT_THAT(Groups(), IsEmpty());
  EXPECT_EQ(Matched(longer), 8u);
  ExpectSound();
}

TEST_F(EngineGroupsTest, GroupsFormMoveAndDissolveWithTheirSessions) {
  Open();
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t i = 0; i < 4; ++i) sessions.push_back(Member(1, 6, i, 3));
  sessions.push_back(Member(1, 4, 9, 3));  // leaves two blocks earlier
  for (const auto& tokens : sessions) MustPut(tokens);
  EXPECT_EQ(Groups()[0].shared_blocks, 4u);
  EXPECT_EQ(Groups()[0].sessions, 5u);
  const TrieNodeId id = Groups()[0].id;
  const auto delete_own = [&](const std::vector<TokenId>& tokens, std::size_t from_block) {
    Selection selection;
    selection.path = PathOf(std::span(tokens).first((from_block + 1) * kTestBlockTokens));
    ASSERT_TRUE(engine_->Delete(tenant_, selection).ok());
  };
  delete_own(sessions[4], 4);
  EXPECT_EQ(Groups()[0].shared_blocks, 6u);
  for (int i = 0; i < 2; ++i) delete_own(sessions[static_cast<std::size_t>(i)], 6);
  EXPECT_EQ(Groups()[0].sessions, 2u);
  EXPECT_EQ(Groups()[0].id, id);
  delete_own(sessions[2], 6);
  EXPECT_THAT(Groups(), IsEmpty());
  EXPECT_TRUE(absl::IsNotFound(engine_->DescribeGroup(tenant_, id, 10).status()));
  EXPECT_EQ(engine_->Stats().group_count, 0u);
  EXPECT_EQ(Matched(sessions[3]), 9u);
  MustPut(sessions[0]);
  EXPECT_EQ(Groups()[0].id, id);
  ExpectSound();
}

TEST_F(EngineGroupsTest, ARestartFindsTheSameGroups) {
  Open();
  for (std::uint64_t group = 0; group < 6; ++group) {
    for (std::uint64_t session = 0; session < 2 + group; ++session) {
      MustPut(Member(group, 3 + group, 100 * group + session, 1 + session));
    }
  }
  const auto by_id = [](std::vector<GroupInfo> groups) {
    std::sort(groups.begin(), groups.end(),
              [](const GroupInfo& a, const GroupInfo& b) { return a.id < b.id; });
    return groups;
  };
  const auto before = by_id(Groups());
  Reopen();
  const auto after = by_id(Groups());
  ASSERT_THAT(before, SizeIs(6));
  ASSERT_THAT(after, SizeIs(6));
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(after[i].id, before[i].id);
    EXPECT_EQ(after[i].sessions, before[i].sessions);
    EXPECT_EQ(after[i].shared_end, before[i].shared_end);
    EXPECT_EQ(after[i].stored_bytes, before[i].stored_bytes);
    EXPECT_EQ(after[i].saved_bytes, before[i].saved_bytes);
  }
  ExpectSound();
}

TEST_F(EngineGroupsTest, ProbabilitiesOfTheClientDecideWhereTheCutIs) {
  Open();
  // 1 bit per token: 16 per block, so 8 blocks make 128 bits.
  const auto put = [&](const std::vector<TokenId>& tokens) {
    const auto one_bit = std::bit_cast<std::uint16_t>(static_cast<_Float16>(-std::log(2.0)));
    const std::vector<std::uint16_t> halves(tokens.size(), one_bit);
    PutAnnouncement announcement;
    announcement.path = PathOf(tokens);
    announcement.probabilities.log_probs = {reinterpret_cast<const char*>(halves.data()),
                                            2 * halves.size()};
    for (const auto& result : Put(announcement)) ASSERT_TRUE(result.ok()) << result.status();
  };
  put(Member(1, 7, 1, 4));
  put(Member(1, 7, 2, 4));
  EXPECT_THAT(Groups(), IsEmpty());
  put(Member(2, 9, 3, 4));
  put(Member(2, 9, 4, 4));
  ASSERT_THAT(Groups(), SizeIs(1));
  EXPECT_NEAR(Groups()[0].shared_bits, 9 * 16, 0.2);
  EXPECT_FALSE(Groups()[0].shared_bits_estimated);
  const auto id = Groups()[0].id;
  Reopen();
  ASSERT_THAT(Groups(), SizeIs(1));
  EXPECT_EQ(Groups()[0].id, id);
  EXPECT_FALSE(Groups()[0].shared_bits_estimated);
  const auto infos = engine_->DescribePath(tenant_, SelectionOf(PathOf(Member(2, 9, 3, 4))));
  ASSERT_TRUE(infos.ok());
  EXPECT_NEAR(infos->back().surprisal_bits, 13 * 16, 0.2);
  EXPECT_FALSE(infos->back().surprisal_estimated);
}

TEST_F(EngineGroupsTest, BadProbabilitiesRefuseThePutAndNameTheToken) {
  Open();
  const auto tokens = SessionTokens(1, 2 * kTestBlockTokens);
  std::vector<std::uint16_t> halves(tokens.size(), 0xbc00);
  halves[20] = 0x3c00;  // 1 nat
  PutAnnouncement put;
  put.path = PathOf(tokens);
  put.probabilities.log_probs = {reinterpret_cast<const char*>(halves.data()), 2 * halves.size()};
  const auto refused = engine_->BeginPut(tenant_, put).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("probabilities.log_probs: token 20 "));
  EXPECT_EQ(engine_->Stats().open_puts, 0u);
}

TEST_F(EngineGroupsTest, PagesGoThroughAllGroupsOfATenant) {
  Open();
  for (std::uint64_t group = 0; group < 7; ++group) {
    MustPut(Member(group, 3, 2 * group, 1));
    MustPut(Member(group, 3, 2 * group + 1, 1));
  }
  std::set<TrieNodeId> seen;
  TrieNodeId after;
  std::size_t pages = 0;
  do {
    const auto page = engine_->ListGroups(tenant_, after, 3);
    ASSERT_TRUE(page.ok()) << page.status();
    for (const GroupInfo& group : page->groups) EXPECT_TRUE(seen.insert(group.id).second);
    after = page->next;
    ++pages;
  } while (!after.empty());
  EXPECT_EQ(seen.size(), 7u);
  EXPECT_EQ(pages, 3u);
  const auto others = engine_->ListGroups(TenantId{9}, {}, 100);
  ASSERT_TRUE(others.ok());
  EXPECT_THAT(others->groups, IsEmpty());
  EXPECT_TRUE(absl::IsNotFound(engine_->ListGroups(TenantId{9}, *seen.begin(), 3).status()));
  TrieNodeId unknown;
  unknown.bytes.fill(1);
  EXPECT_TRUE(absl::IsNotFound(engine_->ListGroups(tenant_, unknown, 3).status()));
}

TEST_F(EngineGroupsTest, AThresholdOfZeroTurnsThemOff) {
  options_.group_threshold_bits = 0;
  Open();
  MustPutNamed(Member(1, 5, 1, 2), "a");
  MustPutNamed(Member(1, 5, 2, 2), "b");
  EXPECT_THAT(Groups(), IsEmpty());
  EXPECT_TRUE(Lookup(Member(1, 5, 1, 2)).group.empty());
  ExpectSound();
}

// Eviction, expiry and deletes on one side, puts with and without names on the other.
TEST_F(EngineGroupsTest, CountsStayRightUnderEvictionExpiryAndNames) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  spec_.kv_groups.front().layer_runs = {{2, 2, 4096, 4096}};  // 512 KiB
  Open();
  std::mt19937_64 random(17);
  for (int step = 0; step < 150; ++step) {
    const auto tokens = Member(random() % 4, 3 + random() % 3, random() % 40, 1 + random() % 10);
    PutAnnouncement put;
    put.path = PathOf(tokens);
    const std::string name = std::to_string(random() % 12);
    if (random() % 2 == 0) put.session_id = name;
    if (random() % 5 == 0) put.ttl = std::chrono::seconds(5);
    Put(put);
    if (random() % 10 == 0) {
      Selection selection;
      selection.session_id = name;
      ASSERT_TRUE(engine_->Delete(tenant_, selection).ok());
    }
    clock_.Advance(std::chrono::seconds(1));
    if (step % 15 == 0) {
      engine_->RunMaintenance();
      const absl::Status sound = engine_->Verify(true, false, [](const VerifyProgress& progress) {
        for (const VerifyFinding& finding : progress.findings) ADD_FAILURE() << finding.what;
        return true;
      });
      ASSERT_TRUE(sound.ok());
    }
  }
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_GT(engine_->Stats().expired_blocks_total, 0u);
  EXPECT_GT(engine_->Stats().group_count, 0u);
  ExpectSound();
}

}  // namespace
}  // namespace kvtrie
