#include "storage/trie/run_index.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::uint64_t kSeed = 99;
using Tokens = std::vector<TokenId>;

ModelId ModelOf(std::uint8_t number) {
  ModelId model;
  model.bytes.fill(number);
  return model;
}

// Text of its own: texts of other seeds share no two tokens in a row, but by rare chance.
Tokens TextOf(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Tokens tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 1'000'000);
  return tokens;
}

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Tokens Part(const Tokens& tokens, std::size_t begin, std::size_t count) {
  return {tokens.begin() + static_cast<std::ptrdiff_t>(begin),
          tokens.begin() + static_cast<std::ptrdiff_t>(begin + count)};
}

// A trie of one model and its run index, filled and emptied together.
class Store {
 public:
  explicit Store(std::uint32_t block_tokens, std::size_t limit_bytes = 64 * kMiB,
                 std::size_t token_cache_bytes = 256 * kMiB)
      : block_tokens_(block_tokens), trie_(token_cache_bytes), runs_(kSeed, limit_bytes) {
    slot_ = AddModel(TenantId{1}, ModelOf(1));
  }

  ModelSlot AddModel(TenantId tenant, const ModelId& model) {
    return *trie_.AddModel(tenant, model, block_tokens_);
  }

  std::uint64_t SpaceOf(ModelSlot slot, std::string_view salt = {}) const {
    return hasher_.Root(trie_.model(slot).tenant, trie_.model(slot).model, salt);
  }

  // Stores the whole blocks of a path; the nodes of it.
  std::vector<NodeRef> Put(ModelSlot slot, const Tokens& tokens, std::string_view salt = {},
                           std::span<const ExtraKey> extra_keys = {}) {
    const ModelRoot& root = trie_.model(slot);
    const HashedPath path(
        hasher_, root.tenant,
        {.model = root.model, .tokens = tokens, .salt = salt, .extra_keys = extra_keys},
        block_tokens_);
    std::vector<NodeRef> nodes;
    NodeRef parent = 0;
    for (std::uint32_t block = 0; block < path.block_count(); ++block) {
      bool verified = false;
      NodeRef ref = trie_.FindChild(slot, parent, path, block, path.hash(block), Provenance::kExact,
                                    &verified);
      if (ref == 0) {
        TrieNodeId id;
        std::mt19937_64 random(next_id_++);
        for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
        ref = trie_.Insert({.id = id,
                            .parent = parent,
                            .model = slot,
                            .path_hash = path.hash(block),
                            .salt = block == 0 ? salt : std::string_view(),
                            .extra_key = path.extra_key(block),
                            .tokens = path.tokens(block),
                            .frames = {.frame = {1, 1, 4096}}});
        runs_.Add(trie_, ref, SpaceOf(slot, salt));
      }
      nodes.push_back(ref);
      parent = ref;
    }
    return nodes;
  }
  std::vector<NodeRef> Put(const Tokens& tokens) { return Put(slot_, tokens); }

  // A leaf goes, as the engine removes it.
  void Erase(NodeRef leaf) {
    runs_.Remove(trie_, leaf);
    trie_.Erase(leaf);
  }

  RunQuery QueryOf(const Tokens& tokens, std::string_view salt = {}) const {
    return {.model = slot_, .space = SpaceOf(slot_, salt), .salt = salt, .tokens = tokens};
  }
  RunFindings Find(const Tokens& tokens) const { return runs_.FindRuns(trie_, QueryOf(tokens)); }

  // The stored text of a run.
  Tokens TextAt(const TextRun& run) const {
    Tokens text;
    for (const NodeRef node : run.nodes) {
      const auto tokens = trie_.CachedTokens(node);
      text.insert(text.end(), tokens.begin(), tokens.end());
    }
    EXPECT_GE(text.size(), run.offset + run.token_count);
    EXPECT_LT(text.size() - run.offset - run.token_count, block_tokens_) << "a node too many";
    EXPECT_LT(run.offset, block_tokens_);
    return Part(text, run.offset, run.token_count);
  }
  void ExpectTrue(const TextRun& run, const Tokens& query) const {
    for (std::size_t i = 1; i < run.nodes.size(); ++i) {
      EXPECT_EQ(trie_.parent(run.nodes[i]), run.nodes[i - 1]);
    }
    ASSERT_LE(run.end(), query.size());
    EXPECT_EQ(TextAt(run), Part(query, run.first_token, run.token_count));
  }
  void ExpectSound() const {
    const absl::Status status =
        runs_.table().CheckInvariants([this](NodeRef ref) { return trie_.alive(ref); });
    EXPECT_TRUE(status.ok()) << status;
  }

  const std::uint32_t block_tokens_;
  const PathHasher hasher_{42};
  TrieIndex trie_;
  RunIndex runs_;
  ModelSlot slot_ = 0;
  std::uint64_t next_id_ = 1;
};

class RunIndexOfAnyBlockTest : public testing::TestWithParam<std::uint32_t> {};

INSTANTIATE_TEST_SUITE_P(BlockTokens, RunIndexOfAnyBlockTest,
                         testing::Values(1, 3, 8, 15, 16, 17, 24, 31, 32, 40, 64, 100));

// The guarantee: 32 equal tokens, whatever stands before and behind them, at each offset on both
// sides.
TEST_P(RunIndexOfAnyBlockTest, FindsARunOfTheLeastLengthAtEachOffset) {
  const std::uint32_t block_tokens = GetParam();
  const Tokens document = TextOf(1, RunIndex::kRunTokensMin);
  for (std::uint32_t stored_offset = 0; stored_offset < std::max(block_tokens, 16u);
       ++stored_offset) {
    Store store(block_tokens);
    const auto nodes = store.Put(
        Joined({TextOf(2, 16 * 7 + stored_offset), document, TextOf(3, 2 * block_tokens)}));
    for (const std::uint32_t query_offset : {0u, 1u, 13u, 160u}) {
      const Tokens query = Joined({TextOf(4, query_offset), document, TextOf(5, query_offset)});
      const RunFindings found = store.Find(query);
      ASSERT_EQ(found.runs.size(), 1u) << stored_offset << " " << query_offset;
      EXPECT_EQ(found.runs[0].first_token, query_offset);
      EXPECT_EQ(found.runs[0].token_count, RunIndex::kRunTokensMin);
      const std::uint32_t first = 16 * 7 + stored_offset;
      EXPECT_EQ(found.runs[0].offset, first % block_tokens);
      EXPECT_EQ(found.runs[0].nodes.front(), nodes[first / block_tokens]);
      store.ExpectTrue(found.runs[0], query);
      EXPECT_TRUE(found.is_complete);
    }
  }
}

TEST_P(RunIndexOfAnyBlockTest, RunsReachOverAllBlocksThatTheyHaveInCommon) {
  Store store(GetParam());
  const Tokens document = TextOf(1, 700);
  store.Put(Joined({TextOf(2, 50), document, TextOf(3, 200)}));
  const Tokens query = Joined({TextOf(4, 77), document, TextOf(5, 30)});
  const RunFindings found = store.Find(query);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].first_token, 77u);
  EXPECT_EQ(found.runs[0].token_count, 700u);
  store.ExpectTrue(found.runs[0], query);
}

// All common runs by comparing everything with everything.
struct PlainRun {
  std::uint32_t first_token;
  std::uint32_t token_count;
};
std::vector<PlainRun> PlainRuns(const Tokens& query, const std::vector<Tokens>& stored) {
  std::vector<PlainRun> runs;
  for (const Tokens& path : stored) {
    std::vector<std::uint32_t> before(path.size() + 1), now(path.size() + 1);
    for (std::size_t q = 1; q <= query.size(); ++q) {
      for (std::size_t p = 1; p <= path.size(); ++p) {
        now[p] = query[q - 1] == path[p - 1] ? before[p - 1] + 1 : 0;
        const bool ends = q == query.size() || p == path.size() || query[q] != path[p];
        if (ends && now[p] >= RunIndex::kRunTokensMin) {
          runs.push_back({static_cast<std::uint32_t>(q) - now[p], now[p]});
        }
      }
      std::swap(before, now);
    }
  }
  return runs;
}

// What FindRuns promises of a query, against brute force over the paths that are stored.
void ExpectCover(const Store& store, const Tokens& query, const std::vector<Tokens>& stored) {
  const RunFindings found = store.Find(query);
  EXPECT_TRUE(found.is_complete);
  std::vector<bool> covered(query.size());
  std::uint32_t longest_found = 0;
  for (const TextRun& run : found.runs) {
    store.ExpectTrue(run, query);
    EXPECT_GE(run.token_count, RunIndex::kRunTokensMin);
    for (std::uint32_t at = run.first_token; at < run.end(); ++at) {
      EXPECT_FALSE(covered[at]) << "token " << at << " is covered twice";
      covered[at] = true;
    }
    longest_found = std::max(longest_found, run.token_count);
  }
  std::uint32_t longest = 0;
  for (const PlainRun& run : PlainRuns(query, stored)) {
    longest = std::max(longest, run.token_count);
    std::uint32_t gap = 0;
    for (std::uint32_t at = run.first_token; at < run.first_token + run.token_count; ++at) {
      gap = covered[at] ? 0 : gap + 1;
      ASSERT_LT(gap, RunIndex::kRunTokensMin) << "a run before token " << at << " is missed";
    }
  }
  EXPECT_EQ(longest_found, longest);
}

// Sessions of documents and private text come and go; queries mix what is and what was stored.
TEST_P(RunIndexOfAnyBlockTest, FindsWhatBruteForceFindsWhileSessionsComeAndGo) {
  const std::uint32_t block_tokens = GetParam();
  for (const std::uint64_t seed : {11, 12}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Store store(block_tokens);
    std::vector<Tokens> stored;
    const auto compose = [&] {
      Tokens tokens;
      for (std::uint64_t part = random() % 3 + 2; part > 0; --part) {
        const Tokens document = TextOf(random() % 12, 160);
        const std::size_t begin = random() % 60;
        const Tokens piece = random() % 3 == 0 ? TextOf(random(), random() % 50)
                                               : Part(document, begin, random() % 100);
        tokens.insert(tokens.end(), piece.begin(), piece.end());
      }
      return tokens;
    };
    for (int step = 0; step < 120; ++step) {
      if (stored.size() > 6 && random() % 2 == 0) {
        // Of the path goes what no other one has.
        const std::size_t victim = random() % stored.size();
        const auto nodes = store.Put(stored[victim]);
        stored.erase(stored.begin() + static_cast<std::ptrdiff_t>(victim));
        std::set<NodeRef> needed;
        for (const Tokens& other : stored) {
          for (const NodeRef node : store.Put(other)) needed.insert(node);
        }
        for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
          if (!needed.contains(*node)) store.Erase(*node);
        }
      } else {
        Tokens tokens = compose();
        tokens.resize(tokens.size() / block_tokens * block_tokens);
        store.Put(tokens);
        stored.push_back(std::move(tokens));
      }
      if (step % 6 == 0) {
        store.ExpectSound();
        ExpectCover(store, compose(), stored);
      }
    }
  }
}

TEST(RunIndexTest, OtherTenantsModelsAndSaltsNeverShow) {
  Store store(16);
  const Tokens document = TextOf(1, 96);
  const ModelSlot other_model = store.AddModel(TenantId{1}, ModelOf(2));
  const ModelSlot other_tenant = store.AddModel(TenantId{2}, ModelOf(1));
  const Tokens stored = Joined({TextOf(2, 16), document});
  store.Put(other_model, stored);
  store.Put(other_tenant, stored);
  store.Put(store.slot_, stored, "salt");
  EXPECT_TRUE(store.Find(document).runs.empty());
  EXPECT_EQ(store.runs_.FindRuns(store.trie_, store.QueryOf(document, "salt")).runs.size(), 1u);
  // Even with the hashes of the right ones.
  for (const std::uint64_t space :
       {store.SpaceOf(other_model), store.SpaceOf(other_tenant), store.SpaceOf(0, "salt")}) {
    RunQuery query = store.QueryOf(document);
    query.space = space;
    EXPECT_TRUE(store.runs_.FindRuns(store.trie_, query).runs.empty());
  }
  store.Put(store.slot_, stored);
  EXPECT_EQ(store.Find(document).runs.size(), 1u);
}

TEST(RunIndexTest, BlocksWithAnExtraKeyAreInNoRun) {
  Store store(16);
  const Tokens document = TextOf(1, 160);
  const std::vector<ExtraKey> image = {{4, "image"}};
  store.Put(store.slot_, document, {}, image);
  const Tokens query = Joined({TextOf(2, 5), document});
  RunFindings found = store.Find(query);
  ASSERT_EQ(found.runs.size(), 2u);
  EXPECT_EQ(found.runs[0], (TextRun{5 + 80, 80, 0, found.runs[0].nodes}));
  EXPECT_EQ(found.runs[1], (TextRun{5, 64, 0, found.runs[1].nodes}));
  // Those of the query too.
  store.Put(Joined({TextOf(3, 16), document}));
  RunQuery with_image = store.QueryOf(document);
  with_image.extra_keys = image;
  found = store.runs_.FindRuns(store.trie_, with_image);
  ASSERT_EQ(found.runs.size(), 2u);
  EXPECT_EQ(found.runs[0].first_token, 80u);
  EXPECT_EQ(found.runs[0].token_count, 80u);
  EXPECT_EQ(found.runs[1].first_token, 0u);
  EXPECT_EQ(found.runs[1].token_count, 64u);
}

TEST(RunIndexTest, TheOwnPathIsNoAnswerAtItsOwnPlace) {
  Store store(16);
  const Tokens document = TextOf(1, 64);
  const Tokens session = Joined({TextOf(2, 32), document, TextOf(3, 48), document});
  const auto own = store.Put(session);
  RunQuery query = store.QueryOf(session);
  query.own_path = own;
  RunFindings found = store.runs_.FindRuns(store.trie_, query);
  // Each of the two stands where the other one is asked for.
  ASSERT_EQ(found.runs.size(), 2u);
  EXPECT_EQ(found.runs[0].first_token, 32u);
  EXPECT_EQ(found.runs[0].nodes.front(), own[(32 + 64 + 48) / 16]);
  EXPECT_EQ(found.runs[1].first_token, 32u + 64 + 48);
  EXPECT_EQ(found.runs[1].nodes.front(), own[2]);
  // New blocks behind it: what is before first_token is not asked for.
  query.first_token = 96;
  found = store.runs_.FindRuns(store.trie_, query);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].first_token, 32u + 64 + 48);
  query.first_token = static_cast<std::uint32_t>(session.size()) + 5;
  EXPECT_TRUE(store.runs_.FindRuns(store.trie_, query).runs.empty());
}

TEST(RunIndexTest, RunsLieInUsableNodesOnly) {
  Store store(16);
  const Tokens document = TextOf(1, 128);
  const auto nodes = store.Put(document);
  RunQuery query = store.QueryOf(document);
  query.usable = [&](NodeRef ref) { return ref != nodes[2]; };
  const RunFindings found = store.runs_.FindRuns(store.trie_, query);
  ASSERT_EQ(found.runs.size(), 2u);
  EXPECT_EQ(found.runs[0].first_token, 48u);
  EXPECT_EQ(found.runs[0].token_count, 80u);
  EXPECT_EQ(found.runs[1].token_count, 32u);
}

TEST(RunIndexTest, GoesIntoTheChildThatHasMostInCommon) {
  Store store(16);
  const Tokens document = TextOf(1, 64);
  const Tokens tail = TextOf(2, 11);
  for (std::uint64_t child = 0; child < 20; ++child) {
    // Its first blocks share 0 to 10 tokens of the tail.
    store.Put(Joined({document, Part(tail, 0, child % 11), TextOf(100 + child, 16)}));
  }
  const Tokens query = Joined({TextOf(3, 9), document, tail});
  const RunFindings found = store.Find(query);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].token_count, 64u + 10);
  store.ExpectTrue(found.runs[0], query);
}

TEST(RunIndexTest, EveryPlaceShowsAmongTheMaximalRuns) {
  Store store(16);
  const Tokens document = TextOf(1, 80);
  for (std::uint64_t session = 0; session < 3; ++session) {
    store.Put(
        Joined({TextOf(10 + session, 16 * (session + 1)), document, TextOf(20 + session, 32)}));
  }
  const RunFindings found = store.runs_.FindMaximalRuns(store.trie_, store.QueryOf(document));
  ASSERT_EQ(found.runs.size(), 3u);
  std::set<NodeRef> ends;
  for (const TextRun& run : found.runs) {
    EXPECT_EQ(run.token_count, 80u);
    store.ExpectTrue(run, document);
    ends.insert(run.nodes.back());
  }
  EXPECT_EQ(ends.size(), 3u);
}

// A document in hundreds of places costs what `places_max` of them cost.
TEST(RunIndexTest, TextThatIsEverywhereIsFoundInAsManyPlacesAsAreWanted) {
  Store store(16);
  const Tokens document = TextOf(1, 1600);
  for (std::uint64_t session = 0; session < 300; ++session) {
    store.Put(
        Joined({TextOf(10 + session, 16 + session % 16), document, TextOf(500 + session, 32)}));
  }
  const Tokens query = Joined({TextOf(5, 100), document, TextOf(6, 100)});
  RunQuery wanted = store.QueryOf(query);
  for (const std::uint32_t places_max : {1u, 8u, 20u}) {
    wanted.places_max = places_max;
    const RunFindings found = store.runs_.FindMaximalRuns(store.trie_, wanted);
    EXPECT_GE(found.runs.size(), places_max);
    EXPECT_LE(found.runs.size(), places_max + 4u);
    EXPECT_LT(found.steps, (places_max + 8) * query.size() * 2) << found.runs.size();
    EXPECT_GE(found.runs[0].token_count, 1600u - 31);
    for (const TextRun& run : found.runs) store.ExpectTrue(run, query);
  }
}

TEST(RunIndexTest, CoverTakesTheLongestAndCutsTheRest) {
  std::vector<NodeRef> nodes(20);
  for (NodeRef i = 0; i < nodes.size(); ++i) nodes[i] = i + 1;
  const auto run = [&](std::uint32_t first, std::uint32_t count) {
    return TextRun{first, count, 5, {nodes.begin(), nodes.begin() + (5 + count + 15) / 16}};
  };
  const auto cover = RunIndex::Cover({run(0, 100), run(60, 120), run(150, 60), run(170, 20)}, 16);
  ASSERT_EQ(cover.size(), 2u);
  EXPECT_EQ(cover[0], run(60, 120));
  EXPECT_EQ(cover[1], (TextRun{0, 60, 5, {nodes.begin(), nodes.begin() + 5}}));
  // 30 of run(150, 60) are left, which is too few. A cut at the front moves node and offset.
  const auto behind = RunIndex::Cover({run(0, 100)}, 16, 50);
  ASSERT_EQ(behind.size(), 1u);
  EXPECT_EQ(behind[0], (TextRun{50, 50, 7, {nodes.begin() + 3, nodes.begin() + 7}}));
}

// A token repeated, whitespace, a table: found, and neither the index nor the query is flooded.
TEST(RunIndexTest, TextThatRepeatsItselfFloodsNothing) {
  Store store(16);
  for (std::uint64_t session = 0; session < 30; ++session) {
    store.Put(Joined({TextOf(session, 40), Tokens(4096, 7), TextOf(100 + session, 40)}));
  }
  // 8,000 blocks of it, in 4 entries; the rest is what stands around it.
  EXPECT_LT(store.runs_.table().size(), 30u * 12);
  EXPECT_GT(store.runs_.table().crowded_total(), 7000u);
  const Tokens query = Joined({TextOf(500, 100), Tokens(4096, 7), TextOf(501, 100)});
  const RunFindings found = store.Find(query);
  EXPECT_TRUE(found.is_complete);
  EXPECT_LT(found.steps, query.size() * 16);
  ASSERT_FALSE(found.runs.empty());
  EXPECT_GT(found.runs[0].token_count, 3900u);
  for (const TextRun& run : found.runs) store.ExpectTrue(run, query);
}

TEST(RunIndexTest, WorkIsBoundedAndASearchThatIsCutShortSaysSo) {
  Store store(16);
  // Eight tokens, over and over in an order that never repeats for long: everything looks alike.
  std::mt19937_64 random(5);
  const auto noise = [&](std::size_t count) {
    Tokens tokens;
    while (tokens.size() < count) {
      const std::size_t length = random() % 60 + 5;
      for (std::size_t i = 0; i < length; ++i) tokens.push_back(static_cast<TokenId>(i % 6));
    }
    tokens.resize(count);
    return tokens;
  };
  for (int session = 0; session < 40; ++session) store.Put(noise(4096));
  const Tokens query = noise(20'000);
  RunQuery all_places = store.QueryOf(query);
  all_places.places_max = 10'000;
  const RunFindings found = store.runs_.FindRuns(store.trie_, all_places);
  EXPECT_LT(found.steps, (query.size() + 4096) * RunIndex::kStepsPerToken * 5 / 4);
  EXPECT_FALSE(found.is_complete);
  EXPECT_FALSE(found.runs.empty());
  for (const TextRun& run : found.runs) store.ExpectTrue(run, query);
}

TEST(RunIndexTest, TokensThatAreNotInMemoryAreAskedFor) {
  // The cache holds one chunk, 256 KiB of tokens.
  Store store(16, 64 * kMiB, 1);
  const Tokens document = TextOf(1, 320);
  const auto nodes = store.Put(document);
  for (std::uint64_t other = 0; other < 20; ++other) store.Put(TextOf(100 + other, 16 * 1024));
  ASSERT_TRUE(store.trie_.CachedTokens(nodes[3]).empty());
  const Tokens query = Joined({TextOf(2, 7), document});
  RunFindings found = store.Find(query);
  EXPECT_TRUE(found.runs.empty());
  ASSERT_FALSE(found.unread.empty());
  for (const NodeRef ref : found.unread) {
    const auto at =
        static_cast<std::size_t>(std::find(nodes.begin(), nodes.end(), ref) - nodes.begin());
    ASSERT_LT(at, nodes.size());
    store.trie_.CacheTokens(ref, std::span(document).subspan(at * 16, 16));
  }
  found = store.Find(query);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].token_count, 320u);
  EXPECT_TRUE(found.unread.empty());
}

TEST(RunIndexTest, LoadedInTwoStepsItIsTheSame) {
  for (const std::uint32_t block_tokens : {16u, 40u}) {
    Store store(block_tokens);
    const Tokens stored = TextOf(1, 10 * block_tokens);
    const auto nodes = store.Put(stored);
    RunIndex loaded(kSeed, kMiB);
    for (std::size_t block = 0; block < nodes.size(); ++block) {
      std::vector<std::uint64_t> hashes;
      loaded.HashCells(std::span(stored).subspan(block * block_tokens, block_tokens), &hashes);
      loaded.AddHashed(nodes[block], store.SpaceOf(store.slot_), hashes);
    }
    EXPECT_EQ(loaded.table().size(), store.runs_.table().size());
    const Tokens query = Joined({TextOf(2, 3), stored});
    EXPECT_EQ(loaded.FindRuns(store.trie_, store.QueryOf(query)).runs, store.Find(query).runs);
    EXPECT_EQ(store.Find(query).runs.size(), 1u);
  }
}

TEST(RunIndexTest, AFullIndexFindsWhatItStillKnows) {
  Store store(16, /*limit_bytes=*/kMiB);
  std::vector<Tokens> stored;
  for (std::uint64_t session = 0; session < 400; ++session) {
    stored.push_back(TextOf(session, 4096));
    store.Put(stored.back());
  }
  EXPECT_GT(store.runs_.table().forgotten_total(), 10'000u);
  EXPECT_LE(store.runs_.table().memory_bytes(), kMiB + 400 * 256);
  store.ExpectSound();
  std::size_t found_tokens = 0;
  for (std::uint64_t session = 390; session < 400; ++session) {
    const Tokens query = Joined({TextOf(1000, 5), stored[session]});
    for (const TextRun& run : store.Find(query).runs) {
      store.ExpectTrue(run, query);
      found_tokens += run.token_count;
    }
  }
  // One cell of a stretch is enough to find all of it.
  EXPECT_GT(found_tokens, 10u * 4096 * 9 / 10);
}

TEST(RunIndexTest, TakesAtMostNineTenthsOfAByteForEachStoredToken) {
  Store store(16);
  constexpr std::size_t kSessions = 250;
  constexpr std::size_t kSessionTokens = 4096;
  for (std::uint64_t session = 0; session < kSessions; ++session) {
    store.Put(TextOf(session, kSessionTokens));
    const double tokens = static_cast<double>((session + 1) * kSessionTokens);
    if (session < 100) continue;  // small tables are of few slots each
    ASSERT_LE(static_cast<double>(store.runs_.table().memory_bytes()), 0.9 * tokens + 33'000);
  }
  EXPECT_EQ(store.runs_.table().size(), kSessions * kSessionTokens / 16);
}

}  // namespace
}  // namespace kvtrie
