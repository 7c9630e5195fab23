#include "storage/trie/similar_sessions.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/trie/surprisal.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kBlock = 16;
constexpr TenantId kTenant{1};
using Tokens = std::vector<TokenId>;

// A hash of a number, as a quick source of ids and texts.
std::uint64_t Mixed(std::uint64_t number) {
  std::uint64_t hash = (number + 1) * 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return hash ^ hash >> 31;
}

Tokens TextOf(std::uint64_t seed, std::size_t count) {
  Tokens tokens(count);
  std::uint64_t state = Mixed(seed);
  for (TokenId& token : tokens) token = static_cast<TokenId>(Mixed(++state) % 1'000'000);
  return tokens;
}

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

class Store {
 public:
  Store() {
    model_.bytes.fill(1);
    slot_ = *trie_.AddModel(kTenant, model_, kBlock);
  }

  // Stores a session, each new block with `block_bits` of surprisal (0: not known); its end.
  NodeRef Put(const Tokens& tokens, std::string_view name = {}, float block_bits = 0) {
    const HashedPath path = Hashed(tokens);
    NodeRef parent = 0;
    for (std::uint32_t block = 0; block < path.block_count(); ++block) {
      bool verified = false;
      NodeRef ref = trie_.FindChild(slot_, parent, path, block, path.hash(block),
                                    Provenance::kExact, &verified);
      if (ref == 0) {
        TrieNodeId id;
        const std::uint64_t words[] = {Mixed(next_id_), Mixed(~next_id_)};
        ++next_id_;
        std::memcpy(id.bytes.data(), words, sizeof words);
        ref = trie_.Insert({.id = id,
                            .parent = parent,
                            .model = slot_,
                            .path_hash = path.hash(block),
                            .tokens = path.tokens(block),
                            .frames = {.frame = {1, 1, 4096}},
                            .block_surprisal_bits = block_bits});
        runs_.Add(trie_, ref, space());
      }
      parent = ref;
    }
    if (!name.empty()) ends_.Set(kTenant, name, parent);
    return parent;
  }

  SimilarSessions Find(const Tokens& tokens, std::uint32_t count, std::uint32_t now = 0) const {
    const HashedPath path = Hashed(tokens);
    const WalkResult walk = trie_.Walk(slot_, hasher_, path, Quality::kUnrated, now);
    return FindSimilarSessions(trie_, runs_, ends_,
                               {.model = slot_,
                                .space = space(),
                                .tokens = tokens,
                                .stored_prefix = walk.refs,
                                .session_count = count,
                                .now_seconds = now});
  }

  std::uint64_t space() const { return hasher_.Root(kTenant, model_, {}); }
  HashedPath Hashed(const Tokens& tokens) const {
    return {hasher_,
            kTenant,
            {.model = model_, .tokens = tokens, .salt = {}, .extra_keys = {}},
            kBlock};
  }

  const PathHasher hasher_{42};
  ModelId model_;
  TrieIndex trie_{std::size_t{1} << 30};
  RunIndex runs_{7, std::size_t{1} << 28};
  SessionEnds ends_;
  ModelSlot slot_ = 0;
  std::uint64_t next_id_ = 1;
};

TEST(SimilarSessionsTest, TheLongestSharedPrefixIsNearest) {
  Store store;
  const Tokens base = TextOf(1, 160);
  const NodeRef near = store.Put(Joined({base, TextOf(2, 64)}));
  const NodeRef middle = store.Put(Joined({{base.begin(), base.begin() + 80}, TextOf(3, 64)}));
  const NodeRef far = store.Put(Joined({{base.begin(), base.begin() + 16}, TextOf(4, 64)}));
  store.Put(TextOf(5, 320));  // nothing in common
  const SimilarSessions found = store.Find(Joined({base, TextOf(6, 64)}), 8);
  ASSERT_EQ(found.sessions.size(), 3u);
  EXPECT_EQ(found.sessions[0].end, near);
  EXPECT_EQ(found.sessions[0].shared_prefix_blocks, 10u);
  EXPECT_DOUBLE_EQ(found.sessions[0].shared_prefix_bits, 160 * kPriorBitsPerToken);
  EXPECT_EQ(found.sessions[1].end, middle);
  EXPECT_EQ(found.sessions[1].shared_prefix_blocks, 5u);
  EXPECT_EQ(found.sessions[2].end, far);
  EXPECT_EQ(found.sessions[2].shared_prefix_blocks, 1u);
  for (const SimilarSession& session : found.sessions) EXPECT_TRUE(session.runs.empty());
  EXPECT_TRUE(found.is_complete);
  EXPECT_EQ(store.Find(Joined({base, TextOf(6, 64)}), 1).sessions.size(), 1u);
}

// A block that the client called surprising weighs more than many of which nothing is known.
TEST(SimilarSessionsTest, BitsAreTheSurprisalWhereItIsKnown) {
  Store store;
  const Tokens template_text = TextOf(1, 320);
  const Tokens secret = TextOf(2, 48);
  store.Put(Joined({template_text, TextOf(3, 32)}), "by prefix", /*block_bits=*/0.5f);
  store.Put(Joined({TextOf(4, 24), secret, TextOf(5, 24)}), "by text", /*block_bits=*/200);
  const SimilarSessions found = store.Find(Joined({template_text, TextOf(6, 8), secret}), 2);
  ASSERT_EQ(found.sessions.size(), 2u);
  EXPECT_THAT(store.ends_.SessionsAt(found.sessions[0].end), testing::ElementsAre("by text"));
  EXPECT_EQ(found.sessions[0].shared_prefix_blocks, 0u);
  EXPECT_EQ(found.sessions[0].shared_run_tokens, 48u);
  EXPECT_DOUBLE_EQ(found.sessions[0].shared_run_bits, 48 * 200.0 / 16);
  EXPECT_DOUBLE_EQ(found.sessions[1].shared_prefix_bits, 20 * 0.5);
}

TEST(SimilarSessionsTest, TextUnderAnotherPrefixCounts) {
  Store store;
  const Tokens system = TextOf(1, 64);
  const Tokens document = TextOf(2, 500);
  const NodeRef with_document = store.Put(Joined({TextOf(3, 37), document, TextOf(4, 40)}));
  const NodeRef with_system = store.Put(Joined({system, TextOf(5, 100)}));
  const SimilarSessions found = store.Find(Joined({system, TextOf(6, 9), document}), 4);
  ASSERT_EQ(found.sessions.size(), 2u);
  EXPECT_EQ(found.sessions[0].end, with_document);
  ASSERT_EQ(found.sessions[0].runs.size(), 1u);
  EXPECT_EQ(found.sessions[0].runs[0].first_token, 64u + 9);
  EXPECT_EQ(found.sessions[0].runs[0].token_count, 500u);
  EXPECT_EQ(found.sessions[0].runs[0].offset, 37u % 16);
  EXPECT_DOUBLE_EQ(found.sessions[0].shared_run_bits, 500 * kPriorBitsPerToken);
  EXPECT_EQ(found.sessions[0].run_bits.size(), 1u);
  EXPECT_EQ(found.sessions[1].end, with_system);
}

// Two sessions go through the first blocks of a document's stored text and part within it: the run
// goes on in one, and ends in the other where that leaves.
TEST(SimilarSessionsTest, ARunEndsWhereASessionLeavesItsPath) {
  Store store;
  const Tokens head = TextOf(1, 16);
  const Tokens document = TextOf(2, 160);
  const NodeRef whole = store.Put(Joined({head, document, TextOf(3, 32)}));
  const NodeRef half =
      store.Put(Joined({head, {document.begin(), document.begin() + 80}, TextOf(4, 32)}));
  const SimilarSessions found = store.Find(Joined({TextOf(5, 5), document}), 4);
  ASSERT_EQ(found.sessions.size(), 2u);
  EXPECT_EQ(found.sessions[0].end, whole);
  EXPECT_EQ(found.sessions[0].shared_run_tokens, 160u);
  EXPECT_EQ(found.sessions[1].end, half);
  EXPECT_EQ(found.sessions[1].shared_run_tokens, 80u);
}

TEST(SimilarSessionsTest, ASessionEndsAtALeafOrWhereItsNameIs) {
  Store store;
  const Tokens chat = TextOf(1, 160);
  const NodeRef leaf = store.Put(chat);
  const NodeRef inner = store.Put({chat.begin(), chat.begin() + 96}, "first turns");
  const SimilarSessions found =
      store.Find(Joined({{chat.begin(), chat.begin() + 112}, TextOf(2, 16)}), 4);
  ASSERT_EQ(found.sessions.size(), 2u);
  EXPECT_EQ(found.sessions[0].end, leaf);
  EXPECT_EQ(found.sessions[0].shared_prefix_blocks, 7u);
  EXPECT_EQ(found.sessions[1].end, inner);
  EXPECT_EQ(found.sessions[1].shared_prefix_blocks, 6u);
  // The query itself, when it is stored.
  EXPECT_EQ(store.Find(chat, 1).sessions.at(0).end, leaf);
  EXPECT_EQ(store.Find(chat, 1).sessions.at(0).shared_prefix_blocks, 10u);
}

TEST(SimilarSessionsTest, ExpiredSessionsAreNotThere) {
  Store store;
  const Tokens base = TextOf(1, 64);
  const NodeRef gone = store.Put(Joined({base, TextOf(2, 64)}));
  const NodeRef there = store.Put(Joined({base, TextOf(3, 64)}));
  for (NodeRef at = gone; store.trie_.node(at).depth > 4; at = store.trie_.parent(at)) {
    store.trie_.SetRetention(at, 100, 0);
  }
  const SimilarSessions found = store.Find(Joined({base, TextOf(4, 16)}), 4, /*now=*/100);
  ASSERT_EQ(found.sessions.size(), 1u);
  EXPECT_EQ(found.sessions[0].end, there);
}

TEST(SimilarSessionsTest, AnEmptyStoreAndAnEmptyQueryHaveNone) {
  Store store;
  EXPECT_TRUE(store.Find(TextOf(1, 100), 4).sessions.empty());
  store.Put(TextOf(1, 160));
  EXPECT_TRUE(store.Find({}, 4).sessions.empty());
  EXPECT_TRUE(store.Find(TextOf(1, 15), 4).sessions.empty());
}

// Against all sessions, one by one: the shared prefix decides where no text is shared otherwise.
TEST(SimilarSessionsTest, TheNearestByPrefixAreThoseOfAScan) {
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Store store;
    std::vector<Tokens> sessions;
    const auto compose = [&] {
      // A random walk in a tree of texts; each piece stands at one place only.
      Tokens tokens;
      std::uint64_t at = seed;
      for (std::uint64_t depth = random() % 6 + 1; depth > 0; --depth) {
        at = at * 31 + random() % 3;
        const Tokens piece = TextOf(at, 32);
        tokens.insert(tokens.end(), piece.begin(), piece.end());
      }
      const Tokens own = TextOf(random(), 32);
      tokens.insert(tokens.end(), own.begin(), own.end());
      return tokens;
    };
    for (int i = 0; i < 80; ++i) {
      sessions.push_back(compose());
      store.Put(sessions.back(), absl::StrCat("s", i));
    }
    for (int i = 0; i < 20; ++i) {
      const Tokens query = compose();
      std::vector<std::uint32_t> shared;
      for (const Tokens& session : sessions) {
        const auto differs =
            std::mismatch(session.begin(), session.end(), query.begin(), query.end());
        shared.push_back(static_cast<std::uint32_t>(differs.first - session.begin()) / kBlock);
      }
      std::sort(shared.rbegin(), shared.rend());
      const SimilarSessions found = store.Find(query, 10);
      for (std::size_t place = 0; place < 10; ++place) {
        const std::uint32_t blocks =
            place < found.sessions.size() ? found.sessions[place].shared_prefix_blocks : 0;
        EXPECT_EQ(blocks, shared[place]) << "place " << place;
      }
    }
  }
}

// The cost is bounded by what is asked for, not by what is stored.
TEST(SimilarSessionsTest, TenTimesTheSessionsCostNoMore) {
  std::map<std::size_t, std::uint64_t> visited_by_count;
  for (const std::size_t session_count : {10'000u, 100'000u}) {
    Store store;
    const Tokens system = TextOf(1, 64);
    for (std::uint64_t i = 0; i < session_count; ++i) {
      // All under one system prompt, groups of 100 with a document in common, 2 private blocks.
      store.Put(Joined({system, TextOf(1000 + i / 100, 64), TextOf(1'000'000 + i, 32)}),
                absl::StrCat("s", i));
    }
    std::uint64_t most = 0;
    for (std::uint64_t i = 0; i < 50; ++i) {
      // As a member of a group; and with the document of another one under no known prefix.
      const Tokens member = Joined({system, TextOf(1000 + i, 64), TextOf(2'000'000 + i, 32)});
      SimilarSessions found = store.Find(member, 16);
      ASSERT_EQ(found.sessions.size(), 16u);
      EXPECT_EQ(found.sessions.back().shared_prefix_blocks, 8u);
      most = std::max(most, found.visited_nodes);
      const Tokens stranger = Joined({TextOf(3'000'000 + i, 21), TextOf(1000 + i, 64)});
      found = store.Find(stranger, 16);
      ASSERT_GE(found.sessions.size(), 2u);
      EXPECT_EQ(found.sessions.front().shared_run_tokens, 64u);
      most = std::max(most, found.visited_nodes);
      EXPECT_TRUE(found.is_complete);
    }
    visited_by_count[session_count] = most;
  }
  EXPECT_EQ(visited_by_count[100'000], visited_by_count[10'000]);
  EXPECT_LT(visited_by_count[100'000], 2000u);
}

TEST(SimilarSessionsTest, VisitsAreBoundedAndASearchThatIsCutShortSaysSo) {
  Store store;
  // 40 sessions of 5,000 private blocks each behind one shared one.
  const Tokens base = TextOf(1, 16);
  for (std::uint64_t i = 0; i < 40; ++i) store.Put(Joined({base, TextOf(10 + i, 80'000)}));
  const SimilarSessions found = store.Find(base, 64);
  EXPECT_FALSE(found.is_complete);
  EXPECT_EQ(found.visited_nodes, kSimilarVisitsMax);
}

}  // namespace
}  // namespace kvtrie
