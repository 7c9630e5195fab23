#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using Tokens = std::vector<TokenId>;

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

class EngineTextReuseTest : public EngineFixture {
 protected:
  EngineTextReuseTest() {
    options_.text_reuse.all_tenants = true;
    spec_ = MovableSpec();
  }

  static ModelSpec MovableSpec(const std::string& name = "test") {
    ModelSpec spec = TestModelSpec(name);
    spec.dtype = DType::kBfloat16;
    return spec;
  }

  LookupResult Reuse(const PathView& path, std::uint32_t min_tokens = 64,
                     Quality min_quality = Quality::kExact, std::chrono::milliseconds lease = {}) {
    LookupQuery query{.models = {path.model},
                      .path = path,
                      .min_quality = min_quality,
                      .lease = lease,
                      .want_blocks = true,
                      .text_reuse_min_tokens = min_tokens};
    EXPECT_FALSE(engine_->TryLookup(tenant_, query).has_value());  // it may read rows
    auto result = engine_->Lookup(tenant_, query);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult{};
  }
  std::vector<ReusableRun> Runs(const Tokens& tokens, std::string_view salt = {}) {
    return Reuse(PathOf(tokens, salt)).reusable_runs;
  }

  // What the blocks of a run are read as; those that are gone are misses, others have the bytes
  // that were put of them.
  std::size_t ReadableBlocks(const ReusableRun& run, const Tokens& stored) {
    const auto frames = engine_->FindFrames(tenant_, model_, run.nodes, Quality::kExact);
    EXPECT_TRUE(frames.ok()) << frames.status();
    std::size_t count = 0;
    for (std::size_t i = 0; i < run.nodes.size(); ++i) {
      if (!(*frames)[i]) continue;
      const auto loaded = ReadBlock(*(*frames)[i]);
      if (!loaded.ok()) {
        EXPECT_TRUE(absl::IsNotFound(loaded.status())) << loaded.status();
        continue;
      }
      const auto pattern = Pattern(
          PathOf(stored), static_cast<std::uint32_t>(run.first_position / kTestBlockTokens + i));
      EXPECT_TRUE(std::ranges::equal(loaded->view.body(), pattern)) << "foreign bytes";
      ++count;
    }
    return count;
  }

  const Tokens system_ = SessionTokens(1, 64);
  const Tokens document_ = SessionTokens(2, 300);
  const Tokens stored_ = Joined({SessionTokens(11, 37), document_, SessionTokens(12, 47)});
};

TEST_F(EngineTextReuseTest, NamesTheBlocksThatHoldTheText) {
  Open();
  MustPut(stored_);
  MustPut(system_);
  const Tokens query = Joined({system_, SessionTokens(14, 9), document_, SessionTokens(15, 5)});
  const LookupResult found = Reuse(PathOf(query));
  EXPECT_EQ(found.matched_blocks, 4u);
  EXPECT_FALSE(found.text_reuse_forbidden.has_value());
  ASSERT_THAT(found.reusable_runs, SizeIs(1));
  const ReusableRun& run = found.reusable_runs[0];
  EXPECT_EQ(run.first_token, 64u + 9);
  EXPECT_EQ(run.token_count, 300u);
  EXPECT_EQ(run.node_offset, 37u % 16);
  EXPECT_EQ(run.first_position, 37u);
  EXPECT_EQ(run.source_quality, Quality::kExact);
  std::vector<TrieNodeId> nodes;
  const LookupResult all = Lookup(stored_);
  std::uint64_t bytes = 0;
  for (std::size_t block = 37 / 16; block <= 336 / 16; ++block) {
    nodes.push_back(all.blocks[0][block].node);
    bytes += all.blocks[0][block].stored_bytes;
  }
  EXPECT_EQ(run.nodes, nodes);
  EXPECT_EQ(run.fetch_bytes, bytes);

  EXPECT_THAT(Reuse(PathOf(query), 300).reusable_runs, SizeIs(1));
  EXPECT_THAT(Reuse(PathOf(query), 301).reusable_runs, IsEmpty());
  EXPECT_THAT(Runs(stored_), IsEmpty());  // all of it is the exact prefix
  EXPECT_THAT(Lookup(query).reusable_runs, IsEmpty());
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.text_reuse_lookups_total, 4u);
  EXPECT_EQ(stats.text_reuse_offered_tokens_total, 600u);
  EXPECT_EQ(stats.text_reuse_forbidden_total, 0u);
  ExpectSound();
}

TEST_F(EngineTextReuseTest, TheFirstTokenOfASessionIsNotReused) {
  for (const std::uint32_t block_tokens : {1u, 16u}) {
    options_.data_dir = absl::StrCat(folder_.path(), "/first", block_tokens);
    spec_ = MovableSpec();
    spec_.block_tokens = block_tokens;
    Open();
    MustPut(document_);
    const Tokens query = Joined({SessionTokens(14, 20), document_});
    const std::vector<ReusableRun> runs = Runs(query);
    ASSERT_THAT(runs, SizeIs(1));
    EXPECT_EQ(runs[0].first_token, 21u);
    EXPECT_EQ(runs[0].token_count, 300 / block_tokens * block_tokens - 1);
    EXPECT_EQ(runs[0].first_position, 1u);
    EXPECT_EQ(runs[0].node_offset, 1 % block_tokens);
    EXPECT_EQ(runs[0].nodes.front(), Lookup(document_).blocks[0][block_tokens == 1 ? 1 : 0].node);
    EXPECT_THAT(Reuse(PathOf(query), runs[0].token_count).reusable_runs, SizeIs(1));
    EXPECT_THAT(Reuse(PathOf(query), runs[0].token_count + 1).reusable_runs, IsEmpty());
    engine_.reset();
  }
}

TEST_F(EngineTextReuseTest, OtherTenantsModelsAndSaltsNeverAnswer) {
  Open();
  MustPut(PathOf(stored_, "salt"));
  const ModelSpec own = spec_;
  UseModel(MovableSpec("other"));
  MustPut(stored_);
  tenant_ = TenantId{2};
  UseModel(own);
  MustPut(stored_);
  tenant_ = kBuiltInTenant;
  UseModel(own);
  EXPECT_THAT(Runs(document_), IsEmpty());
  EXPECT_THAT(Runs(document_, "pepper"), IsEmpty());
  EXPECT_THAT(Runs(document_, "salt"), SizeIs(1));
  tenant_ = TenantId{2};
  EXPECT_THAT(Runs(document_), SizeIs(1));
}

TEST_F(EngineTextReuseTest, BlocksWithExtraKeysAreNoText) {
  Open();
  const std::vector<ExtraKey> image = {{10, "image"}};
  MustPut(PathOf(stored_, {}, image));
  for (const ReusableRun& run : Runs(document_)) {
    const std::uint32_t end = run.first_position + run.token_count;
    EXPECT_TRUE(end <= 160 || run.first_position >= 176) << run.first_position;
  }
  EXPECT_THAT(Runs(document_), SizeIs(2));
  // Nor of the query.
  const std::vector<ExtraKey> own = {{4, "image"}};
  const LookupResult found = Reuse(PathOf(document_, {}, own), 32);
  for (const ReusableRun& run : found.reusable_runs) {
    EXPECT_TRUE(run.first_token + run.token_count <= 64 || run.first_token >= 80);
  }
  EXPECT_FALSE(found.reusable_runs.empty());
}

TEST_F(EngineTextReuseTest, WhoMayNotHaveItGetsTheExactPrefixAndIsTold) {
  const TextReusePolicy off{};
  const TextReusePolicy others{.tenants = {TenantId{7}}};
  const TextReusePolicy model{.all_tenants = true, .forbidden_models = {MovableSpec().Digest()}};
  const std::pair<TextReusePolicy, TextReuseForbidden> cases[] = {
      {off, TextReuseForbidden::kServer},
      {others, TextReuseForbidden::kTenant},
      {model, TextReuseForbidden::kModel}};
  for (const auto& [policy, why] : cases) {
    options_.text_reuse = policy;
    Open();
    MustPut(stored_);
    MustPut(system_);
    // Nothing is searched for, so nothing blocks either.
    const Tokens query = Joined({system_, document_});
    const auto found = engine_->TryLookup(
        tenant_, {.models = {model_}, .path = PathOf(query), .text_reuse_min_tokens = 64});
    ASSERT_TRUE(found.has_value() && found->ok());
    EXPECT_EQ((*found)->matched_blocks, 4u);
    EXPECT_THAT((*found)->reusable_runs, IsEmpty());
    EXPECT_EQ((*found)->text_reuse_forbidden, why);
    EXPECT_EQ(engine_->Stats().text_reuse_forbidden_total, 1u);
    PutAnnouncement put;
    put.path = PathOf(query);
    put.first_reused_block = 4;
    EXPECT_TRUE(absl::IsFailedPrecondition(engine_->BeginPut(tenant_, put).status()));
    engine_.reset();
  }
  options_.text_reuse = {.tenants = {TenantId{7}, tenant_}};
  Open();
  EXPECT_THAT(Runs(document_), SizeIs(1));
}

TEST_F(EngineTextReuseTest, KvOfModelsThatCannotBeMovedIsNotOffered) {
  Open();
  ModelSpec spec = MovableSpec("own layout");
  spec.layout_tag = "engine's own";
  UseModel(spec);
  MustPut(stored_);
  const auto found = engine_->Lookup(
      tenant_, {.models = {model_}, .path = PathOf(document_), .text_reuse_min_tokens = 64});
  ASSERT_TRUE(found.ok());
  EXPECT_THAT(found->reusable_runs, IsEmpty());
  EXPECT_EQ(found->text_reuse_forbidden, TextReuseForbidden::kPositions);
  // An engine that has its own means says so of what it puts.
  PutAnnouncement put;
  put.path = PathOf(document_);
  put.first_reused_block = 3;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Matched(document_), 3u);
}

TEST_F(EngineTextReuseTest, SeveralModelsAtOnceAreRefused) {
  Open();
  const auto found = engine_->Lookup(
      tenant_,
      {.models = {model_, model_}, .path = PathOf(document_), .text_reuse_min_tokens = 64});
  EXPECT_TRUE(absl::IsInvalidArgument(found.status())) << found.status();
}

// Of a store that overflows until sources without a lease go.
TEST_F(EngineTextReuseTest, ALeaseHoldsTheSources) {
  int rounds = 0;
  for (const bool leased : {false, true}) {
    SCOPED_TRACE(leased);
    options_.data_dir = absl::StrCat(folder_.path(), "/leased", leased);
    options_.disk_limit_bytes = std::uint64_t{64} << 20;
    options_.lease_max = std::chrono::hours(1);
    spec_.kv_groups.front().layer_runs = {{2, 2, 512, 512}};  // 128 KiB a block
    Open();
    MustPut(stored_);
    const LookupResult found =
        Reuse(PathOf(document_), 64, Quality::kExact,
              leased ? std::chrono::milliseconds(3'600'000) : std::chrono::milliseconds(0));
    ASSERT_THAT(found.reusable_runs, SizeIs(1));
    EXPECT_EQ(found.matched_blocks, 0u);
    EXPECT_EQ(found.lease.empty(), !leased);
    const ReusableRun& run = found.reusable_runs[0];
    EXPECT_EQ(ReadableBlocks(run, stored_), run.nodes.size());
    const auto overflow = [&](std::uint64_t seed) {  // by blocks that are kept longer
      const Tokens tokens = SessionTokens(seed, 1600);
      PutAnnouncement put;
      put.path = PathOf(tokens);
      put.priority = 15;
      for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
    };
    if (leased) {
      for (int round = 0; round < 2 * rounds; ++round)
        overflow(static_cast<std::uint64_t>(1000 + round));
      EXPECT_EQ(ReadableBlocks(run, stored_), run.nodes.size());
    } else {
      while (ReadableBlocks(run, stored_) == run.nodes.size() && rounds < 100) {
        overflow(static_cast<std::uint64_t>(1000 + rounds++));
      }
      EXPECT_LT(ReadableBlocks(run, stored_), run.nodes.size());
    }
    if (leased) {
      engine_->ReleaseLease(tenant_, found.lease);
      EXPECT_EQ(engine_->Stats().lease_count, 0u);
    }
    ExpectSound();
    engine_.reset();
  }
}

TEST_F(EngineTextReuseTest, SourcesAreAtLeastAsGoodAsWasAskedForAndNotReusedThemselves) {
  Open();
  // Stored as reused: kept apart, and of no rated quality.
  PutAnnouncement put;
  put.path = PathOf(stored_);
  put.first_reused_block = 2;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  for (const bool reopened : {false, true}) {
    if (reopened) Reopen();
    const auto at = [&](Quality quality) {
      return engine_->Lookup(tenant_, {.models = {model_},
                                       .path = PathOf(stored_),
                                       .min_quality = quality,
                                       .want_blocks = true});
    };
    EXPECT_EQ(at(Quality::kExact)->matched_blocks, 2u);
    EXPECT_EQ(at(Quality::kSmall)->matched_blocks, 2u);
    const auto unrated = at(Quality::kUnrated);
    EXPECT_EQ(unrated->matched_blocks, 24u);
    EXPECT_EQ(unrated->quality, Quality::kUnrated);
    std::vector<TrieNodeId> nodes;
    for (const MatchedBlock& block : unrated->blocks[0]) nodes.push_back(block.node);
    const auto frames = engine_->FindFrames(tenant_, model_, nodes, Quality::kSmall);
    for (std::size_t i = 0; i < nodes.size(); ++i) EXPECT_EQ((*frames)[i].has_value(), i < 2) << i;
    for (const Quality quality : kAllQualities) {
      EXPECT_THAT(Reuse(PathOf(document_), 64, quality).reusable_runs, IsEmpty());
    }
    ExpectSound();
  }
  // The exact path of the same text is put, found and reused by itself.
  MustPut(stored_);
  EXPECT_EQ(ExpectOwnBytes(stored_), 24u);
  const LookupResult found = Reuse(PathOf(document_), 64, Quality::kUnrated);
  ASSERT_THAT(found.reusable_runs, SizeIs(1));
  EXPECT_EQ(ReadableBlocks(found.reusable_runs[0], stored_), found.reusable_runs[0].nodes.size());
}

TEST_F(EngineTextReuseTest, AllOfAPathMayBeReused) {
  Open();
  PutAnnouncement put;
  put.path = PathOf(document_);
  put.first_reused_block = 0;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Matched(document_), 0u);
  EXPECT_EQ(engine_
                ->Lookup(tenant_, {.models = {model_},
                                   .path = PathOf(document_),
                                   .min_quality = Quality::kUnrated})
                ->matched_blocks,
            300u / 16);
  // A turn on top of it says what it was restored at, as any does.
  const Tokens longer = Joined({document_, SessionTokens(3, 52)});
  PutAnnouncement next;
  next.path = PathOf(longer);
  next.restored_blocks = 18;
  next.restored_quality = Quality::kUnrated;
  for (const auto& result : Put(next)) ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(Matched(longer), 0u);
  PutAnnouncement wrong = next;
  // Within what was restored; and tokens for blocks.
  for (const std::uint32_t first : {17u, static_cast<std::uint32_t>(longer.size())}) {
    wrong.first_reused_block = first;
    EXPECT_TRUE(absl::IsInvalidArgument(engine_->BeginPut(tenant_, wrong).status())) << first;
  }
  ExpectSound();
}

TEST_F(EngineTextReuseTest, TokensThatAreNotInMemoryAreReadAndCompared) {
  options_.token_cache_bytes = std::uint64_t{1} << 20;
  options_.disk_limit_bytes = std::uint64_t{512} << 20;
  blocks_per_write_ = 256;
  Open();
  MustPut(stored_);
  for (std::uint64_t i = 0; i < 3; ++i) MustPut(SessionTokens(100 + i, 120'000));
  const std::vector<ReusableRun> runs = Runs(document_);
  ASSERT_THAT(runs, SizeIs(1));
  EXPECT_EQ(runs[0].first_token, 1u);  // nor does any KV stand in for that of the first
  EXPECT_EQ(runs[0].token_count, 299u);
}

TEST_F(EngineTextReuseTest, TheAnswerIsBounded) {
  Open();
  Tokens query;
  Tokens stored;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const Tokens part = SessionTokens(1000 + i, 40 + i % 3);
    query = Joined({query, part, SessionTokens(2000 + i, 3)});
    stored = Joined({stored, part, SessionTokens(3000 + i, 5)});
  }
  MustPut(stored);
  const std::vector<ReusableRun> runs = Reuse(PathOf(query), 32).reusable_runs;
  EXPECT_EQ(runs.size(), kReusableRunsMax);
  std::uint32_t end = 0;
  for (const ReusableRun& run : runs) {
    EXPECT_GE(run.first_token, end);
    end = run.first_token + run.token_count;
  }
}

// Against a search of all stored text by hand, among sessions made of the same few documents.
TEST_F(EngineTextReuseTest, RunsAreThoseOfASearchOfEverything) {
  constexpr std::uint32_t kMin = 40;
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    SCOPED_TRACE(seed);
    options_.data_dir = absl::StrCat(folder_.path(), "/store", seed);
    spec_ = MovableSpec();
    spec_.block_tokens = seed % 3 == 0 ? 8 : seed % 3 == 1 ? 16 : 24;
    Open();
    const std::uint32_t block_tokens = spec_.block_tokens;
    std::mt19937_64 random(seed);
    const auto pick = [&](std::size_t low, std::size_t high) {
      return low + random() % (high - low + 1);
    };
    const auto session = [&](std::uint64_t own) {
      Tokens tokens = SessionTokens(own, pick(0, 40));
      for (std::size_t parts = pick(1, 4); parts > 0; --parts) {
        const Tokens document = SessionTokens(500 + pick(0, 5), 160);
        const std::size_t from = pick(0, 60);
        const auto part = std::span(document).subspan(from, pick(30, 100));
        tokens.insert(tokens.end(), part.begin(), part.end());
        const Tokens between = SessionTokens(own * 100 + parts, pick(0, 30));
        tokens.insert(tokens.end(), between.begin(), between.end());
      }
      return tokens;
    };
    std::vector<Tokens> stored;
    std::map<TrieNodeId, std::pair<std::size_t, std::size_t>> places;  // session, block
    for (std::uint64_t i = 0; i < 4; ++i) {  // a text in more than 4 places may be passed over
      Tokens tokens = session(10 + i);
      MustPut(tokens);
      tokens.resize(tokens.size() / block_tokens * block_tokens);
      const LookupResult all = Lookup(tokens);
      for (std::size_t block = 0; block < all.matched_blocks; ++block) {
        places[all.blocks[0][block].node] = {i, block};
      }
      stored.push_back(std::move(tokens));
    }
    for (std::uint64_t q = 0; q < 30; ++q) {
      Tokens query = q % 3 == 0 ? Joined({stored[q % 4], session(50 + q)}) : session(50 + q);
      const LookupResult found = Reuse(PathOf(query), kMin);
      const std::size_t begin =
          std::max<std::size_t>(1, std::size_t{found.matched_blocks} * block_tokens);
      std::vector<bool> covered(query.size());
      std::size_t end = begin;
      for (const ReusableRun& run : found.reusable_runs) {
        ASSERT_GE(run.first_token, end);
        ASSERT_GE(run.token_count, kMin);
        end = std::size_t{run.first_token} + run.token_count;
        ASSERT_LE(end, query.size());
        // Its blocks are one path, and have these tokens from there on.
        const auto [which, block] = places.at(run.nodes.front());
        ASSERT_EQ(run.first_position, block * block_tokens + run.node_offset);
        ASSERT_EQ(run.nodes.size(),
                  (run.node_offset + run.token_count + block_tokens - 1) / block_tokens);
        for (std::size_t i = 0; i < run.nodes.size(); ++i) {
          ASSERT_EQ(places.at(run.nodes[i]).second, block + i);
        }
        for (std::size_t i = 0; i < run.token_count; ++i) {
          ASSERT_EQ(query[run.first_token + i], stored[which][run.first_position + i]);
          covered[run.first_token + i] = true;
        }
      }
      // Nothing of kMin tokens is left that is stored anywhere.
      std::size_t longest = 0;
      for (std::size_t at = begin; at < query.size(); ++at) {
        for (const Tokens& tokens : stored) {
          for (std::size_t there = 1; there < tokens.size(); ++there) {
            std::size_t same = 0;
            std::size_t open = 0;
            bool is_free = true;
            while (at + same < query.size() && there + same < tokens.size() &&
                   query[at + same] == tokens[there + same]) {
              is_free = is_free && !covered[at + same];
              open += is_free ? 1 : 0;
              ++same;
            }
            longest = std::max(longest, same);
            ASSERT_LT(open, kMin) << "query " << q << ": tokens from " << at;
          }
        }
      }
      std::size_t longest_found = 0;
      for (const ReusableRun& run : found.reusable_runs) {
        longest_found = std::max<std::size_t>(longest_found, run.token_count);
      }
      EXPECT_EQ(longest_found, longest < kMin ? 0 : longest) << "query " << q;
    }
    engine_.reset();
  }
}

}  // namespace
}  // namespace kvtrie
