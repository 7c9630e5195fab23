#include "storage/trie/trie_index.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr TenantId kTenant{1};
constexpr std::uint32_t kBlockTokens = 4;

ModelId ModelOf(std::uint8_t number) {
  ModelId model;
  model.bytes.fill(number);
  return model;
}

TrieNodeId IdOf(std::uint64_t number) {
  TrieNodeId id;
  std::mt19937_64 random(number);
  for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random());
  return id;
}

FrameRef FrameOf(std::uint32_t number) { return {number, 1, 100 + number}; }

// An index with one model, and the words to fill it with.
class TrieIndexTest : public testing::Test {
 protected:
  TrieIndexTest() { slot_ = *index_.AddModel(kTenant, ModelOf(1), kBlockTokens); }

  PathView PathOf(std::span<const TokenId> tokens, std::string_view salt = {},
                  std::span<const ExtraKey> extra_keys = {}) const {
    return {.model = ModelOf(1), .tokens = tokens, .salt = salt, .extra_keys = extra_keys};
  }
  HashedPath Hashed(const PathView& path) const { return {hasher_, kTenant, path, kBlockTokens}; }

  WalkResult Walk(const PathView& path, Quality min_quality = Quality::kExact,
                  std::uint32_t now = 0) const {
    return index_.Walk(slot_, hasher_, Hashed(path), min_quality, now);
  }

  // Inserts the blocks of an exact path that are not there; the ref of the last one.
  NodeRef InsertPath(const PathView& path, const FrameRef& frame = FrameOf(1)) {
    const HashedPath hashed = Hashed(path);
    NodeRef parent = 0;
    for (std::uint32_t block = 0; block < hashed.block_count(); ++block) {
      bool verified = false;
      NodeRef ref = index_.FindChild(slot_, parent, hashed, block, hashed.hash(block),
                                     Provenance::kExact, &verified);
      if (ref == 0) {
        ref = index_.Insert({.id = IdOf(next_id_++),
                             .parent = parent,
                             .model = slot_,
                             .path_hash = hashed.hash(block),
                             .salt = block == 0 ? path.salt : std::string_view(),
                             .extra_key = hashed.extra_key(block),
                             .tokens = hashed.tokens(block),
                             .frames = {.frame = frame}});
      }
      parent = ref;
    }
    return parent;
  }
  void ExpectSound() const {
    const absl::Status status = index_.CheckInvariants();
    EXPECT_TRUE(status.ok()) << status;
  }

  const PathHasher hasher_{42};
  TrieIndex index_{kMiB};
  ModelSlot slot_ = 0;
  std::uint64_t next_id_ = 1;
};

TEST_F(TrieIndexTest, WalkGivesTheStoredPrefix) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
  InsertPath(PathOf(std::span(tokens).first(8)));
  const WalkResult found = Walk(PathOf(tokens));
  ASSERT_EQ(found.refs.size(), 2u);
  EXPECT_TRUE(found.unverified.empty());
  EXPECT_EQ(index_.node(found.refs[0]).depth, 1u);
  EXPECT_EQ(index_.parent(found.refs[1]), found.refs[0]);
  EXPECT_THAT(index_.CachedTokens(found.refs[1]), testing::ElementsAre(5, 6, 7, 8));
  ExpectSound();
}

TEST_F(TrieIndexTest, SaltAndExtraKeysKeepEqualTokensApart) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<ExtraKey> first = {{0, "image a"}};
  const std::vector<ExtraKey> second = {{1, "image a"}};
  const std::vector<PathView> paths = {PathOf(tokens),
                                       PathOf(tokens, "s"),
                                       PathOf(tokens, "t"),
                                       PathOf(tokens, {}, first),
                                       PathOf(tokens, "s", first),
                                       PathOf(tokens, {}, second)};
  std::vector<NodeRef> deepest;
  for (const PathView& path : paths) {
    EXPECT_LE(Walk(path).refs.size(), &path == &paths.back() ? 1u : 0u);
    deepest.push_back(InsertPath(path));
  }
  for (std::size_t i = 0; i < paths.size(); ++i) {
    ASSERT_EQ(Walk(paths[i]).refs.size(), 2u);
    EXPECT_EQ(Walk(paths[i]).refs.back(), deepest[i]);
  }
  EXPECT_EQ(index_.extra_key(deepest.back()), "image a");
  EXPECT_EQ(index_.salt(index_.parent(deepest[1])), "s");
  ExpectSound();
}

TEST_F(TrieIndexTest, ModelsAndTenantsDoNotMeet) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4};
  InsertPath(PathOf(tokens));
  const ModelSlot other_model = *index_.AddModel(kTenant, ModelOf(2), kBlockTokens);
  const ModelSlot other_tenant = *index_.AddModel(TenantId{2}, ModelOf(1), kBlockTokens);
  for (const ModelSlot slot : {other_model, other_tenant}) {
    // Even with the hash of the right one.
    const HashedPath path = Hashed(PathOf(tokens));
    EXPECT_TRUE(index_.Walk(slot, hasher_, path, Quality::kExact, 0).refs.empty());
  }
  EXPECT_EQ(index_.FindModel(TenantId{2}, ModelOf(2)), std::nullopt);
  EXPECT_EQ(index_.AddModel(kTenant, ModelOf(1), kBlockTokens), slot_);
}

TEST_F(TrieIndexTest, NodesWithoutAFrameOrExpiredEndTheWalk) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const NodeRef last = InsertPath(PathOf(tokens));
  const NodeRef middle = index_.parent(last);
  index_.SetRetention(middle, 100, 3);
  EXPECT_EQ(Walk(PathOf(tokens), Quality::kExact, 99).refs.size(), 3u);
  EXPECT_EQ(Walk(PathOf(tokens), Quality::kExact, 100).refs.size(), 1u);
  index_.SetRetention(middle, 0, 3);
  index_.SetFrames(middle, {});
  EXPECT_EQ(Walk(PathOf(tokens)).refs.size(), 1u);
  index_.SetFrames(middle, {FrameOf(9), Quality::kNearExact, CodecId::kResidual, {}});
  EXPECT_EQ(Walk(PathOf(tokens)).refs.size(), 1u);
  EXPECT_EQ(Walk(PathOf(tokens), Quality::kNearExact).refs.size(), 3u);
  ExpectSound();
}

TEST_F(TrieIndexTest, LongerLossyBranchWinsOnlyWhereLossIsAllowed) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  InsertPath(PathOf(std::span(tokens).first(8)));
  const WalkResult exact = Walk(PathOf(tokens));
  ASSERT_EQ(exact.refs.size(), 2u);
  // A lossy branch from the first block on: three blocks in all.
  const HashedPath path = Hashed(PathOf(tokens));
  NodeRef parent = exact.refs[0];
  std::uint64_t hash = path.hash(0);
  std::vector<NodeRef> branch = {parent};
  for (std::uint32_t block = 1; block <= 2; ++block) {
    hash = hasher_.Extend(hash, Provenance::kOnLossy, {}, path.tokens(block));
    parent = index_.Insert({.id = IdOf(next_id_++),
                            .parent = parent,
                            .model = slot_,
                            .path_hash = hash,
                            .provenance = Provenance::kOnLossy,
                            .tokens = path.tokens(block),
                            .frames = {FrameOf(2), Quality::kNearExact, CodecId::kRaw, {}}});
    branch.push_back(parent);
  }
  EXPECT_EQ(Walk(PathOf(tokens)).refs, exact.refs);
  EXPECT_EQ(Walk(PathOf(tokens), Quality::kNearExact).refs, branch);
  EXPECT_EQ(Walk(PathOf(tokens), Quality::kHigh).refs, branch);
  // Of two that lead equally far, the exact one is given.
  EXPECT_EQ(Walk(PathOf(std::span(tokens).first(8)), Quality::kHigh).refs, exact.refs);
  EXPECT_EQ(index_.model(slot_).lossy_node_count, 2u);
  ExpectSound();
  for (; branch.size() > 1; branch.pop_back()) index_.Erase(branch.back());
  EXPECT_EQ(index_.model(slot_).lossy_node_count, 0u);
  ExpectSound();
}

// The smaller frame is the one to serve; the other one where only it is good enough.
TEST_F(TrieIndexTest, AnyFrameThatIsGoodEnoughServes) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4};
  const NodeRef ref = InsertPath(PathOf(tokens));
  index_.SetFrames(ref, {FrameOf(1), Quality::kHigh, CodecId::kResidual, Quality::kExact});
  const IndexNode& node = index_.node(ref);
  for (const Quality wanted : kAllQualities) {
    EXPECT_EQ(Walk(PathOf(tokens), wanted).refs.size(), 1u);
    EXPECT_EQ(node.serves(wanted), IsAtLeast(Quality::kHigh, wanted));
    EXPECT_EQ(node.only_other_serves(wanted), !IsAtLeast(Quality::kHigh, wanted));
  }
  EXPECT_EQ(index_.model(slot_).other_frame_count, 1u);
  index_.SetFrames(ref, {FrameOf(1), Quality::kSmall, CodecId::kResidual, {}});
  for (const Quality wanted : kAllQualities) {
    EXPECT_EQ(Walk(PathOf(tokens), wanted).refs.size(),
              IsAtLeast(Quality::kSmall, wanted) ? 1u : 0u);
  }
  EXPECT_EQ(index_.model(slot_).other_frame_count, 0u);
  ExpectSound();
}

TEST_F(TrieIndexTest, DepthOfTheLongestPathFits) {
  const NodeRef ref = index_.InsertUnlinked(
      {.id = IdOf(next_id_++), .model = slot_, .depth = static_cast<std::uint32_t>(1) << 20});
  EXPECT_EQ(index_.node(ref).depth, kPathTokensMax);
  EXPECT_EQ(index_.node(ref).priority, 0u);
  index_.Erase(ref);
}

// Nodes with the hash of a path that is another one: in tokens, extra key, salt, parent, model or
// provenance. None of them may ever be taken for it.
TEST_F(TrieIndexTest, EqualHashesNeverMakeAMatch) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<TokenId> others = {1, 2, 3, 5};
  const HashedPath path = Hashed(PathOf(tokens));
  const ModelSlot other_model = *index_.AddModel(kTenant, ModelOf(2), kBlockTokens);
  const auto insert = [&](NewNode node) {
    node.id = IdOf(next_id_++);
    node.frames.frame = FrameOf(7);
    return index_.Insert(node);
  };
  const auto first = path.tokens(0);
  insert({.model = slot_, .path_hash = path.hash(0), .tokens = others});
  insert({.model = slot_, .path_hash = path.hash(0), .salt = "s", .tokens = first});
  insert({.model = slot_, .path_hash = path.hash(0), .extra_key = "x", .tokens = first});
  insert({.model = other_model, .path_hash = path.hash(0), .tokens = first});
  insert({.model = slot_,
          .path_hash = path.hash(0),
          .provenance = Provenance::kOnLossy,
          .tokens = first});
  EXPECT_TRUE(Walk(PathOf(tokens)).refs.empty());
  const NodeRef foreign = insert({.model = slot_, .path_hash = 1, .tokens = others});
  insert({.parent = foreign, .model = slot_, .path_hash = path.hash(1), .tokens = path.tokens(1)});
  const NodeRef right = insert({.model = slot_, .path_hash = path.hash(0), .tokens = first});
  insert({.parent = right, .model = slot_, .path_hash = path.hash(1), .tokens = others});
  EXPECT_THAT(Walk(PathOf(tokens)).refs, testing::ElementsAre(right));
  const NodeRef second = insert(
      {.parent = right, .model = slot_, .path_hash = path.hash(1), .tokens = path.tokens(1)});
  EXPECT_THAT(Walk(PathOf(tokens)).refs, testing::ElementsAre(right, second));
  EXPECT_TRUE(Walk(PathOf(tokens)).unverified.empty());
  ExpectSound();
}

TEST_F(TrieIndexTest, NodesWhoseTokensAreNotInMemoryAreToldApart) {
  TrieIndex index(0);  // one chunk of tokens: 64 blocks of 1024
  const ModelSlot slot = *index.AddModel(kTenant, ModelOf(1), 1024);
  std::vector<TokenId> tokens(300 * 1024);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i * 7);
  const PathView view = PathOf(tokens);
  const HashedPath path(hasher_, kTenant, view, 1024);
  NodeRef parent = 0;
  for (std::uint32_t block = 0; block < path.block_count(); ++block) {
    parent = index.Insert({.id = IdOf(next_id_++),
                           .parent = parent,
                           .model = slot,
                           .path_hash = path.hash(block),
                           .tokens = path.tokens(block),
                           .frames = {.frame = FrameOf(1)}});
  }
  const WalkResult found = index.Walk(slot, hasher_, path, Quality::kExact, 0);
  ASSERT_EQ(found.refs.size(), 300u);
  EXPECT_EQ(found.unverified.size(), 300u - 64);
  for (const std::uint32_t block : found.unverified) {
    EXPECT_TRUE(index.CachedTokens(found.refs[block]).empty());
  }
  index.CacheTokens(found.refs[0], path.tokens(0));
  EXPECT_THAT(index.CachedTokens(found.refs[0]), testing::ElementsAreArray(path.tokens(0)));
  EXPECT_TRUE(index.CheckInvariants().ok());
}

TEST_F(TrieIndexTest, SurprisalAddsUpAlongThePath) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const HashedPath path = Hashed(PathOf(tokens));
  const NodeRef up = index_.Insert({.id = IdOf(1),
                                    .model = slot_,
                                    .path_hash = path.hash(0),
                                    .tokens = path.tokens(0),
                                    .block_surprisal_bits = 3});
  const NodeRef down = index_.Insert({.id = IdOf(2),
                                      .parent = up,
                                      .model = slot_,
                                      .path_hash = path.hash(1),
                                      .tokens = path.tokens(1),
                                      .block_surprisal_bits = 4});
  EXPECT_FLOAT_EQ(index_.node(up).surprisal_bits, 3);
  EXPECT_FLOAT_EQ(index_.node(down).surprisal_bits, 7);
  EXPECT_EQ(index_.node(down).path_is_known, 1u);
}

TEST_F(TrieIndexTest, SurprisalThatNobodySaidIsEstimatedAndMarked) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const HashedPath path = Hashed(PathOf(tokens));
  const NodeRef up = index_.Insert(
      {.id = IdOf(1), .model = slot_, .path_hash = path.hash(0), .tokens = path.tokens(0)});
  const NodeRef down = index_.Insert({.id = IdOf(2),
                                      .parent = up,
                                      .model = slot_,
                                      .path_hash = path.hash(1),
                                      .tokens = path.tokens(1),
                                      .block_surprisal_bits = 4});
  EXPECT_FLOAT_EQ(index_.node(up).surprisal_bits, 4 * 3.75f);
  EXPECT_FLOAT_EQ(index_.node(down).surprisal_bits, 4 * 3.75f + 4);
  EXPECT_EQ(index_.node(up).is_known, 0u);
  EXPECT_EQ(index_.node(down).is_known, 1u);
  EXPECT_EQ(index_.node(down).path_is_known, 0u);
}

TEST_F(TrieIndexTest, NamesAreCountedHoweverManyAndGoWithTheirNode) {
  const NodeRef ref = InsertPath(PathOf(std::vector<TokenId>{1, 2, 3, 4}));
  const NodeRef other = InsertPath(PathOf(std::vector<TokenId>{5, 6, 7, 8}));
  for (const std::uint32_t count : {1u, 126u, 127u, 128u, 100'000u, 127u, 126u, 0u, 200u}) {
    index_.SetNameCount(ref, count);
    EXPECT_EQ(index_.name_count(ref), count);
    EXPECT_EQ(index_.name_count(other), 0u);
    ExpectSound();
  }
  index_.Erase(ref);
  ExpectSound();
  const NodeRef next = InsertPath(PathOf(std::vector<TokenId>{1, 2, 3, 4}));
  EXPECT_EQ(next, ref);
  EXPECT_EQ(index_.name_count(next), 0u);
}

TEST_F(TrieIndexTest, LoadingInAnyOrderMakesTheSameTrie) {
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const HashedPath path = Hashed(PathOf(tokens));
  std::vector<NodeRef> refs(3);
  for (const std::uint32_t block : {2u, 0u, 1u}) {
    refs[block] = index_.InsertUnlinked({.id = IdOf(block),
                                         .model = slot_,
                                         .path_hash = path.hash(block),
                                         .tokens = path.tokens(block),
                                         .frames = {.frame = FrameOf(block + 1)},
                                         .block_surprisal_bits = 1,
                                         .depth = block + 1});
  }
  index_.Link(refs[2], refs[1]);
  index_.Link(refs[1], refs[0]);
  index_.Link(refs[0], 0);
  index_.FinishLoading();
  EXPECT_EQ(Walk(PathOf(tokens)).refs, refs);
  EXPECT_FLOAT_EQ(index_.node(refs[2]).surprisal_bits, 3);
  EXPECT_EQ(index_.node(refs[2]).path_is_known, 1u);
  ExpectSound();
}

TEST_F(TrieIndexTest, TokensOfAModelThatIsNotRegisteredAreNotKept) {
  const ModelSlot slot = *index_.AddModel(kTenant, ModelOf(9), 0);
  const std::vector<TokenId> tokens = {1, 2, 3, 4};
  const NodeRef ref =
      index_.Insert({.id = IdOf(1), .model = slot, .path_hash = 1, .tokens = tokens});
  EXPECT_TRUE(index_.CachedTokens(ref).empty());
  EXPECT_EQ(index_.AddModel(kTenant, ModelOf(9), kBlockTokens), slot);
  EXPECT_TRUE(index_.CachedTokens(ref).empty());
  index_.CacheTokens(ref, tokens);
  EXPECT_THAT(index_.CachedTokens(ref), testing::ElementsAreArray(tokens));
  index_.Erase(ref);
  ExpectSound();
}

TEST_F(TrieIndexTest, TouchCountsUses) {
  const NodeRef ref = InsertPath(PathOf(std::vector<TokenId>{1, 2, 3, 4}));
  index_.Touch(ref, 77);
  index_.Touch(ref, 78);
  EXPECT_EQ(index_.node(ref).use_count(), 2u);
  EXPECT_EQ(index_.node(ref).last_used_seconds, 78u);
}

TEST_F(TrieIndexTest, ErasedNodesGiveTheirMemoryBack) {
  std::vector<TokenId> tokens(kBlockTokens * 1000);
  std::size_t settled = 0;
  for (int round = 0; round < 30; ++round) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<TokenId>(i + 1'000'000u * static_cast<unsigned>(round));
    }
    NodeRef ref = InsertPath(PathOf(tokens, "salt"));
    EXPECT_EQ(index_.node_count(), 1000u);
    while (ref != 0) {
      const NodeRef up = index_.parent(ref);
      index_.Erase(ref);
      ref = up;
    }
    EXPECT_EQ(index_.node_count(), 0u);
    EXPECT_EQ(index_.used_bytes(), 0u);
    if (round == 1) settled = index_.memory_bytes() + index_.token_cache_bytes();
  }
  EXPECT_LE(index_.memory_bytes() + index_.token_cache_bytes(), settled + settled / 5);
  ExpectSound();
}

TEST_F(TrieIndexTest, TakesAtMostAHundredBytesPerNode) {
  std::mt19937 random(3);
  std::vector<TokenId> tokens(kBlockTokens * 200);
  const std::size_t empty_bytes = index_.memory_bytes();
  for (int path = 0; path < 500; ++path) {
    for (TokenId& token : tokens) token = static_cast<TokenId>(random());
    InsertPath(PathOf(tokens));
  }
  ASSERT_EQ(index_.node_count(), 100'000u);
  EXPECT_LE(index_.memory_bytes() - empty_bytes, 100'000u * TrieIndex::kNodeBytesMax);
}

// ---- Against a model

// What names a node under its parent.
struct EdgeKey {
  Provenance provenance = Provenance::kExact;
  std::string salt;
  std::string extra_key;
  std::vector<TokenId> tokens;
  auto operator<=>(const EdgeKey&) const = default;
};
using NodePath = std::vector<EdgeKey>;

struct ModelNode {
  NodeRef ref = 0;
  TrieNodeId id;
  NodeFrames frames;
  std::uint32_t expires_seconds = 0;
};

// Random tries over few tokens, so that paths share, branch and collide in the small.
class TrieIndexModelTest : public testing::TestWithParam<std::uint32_t> {
 protected:
  TrieIndexModelTest() : block_tokens_(GetParam()), index_(/*token_cache_bytes=*/0) {
    for (std::uint8_t number = 1; number <= 2; ++number) {
      slots_.push_back(*index_.AddModel(kTenant, ModelOf(number), block_tokens_));
    }
  }

  std::uint32_t Below(std::uint32_t end) { return static_cast<std::uint32_t>(random_()) % end; }

  Quality RandomQuality() { return kAllQualities[Below(std::size(kAllQualities))]; }
  NodeFrames RandomFrames() {
    NodeFrames frames{
        FrameOf(1 + Below(1000)), RandomQuality(), kAllCodecs[Below(std::size(kAllCodecs))], {}};
    if (Below(3) == 0) frames.other_quality = RandomQuality();
    return frames;
  }

  EdgeKey RandomEdge(bool first, bool on_lossy) {
    EdgeKey edge;
    edge.provenance = on_lossy || Below(4) == 0 ? Provenance::kOnLossy : Provenance::kExact;
    if (first && Below(3) == 0) edge.salt = Below(2) == 0 ? "a" : "b";
    if (Below(5) == 0) edge.extra_key = Below(2) == 0 ? "x" : "y";
    edge.tokens.assign(block_tokens_, 0);
    edge.tokens[Below(block_tokens_)] = Below(2);
    return edge;
  }

  // Reference of Walk: the longest of all paths that may be taken, the exact one among equals.
  std::vector<NodeRef> ExpectedWalk(std::size_t model, const NodePath& asked, Quality min_quality,
                                    std::uint32_t now) const {
    const auto follow = [&](std::size_t lossy_from) {
      std::vector<NodeRef> refs;
      NodePath at;
      for (std::size_t block = 0; block < asked.size(); ++block) {
        at.push_back(asked[block]);
        at.back().provenance = block >= lossy_from ? Provenance::kOnLossy : Provenance::kExact;
        const auto found = nodes_[model].find(at);
        if (found == nodes_[model].end()) break;
        const ModelNode& node = found->second;
        const bool expired = node.expires_seconds != 0 && node.expires_seconds <= now;
        const bool serves = IsAtLeast(node.frames.quality, min_quality) ||
                            (node.frames.other_quality.has_value() &&
                             IsAtLeast(*node.frames.other_quality, min_quality));
        if (node.frames.frame.segment == 0 || expired || !serves) break;
        refs.push_back(node.ref);
      }
      return refs;
    };
    std::vector<NodeRef> best = follow(asked.size());
    if (min_quality == Quality::kExact) return best;
    for (std::size_t from = 0; from < asked.size(); ++from) {
      if (auto branch = follow(from); branch.size() > best.size()) best = std::move(branch);
    }
    return best;
  }

  void Insert() {
    const std::size_t model = Below(2);
    NodePath path;
    NodeRef parent = 0;
    std::uint64_t hash = 0;
    if (!nodes_[model].empty() && Below(4) != 0) {
      auto at = nodes_[model].begin();
      std::advance(at, Below(static_cast<std::uint32_t>(nodes_[model].size())));
      path = at->first;
      parent = at->second.ref;
      if (path.size() >= 8) return;
    }
    const bool on_lossy = !path.empty() && path.back().provenance == Provenance::kOnLossy;
    path.push_back(RandomEdge(parent == 0, on_lossy));
    if (nodes_[model].contains(path)) return;
    hash = hasher_.Root(kTenant, ModelOf(static_cast<std::uint8_t>(model + 1)), path.front().salt);
    for (const EdgeKey& edge : path) {
      hash = hasher_.Extend(hash, edge.provenance, edge.extra_key, edge.tokens);
    }
    ModelNode node;
    node.id = IdOf(next_id_++);
    if (Below(8) != 0) node.frames = RandomFrames();
    node.expires_seconds = Below(6) == 0 ? 1 + Below(20) : 0;
    const EdgeKey& edge = path.back();
    node.ref = index_.Insert({.id = node.id,
                              .parent = parent,
                              .model = slots_[model],
                              .path_hash = hash,
                              .provenance = edge.provenance,
                              .salt = edge.salt,
                              .extra_key = edge.extra_key,
                              .tokens = edge.tokens,
                              .frames = node.frames,
                              .expires_seconds = node.expires_seconds});
    EXPECT_EQ(index_.node(node.ref).depth, path.size());
    nodes_[model].emplace(std::move(path), node);
  }

  // A random node, or null.
  std::pair<const NodePath, ModelNode>* AnyNode(std::size_t model) {
    if (nodes_[model].empty()) return nullptr;
    auto at = nodes_[model].begin();
    std::advance(at, Below(static_cast<std::uint32_t>(nodes_[model].size())));
    return &*at;
  }

  void EraseLeaf() {
    const std::size_t model = Below(2);
    auto* const node = AnyNode(model);
    if (node == nullptr || !index_.node(node->second.ref).is_leaf()) return;
    index_.Erase(node->second.ref);
    EXPECT_EQ(index_.FindById(node->second.id), 0u);
    EXPECT_FALSE(index_.alive(node->second.ref));
    nodes_[model].erase(NodePath(node->first));
  }

  void ChangeNode() {
    const std::size_t model = Below(2);
    auto* const node = AnyNode(model);
    if (node == nullptr) return;
    if (Below(2) == 0) {
      node->second.frames = Below(3) == 0 ? NodeFrames{} : RandomFrames();
      index_.SetFrames(node->second.ref, node->second.frames);
    } else {
      node->second.expires_seconds = Below(2) == 0 ? 0 : 1 + Below(20);
      index_.SetRetention(node->second.ref, node->second.expires_seconds, Below(16));
    }
  }

  void CheckWalk() {
    const std::size_t model = Below(2);
    NodePath asked;
    if (auto* const node = AnyNode(model); node != nullptr && Below(8) != 0) asked = node->first;
    for (std::uint32_t more = Below(4); more > 0; --more) {
      asked.push_back(RandomEdge(asked.empty(), false));
    }
    if (asked.empty()) return;
    std::vector<TokenId> tokens;
    std::vector<ExtraKey> extra_keys;
    for (std::uint32_t block = 0; block < asked.size(); ++block) {
      tokens.insert(tokens.end(), asked[block].tokens.begin(), asked[block].tokens.end());
      if (!asked[block].extra_key.empty()) extra_keys.push_back({block, asked[block].extra_key});
    }
    const PathView view{.model = ModelOf(static_cast<std::uint8_t>(model + 1)),
                        .tokens = tokens,
                        .salt = asked.front().salt,
                        .extra_keys = extra_keys};
    const HashedPath path(hasher_, kTenant, view, block_tokens_);
    const Quality min_quality = RandomQuality();
    const std::uint32_t now = Below(20);
    const WalkResult found = index_.Walk(slots_[model], hasher_, path, min_quality, now);
    ASSERT_EQ(found.refs, ExpectedWalk(model, asked, min_quality, now));
    for (std::uint32_t block = 0; block < found.refs.size(); ++block) {
      const auto cached = index_.CachedTokens(found.refs[block]);
      const bool unverified = std::find(found.unverified.begin(), found.unverified.end(), block) !=
                              found.unverified.end();
      ASSERT_EQ(cached.empty(), unverified);
      if (unverified && Below(2) == 0) {
        index_.CacheTokens(found.refs[block], asked[block].tokens);
      } else if (!unverified) {
        ASSERT_THAT(cached, testing::ElementsAreArray(asked[block].tokens));
      }
    }
  }

  void CheckAll() const {
    const absl::Status status = index_.CheckInvariants();
    ASSERT_TRUE(status.ok()) << status;
    std::size_t count = 0;
    for (std::size_t model = 0; model < 2; ++model) {
      std::uint64_t record_bytes = 0;
      std::uint64_t two_frames = 0;
      for (const auto& [path, node] : nodes_[model]) {
        ASSERT_EQ(index_.FindById(node.id), node.ref);
        const IndexNode& found = index_.node(node.ref);
        ASSERT_EQ(found.frame, node.frames.frame);
        ASSERT_EQ(found.quality(), node.frames.quality);
        ASSERT_EQ(found.codec(), node.frames.codec);
        ASSERT_EQ(found.has_other(), node.frames.other_quality.has_value());
        if (found.has_other()) {
          ASSERT_EQ(found.other_quality(), *node.frames.other_quality);
        }
        two_frames += found.has_other() ? 1 : 0;
        ASSERT_EQ(found.expires_seconds, node.expires_seconds);
        ASSERT_EQ(index_.extra_key(node.ref), path.back().extra_key);
        ASSERT_EQ(index_.salt(node.ref), path.back().salt);
        record_bytes += node.frames.frame.record_bytes;
      }
      ASSERT_EQ(index_.model(slots_[model]).other_frame_count, two_frames);
      ASSERT_EQ(index_.model(slots_[model]).node_count, nodes_[model].size());
      ASSERT_EQ(index_.model(slots_[model]).record_bytes, record_bytes);
      count += nodes_[model].size();
    }
    ASSERT_EQ(index_.node_count(), count);
  }

  const std::uint32_t block_tokens_;
  const std::uint32_t seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  const PathHasher hasher_{42};
  TrieIndex index_;
  std::vector<ModelSlot> slots_;
  std::map<NodePath, ModelNode> nodes_[2];
  std::uint64_t next_id_ = 1;
};

TEST_P(TrieIndexModelTest, AgreesWithAMapOverRandomOperations) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  for (int step = 0; step < 6000; ++step) {
    const std::uint32_t dice = Below(100);
    const bool growing = step / 1000 % 2 == 0;
    if (dice < (growing ? 40u : 15u)) {
      Insert();
    } else if (dice < (growing ? 50u : 50u)) {
      EraseLeaf();
    } else if (dice < 65) {
      ChangeNode();
    } else {
      CheckWalk();
    }
    if (step % 50 == 0) CheckAll();
    if (HasFatalFailure()) return;
  }
  CheckAll();
}

// Blocks of 2 tokens lie in memory all the time; of those of 1024, 64 do.
INSTANTIATE_TEST_SUITE_P(BlockTokens, TrieIndexModelTest, testing::Values(2u, 1024u));

}  // namespace
}  // namespace kvtrie
