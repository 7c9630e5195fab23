#include "storage/engine/engine.h"

#include "gmock/gmock.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using EngineTest = EngineFixture;

TEST_F(EngineTest, MissIsOkWithZeroBlocks) {
  Open();
  const auto tokens = SessionTokens(1, 100);
  const LookupResult result = Lookup(tokens);
  EXPECT_EQ(result.matched_blocks, 0u);
  EXPECT_EQ(result.ignored_tail_tokens, 4u);
  EXPECT_TRUE(result.lease.empty());
}

TEST_F(EngineTest, WhatWasPutComesBackBitForBit) {
  Open();
  const auto tokens = SessionTokens(1, 10 * kTestBlockTokens + 3);
  const auto results = Put(tokens);
  ASSERT_EQ(results.size(), 10u);
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->outcome, PutOutcome::kStored);
  }
  EXPECT_EQ(ExpectOwnBytes(tokens), 10u);
  ExpectSound();
}

TEST_F(EngineTest, RestartKeepsEverythingAndItsAccounts) {
  Open();
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    sessions.push_back(SessionTokens(seed / 4, 64));  // four sessions share a beginning
    const auto rest = SessionTokens(1000 + seed, 16 * (seed % 5));
    sessions.back().insert(sessions.back().end(), rest.begin(), rest.end());
    Put(sessions.back());
  }
  const EngineStats before = engine_->Stats();
  Reopen();
  const EngineStats after = engine_->Stats();
  EXPECT_EQ(after.node_count, before.node_count);
  EXPECT_EQ(after.live_bytes, before.live_bytes);
  EXPECT_EQ(engine_->recovery().nodes_dropped, 0u);
  EXPECT_EQ(engine_->recovery().unreferenced_bytes, 0u);
  for (const auto& tokens : sessions) {
    EXPECT_EQ(ExpectOwnBytes(tokens), tokens.size() / kTestBlockTokens);
  }
  ExpectSound();
}

TEST_F(EngineTest, DuplicatesAreOkAndCostNothing) {
  Open();
  const auto tokens = SessionTokens(1, 64);
  Put(tokens);
  const EngineStats before = engine_->Stats();
  EXPECT_TRUE(Put(tokens).empty());
  EXPECT_EQ(engine_->Stats().live_bytes, before.live_bytes);
}

TEST_F(EngineTest, SaltSeparatesEqualTokens) {
  Open();
  const auto tokens = SessionTokens(1, 64);
  Put(tokens, "tenant a");
  EXPECT_EQ(ExpectOwnBytes(tokens, "tenant a"), 4u);
  EXPECT_EQ(Lookup(tokens, "tenant b").matched_blocks, 0u);
  EXPECT_EQ(Lookup(tokens).matched_blocks, 0u);
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(tokens, "tenant a"), 4u);
  EXPECT_EQ(Lookup(tokens).matched_blocks, 0u);
}

TEST_F(EngineTest, TokensOutsideTheCacheAreComparedWithTheirRows) {
  options_.token_cache_bytes = std::uint64_t{1} << 20;
  Open();
  std::vector<std::vector<TokenId>> sessions;
  // More tokens than the cache holds: 64 bytes per block and its owner.
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    sessions.push_back(SessionTokens(seed, 128 * kTestBlockTokens));
    Put(sessions.back());
  }
  EXPECT_LE(engine_->Stats().token_cache_bytes, options_.token_cache_bytes);
  for (const auto& tokens : sessions) EXPECT_EQ(Lookup(tokens).matched_blocks, 128u);
  EXPECT_GT(engine_->Stats().token_cache_misses_total, 0u);
}

TEST_F(EngineTest, DeletedPathsAreGoneWithAllBelow) {
  Open();
  const auto tokens = SessionTokens(1, 10 * kTestBlockTokens);
  Put(tokens);
  Selection selection;
  selection.path = PathOf(std::span(tokens).first(5 * kTestBlockTokens));
  const auto deleted = engine_->Delete(kBuiltInTenant, selection);
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->blocks, 6u);
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  engine_->RunMaintenance();
  ExpectSound();
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
}

TEST_F(EngineTest, FullStoreEvictsLeavesAndKeepsItsLimit) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.memory_tier_bytes = std::uint64_t{1} << 20;
  spec_.kv_groups.front().layer_runs = {{2, 2, 512, 512}};  // 64 KiB
  Open();
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    const auto tokens = SessionTokens(seed, 64 * kTestBlockTokens);
    for (const auto& result : Put(tokens)) ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_LE(engine_->Stats().disk_bytes, options_.disk_limit_bytes);
    clock_.Advance(std::chrono::seconds(1));
  }
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  std::uint32_t kept = 0;
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    kept += ExpectOwnBytes(SessionTokens(seed, 64 * kTestBlockTokens));
  }
  // Leaves first: all that is stored is reachable.
  EXPECT_EQ(kept, engine_->Stats().node_count);
  ExpectSound();
}

TEST_F(EngineTest, LeasesHoldWhatTheyNamedUntilTheyEnd) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  spec_.kv_groups.front().layer_runs = {{2, 2, 512, 512}};  // 64 KiB
  Open();
  const auto held = SessionTokens(7, 64 * kTestBlockTokens);
  Put(held);
  const LookupResult leased = Lookup(held, {}, std::chrono::seconds(30));
  ASSERT_FALSE(leased.lease.empty());
  for (std::uint64_t seed = 100; seed < 124; ++seed) {
    Put(SessionTokens(seed, 64 * kTestBlockTokens));
  }
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_EQ(ExpectOwnBytes(held), 64u);
  clock_.Advance(std::chrono::seconds(61));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().lease_count, 0u);
}

}  // namespace
}  // namespace kvtrie
