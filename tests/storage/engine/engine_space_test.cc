#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "storage/meta/rocksdb_meta_store.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

using std::chrono::seconds;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class EngineSpaceTest : public EngineFixture {
 protected:
  // Blocks of 256 KiB, so that few fill the smallest store.
  void UseLargeBlocks() {
    spec_.kv_groups.front().layer_runs = {{2, 8, 512, 512}};
    options_.disk_limit_bytes = 64 * kMiB;
    options_.memory_tier_bytes = 0;
  }
  PutAnnouncement Announce(std::span<const TokenId> tokens) const {
    PutAnnouncement put;
    put.path = PathOf(tokens);
    return put;
  }
  void MustPut(const PutAnnouncement& put) {
    for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  }
  using EngineFixture::MustPut;
  // Unrelated sessions that take at least `bytes`.
  void Fill(std::uint64_t bytes, std::uint64_t first_seed) {
    const std::uint64_t blocks = bytes / raw_block_bytes_ + 1;
    for (std::uint64_t i = 0; i < blocks / 4 + 1; ++i) {
      MustPut(SessionTokens(first_seed + i, 4 * kTestBlockTokens));
    }
  }
};

TEST_F(EngineSpaceTest, TimesToLiveEndWithTheClockAndOverRestarts) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement put = Announce(tokens);
  put.ttl = seconds(100);
  MustPut(put);
  clock_.Advance(seconds(60));
  engine_->RunMaintenance();
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  clock_.Advance(seconds(39));
  EXPECT_EQ(Matched(tokens), 4u);
  clock_.Advance(seconds(1));
  EXPECT_EQ(Matched(tokens), 0u);  // at once, not with the next round
  EXPECT_EQ(engine_->Stats().node_count, 4u);
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  EXPECT_EQ(engine_->Stats().expired_blocks_total, 4u);
  EXPECT_EQ(engine_->Stats().live_bytes, 0u);
  ExpectSound();
}

TEST_F(EngineSpaceTest, WhatExpiredWhileTheStoreWasDownIsGoneAtTheStart) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement put = Announce(tokens);
  put.ttl = seconds(100);
  MustPut(put);
  engine_.reset();
  clock_.Advance(seconds(1000));
  Open();
  EXPECT_EQ(Matched(tokens), 0u);
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

TEST_F(EngineSpaceTest, TheLongestTimeToLiveDoesNotWrapAround) {
  Open();
  const auto tokens = SessionTokens(1, 2 * kTestBlockTokens);
  PutAnnouncement put = Announce(tokens);
  put.ttl = seconds(0xffffffffu);
  MustPut(put);
  EXPECT_EQ(Matched(tokens), 2u);
  ASSERT_TRUE(engine_->SetRetention(tenant_, SelectionOf(put.path), {.ttl = put.ttl}).ok());
  EXPECT_EQ(Matched(tokens), 2u);
  EXPECT_TRUE(absl::IsInvalidArgument(
      engine_->SetRetention(tenant_, SelectionOf(put.path), {.ttl = seconds(-1)}).status()));
}

TEST_F(EngineSpaceTest, ExpiredBlocksMayBePutAgainAndLiveOn) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement put = Announce(tokens);
  put.ttl = seconds(10);
  MustPut(put);
  clock_.Advance(seconds(20));
  EXPECT_EQ(Matched(tokens), 0u);
  put.ttl = seconds(0);
  MustPut(put);
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  clock_.Advance(seconds(1000));
  engine_->RunMaintenance();
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  ExpectSound();
}

TEST_F(EngineSpaceTest, RetentionMayBeSetLaterAndTakenBack) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  const auto changed = engine_->SetRetention(
      tenant_, SelectionOf(PathOf(std::span(tokens).first(4 * kTestBlockTokens))),
      {.ttl = seconds(50), .priority = 3});
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->changed_blocks, 4u);
  clock_.Advance(seconds(49));
  Selection all;
  all.all = true;
  ASSERT_TRUE(engine_->SetRetention(tenant_, all, {.ttl = seconds(0)}).ok());
  clock_.Advance(seconds(500));
  engine_->RunMaintenance();
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  Reopen();
  EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  EXPECT_EQ(engine_->DescribePath(tenant_, SelectionOf(PathOf(tokens)))->back().priority, 3u);
}

TEST_F(EngineSpaceTest, WhatARetentionDoesNotNameStays) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  const Selection path = SelectionOf(PathOf(tokens));
  ASSERT_TRUE(engine_->SetRetention(tenant_, path, {.ttl = seconds(50), .priority = 3}).ok());
  ASSERT_TRUE(engine_->SetRetention(tenant_, path, {.quality = Quality::kHigh}).ok());
  EXPECT_EQ(engine_->DescribePath(tenant_, path)->back().priority, 3u);
  ASSERT_TRUE(engine_->SetRetention(tenant_, path, {.priority = 5}).ok());
  EXPECT_EQ(engine_->DescribePath(tenant_, path)->back().priority, 5u);
  clock_.Advance(seconds(49));
  EXPECT_EQ(Matched(tokens), 4u);
  clock_.Advance(seconds(2));
  EXPECT_EQ(Matched(tokens), 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->SetRetention(tenant_, path, {}).status()));
}

TEST_F(EngineSpaceTest, LeasedBlocksOutliveTheirTimeButAreNotFound) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement put = Announce(tokens);
  put.ttl = seconds(10);
  MustPut(put);
  clock_.Advance(seconds(5));
  const LookupResult leased = Lookup(tokens, {}, seconds(30));
  clock_.Advance(seconds(10));
  engine_->RunMaintenance();
  EXPECT_EQ(Matched(tokens), 0u);
  EXPECT_EQ(engine_->Stats().node_count, 4u);
  engine_->ReleaseLease(tenant_, leased.lease);
  clock_.Advance(seconds(1));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

// Public report 49: ten times what there is room for does not move what is pinned.
TEST_F(EngineSpaceTest, PinsHoldOverRestartsUntilTheirEnd) {
  UseLargeBlocks();
  Open();
  const auto tokens = SessionTokens(1, 8 * kTestBlockTokens);
  MustPut(tokens);
  const auto pin = engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(600));
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_EQ(pin->blocks, 8u);
  clock_.Advance(seconds(300));
  Reopen();
  ASSERT_EQ(engine_->ListPins(tenant_).size(), 1u);
  EXPECT_EQ(engine_->ListPins(tenant_).front().id, pin->id);
  EXPECT_EQ(engine_->Stats().pinned_bytes, pin->bytes);
  Fill(10 * options_.disk_limit_bytes, 1000);
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_EQ(ExpectOwnBytes(tokens), 8u);
  ASSERT_TRUE(engine_->ExtendPin(tenant_, pin->id, seconds(1000)).ok());
  clock_.Advance(seconds(999));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pin_count, 1u);
  clock_.Advance(seconds(1));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pin_count, 0u);
  EXPECT_EQ(engine_->Stats().pinned_bytes, 0u);
  EXPECT_TRUE(absl::IsNotFound(engine_->ExtendPin(tenant_, pin->id, seconds(1)).status()));
  Fill(options_.disk_limit_bytes + 8 * kMiB, 5000);
  EXPECT_LT(Matched(tokens), 8u);
  Reopen();
  EXPECT_TRUE(engine_->ListPins(tenant_).empty());
}

// A pin goes with what it pins, in memory and in its row.
TEST_F(EngineSpaceTest, DeletingWhatIsPinnedEndsThePin) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  const auto pin = engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(600));
  ASSERT_TRUE(pin.ok()) << pin.status();
  Selection all;
  all.all = true;
  EXPECT_EQ(engine_->Delete(tenant_, all)->blocks, 4u);
  EXPECT_EQ(engine_->Stats().pinned_bytes, 0u);
  EXPECT_TRUE(engine_->ListPins(tenant_).empty());
  EXPECT_TRUE(absl::IsNotFound(engine_->ExtendPin(tenant_, pin->id, seconds(60)).status()));
  MustPut(tokens);
  Reopen();
  EXPECT_TRUE(engine_->ListPins(tenant_).empty());
  EXPECT_FALSE(engine_->DescribePath(tenant_, SelectionOf(PathOf(tokens)))->back().pinned);
}

// Public report 23.
TEST_F(EngineSpaceTest, UnpinningTwiceOrTheUnknownDoesNoHarm) {
  Open();
  const auto tokens = SessionTokens(1, 2 * kTestBlockTokens);
  MustPut(tokens);
  const auto first = engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(60));
  const auto second = engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(60));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(*engine_->Unpin(tenant_, first->id));
  EXPECT_FALSE(*engine_->Unpin(tenant_, first->id));
  EXPECT_FALSE(*engine_->Unpin(tenant_, PinId{}));
  EXPECT_FALSE(*engine_->Unpin(TenantId{2}, second->id));
  EXPECT_EQ(engine_->Stats().pinned_bytes, second->bytes);
  EXPECT_TRUE(engine_->DescribePath(tenant_, SelectionOf(PathOf(tokens)))->back().pinned);
  clock_.Advance(seconds(60));
  engine_->RunMaintenance();
  EXPECT_FALSE(*engine_->Unpin(tenant_, second->id));
  EXPECT_EQ(engine_->Stats().pinned_bytes, 0u);
  EXPECT_TRUE(absl::IsNotFound(
      engine_->Pin(tenant_, SelectionOf(PathOf(SessionTokens(2, 64))), seconds(1)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(0)).status()));
}

TEST_F(EngineSpaceTest, TenThousandLeasesThatNobodyEndsHoldNothingLater) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  for (int i = 0; i < 10'000; ++i) Lookup(tokens, {}, seconds(30));
  EXPECT_EQ(engine_->Stats().lease_count, 10'000u);
  clock_.Advance(seconds(31));
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().lease_count, 0u);
  EXPECT_FALSE(engine_->DescribePath(tenant_, SelectionOf(PathOf(tokens)))->back().leased);
}

TEST_F(EngineSpaceTest, PinsAreCappedAndSayWhatIsFree) {
  UseLargeBlocks();
  options_.pinned_percent_max = 10;
  Open();
  std::uint64_t pinned = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto tokens = SessionTokens(seed, 4 * kTestBlockTokens);
    MustPut(tokens);
    const auto pin = engine_->Pin(tenant_, SelectionOf(PathOf(tokens)), seconds(600));
    if (pin.ok()) {
      pinned += pin->bytes;
    } else {
      EXPECT_TRUE(absl::IsResourceExhausted(pin.status()));
      const std::uint64_t cap = options_.disk_limit_bytes / 100 * 10;
      EXPECT_THAT(std::string(pin.status().message()),
                  testing::HasSubstr(std::to_string(cap - pinned)));
    }
  }
  EXPECT_GT(pinned, 0u);
  EXPECT_EQ(engine_->Stats().pinned_bytes, pinned);
  EXPECT_LE(pinned, options_.disk_limit_bytes / 10);
}

// Public report 16: the head of a prompt goes last, and nothing that stays is out of reach.
TEST_F(EngineSpaceTest, EvictionLeavesUsablePrefixes) {
  UseLargeBlocks();
  Open();
  const auto prompt = SessionTokens(1, 150 * kTestBlockTokens);
  for (std::size_t part = 1; part <= 10; ++part) {
    MustPut(std::span(prompt).first(part * 15 * kTestBlockTokens));
  }
  ASSERT_EQ(Matched(prompt), 150u);
  Selection first_half = SelectionOf(PathOf(std::span(prompt).first(75 * kTestBlockTokens)));
  clock_.Advance(seconds(10));
  EXPECT_EQ(*engine_->Touch(tenant_, first_half), 75u);
  for (std::uint64_t seed = 10; seed < 30; ++seed) {
    clock_.Advance(seconds(1));
    MustPut(SessionTokens(seed, 10 * kTestBlockTokens));
  }
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_GE(ExpectOwnBytes(prompt), 75u);
  std::uint64_t reachable = Matched(prompt);
  for (std::uint64_t seed = 10; seed < 30; ++seed) {
    reachable += ExpectOwnBytes(SessionTokens(seed, 10 * kTestBlockTokens));
  }
  EXPECT_EQ(reachable, engine_->Stats().node_count);
  ExpectSound();
}

// Public report 49, its other half.
TEST_F(EngineSpaceTest, HighPrioritiesOutliveLowOnes) {
  UseLargeBlocks();
  Open();
  for (std::uint64_t seed = 0; seed < 48; ++seed) {
    const auto tokens = SessionTokens(seed, 4 * kTestBlockTokens);
    PutAnnouncement put = Announce(tokens);
    put.priority = seed % 2 == 0 ? 8 : 0;
    MustPut(put);
  }
  clock_.Advance(seconds(1));
  Fill(40 * kMiB, 1000);
  std::uint64_t kept[2] = {0, 0};
  for (std::uint64_t seed = 0; seed < 48; ++seed) {
    kept[seed % 2] += Matched(SessionTokens(seed, 4 * kTestBlockTokens));
  }
  EXPECT_EQ(kept[0], 24u * 4);
  EXPECT_LT(kept[1], 24u * 4 * 3 / 4);
}

TEST_F(EngineSpaceTest, AFullStoreWithoutEvictionRefusesAndRecovers) {
  UseLargeBlocks();
  options_.eviction = false;
  Open();
  std::vector<std::pair<std::vector<TokenId>, std::uint32_t>> acknowledged;
  std::size_t refused = 0;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    auto tokens = SessionTokens(seed, 4 * kTestBlockTokens);
    std::uint32_t stored = 0;
    for (const auto& result : Put(tokens)) {
      if (result.ok()) {
        ++stored;
      } else {
        ++refused;
        EXPECT_TRUE(absl::IsResourceExhausted(result.status()) ||
                    absl::IsFailedPrecondition(result.status()))
            << result.status();
      }
    }
    acknowledged.emplace_back(std::move(tokens), stored);
  }
  EXPECT_GT(refused, 0u);
  EXPECT_GT(engine_->Stats().refused_full_total, 0u);
  EXPECT_LE(DuBytes(), options_.disk_limit_bytes);
  for (const auto& [tokens, stored] : acknowledged) EXPECT_EQ(ExpectOwnBytes(tokens), stored);
  for (std::size_t i = 0; i < 20; ++i) {
    const auto path = PathOf(std::span(acknowledged[i].first).first(kTestBlockTokens));
    EXPECT_TRUE(engine_->Delete(tenant_, SelectionOf(path)).ok());
  }
  for (std::uint64_t seed = 1000; seed < 1010; ++seed) {
    MustPut(SessionTokens(seed, 4 * kTestBlockTokens));
  }
  ExpectSound();
}

TEST_F(EngineSpaceTest, WhatIsHeldIsNotEvictedEvenIfPutsFail) {
  UseLargeBlocks();
  options_.pinned_percent_max = 90;
  Open();
  std::vector<std::vector<TokenId>> held;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    held.push_back(SessionTokens(seed, 4 * kTestBlockTokens));
    MustPut(held.back());
    Lookup(held.back(), {}, seconds(60));
  }
  std::size_t refused = 0;
  for (std::uint64_t seed = 100; seed < 140; ++seed) {
    const auto tokens = SessionTokens(seed, 4 * kTestBlockTokens);
    for (const auto& result : Put(tokens)) refused += result.ok() ? 0 : 1;
    Lookup(tokens, {}, seconds(60));
  }
  EXPECT_GT(refused, 0u);
  for (const auto& tokens : held) EXPECT_EQ(ExpectOwnBytes(tokens), 4u);
  clock_.Advance(seconds(61));
  engine_->RunMaintenance();
  MustPut(SessionTokens(1000, 4 * kTestBlockTokens));
}

TEST_F(EngineSpaceTest, TheIndexKeepsItsLimit) {
  options_.index_bytes_max = kMiB;
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 0}};
  Open();
  // Extra keys lie in the index: about a thousand such nodes fill it.
  const std::string long_key(kExtraKeyBytesMax, 'x');
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    std::vector<ExtraKey> extra_keys;
    for (std::uint32_t block = 0; block < 16; ++block) extra_keys.push_back({block, long_key});
    MustPut(PathOf(SessionTokens(seed, 16 * kTestBlockTokens), {}, extra_keys));
  }
  EXPECT_LE(engine_->Stats().node_count, kMiB / kExtraKeyBytesMax);
  EXPECT_GT(engine_->Stats().evicted_blocks_total, 0u);
  EXPECT_GT(engine_->Stats().node_count, kMiB / kExtraKeyBytesMax / 2);
}

// Public report 37, in the small: churn of ten times the limit, then deletes of nine in ten.
TEST_F(EngineSpaceTest, DuStaysNearTheLimitUnderChurnAndFallsAfterDeletes) {
  UseLargeBlocks();
  spec_.kv_groups.front().layer_runs = {{2, 4, 512, 512}};  // 128 KiB
  Open();
  std::mt19937 random(9);
  std::uint64_t seed = 0;
  for (std::uint64_t written = 0; written < 2 * options_.disk_limit_bytes; ++seed) {
    const std::size_t blocks = 1 + random() % 24;
    MustPut(SessionTokens(seed, blocks * kTestBlockTokens));
    written += blocks * raw_block_bytes_;
    if (seed % 4 == 0) {
      engine_->RunMaintenance();
      ASSERT_LE(DuBytes(), options_.disk_limit_bytes + options_.disk_limit_bytes / 4);
      clock_.Advance(seconds(1));
    }
  }
  for (std::uint64_t at = 0; at < seed; ++at) {
    if (random() % 10 == 0) continue;
    const auto tokens = SessionTokens(at, kTestBlockTokens);
    EXPECT_TRUE(engine_->Delete(tenant_, SelectionOf(PathOf(tokens))).ok());
  }
  engine_->RunMaintenance();
  const EngineStats stats = engine_->Stats();
  EXPECT_GT(stats.live_bytes, 0u);
  // The metadata's logs and the reserve for full disks do not shrink with the payload.
  const std::uint64_t fixed_bytes = 12 * kMiB;
  EXPECT_LE(DuBytes(), stats.live_bytes + stats.live_bytes / 2 + fixed_bytes);
  EXPECT_NEAR(static_cast<double>(stats.disk_bytes), static_cast<double>(DuBytes()),
              0.05 * static_cast<double>(DuBytes()));
  for (std::uint64_t at = 0; at < seed; ++at) {
    ExpectOwnBytes(SessionTokens(at, 24 * kTestBlockTokens));
  }
  ExpectSound();
}

TEST_F(EngineSpaceTest, DeletingAModelOrEverythingLeavesNothing) {
  Open();
  const ModelSpec first = spec_;
  for (std::uint64_t seed = 0; seed < 10; ++seed) MustPut(SessionTokens(seed, 64));
  ModelSpec second = spec_;
  second.name = "second";
  UseModel(second);
  for (std::uint64_t seed = 0; seed < 10; ++seed) MustPut(SessionTokens(seed, 64));
  Selection selection;
  selection.model = model_;
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 40u);
  EXPECT_EQ(Matched(SessionTokens(3, 64)), 0u);
  UseModel(first);
  EXPECT_EQ(ExpectOwnBytes(SessionTokens(3, 64)), 4u);
  Selection everything;
  everything.all = true;
  EXPECT_EQ(engine_->Delete(TenantId{2}, everything)->blocks, 0u);
  EXPECT_EQ(engine_->Delete(tenant_, everything)->blocks, 40u);
  EXPECT_EQ(engine_->Stats().node_count, 0u);
  EXPECT_EQ(engine_->Stats().live_bytes, 0u);
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  ExpectSound();
}

TEST_F(EngineSpaceTest, DeletingASessionKeepsWhatOthersShare) {
  Open();
  const auto shared = SessionTokens(1, 3 * kTestBlockTokens);
  std::vector<std::vector<TokenId>> sessions(2, shared);
  for (std::uint64_t i = 0; i < 2; ++i) {
    const auto rest = SessionTokens(50 + i, 2 * kTestBlockTokens);
    sessions[i].insert(sessions[i].end(), rest.begin(), rest.end());
    PutAnnouncement put = Announce(sessions[i]);
    const std::string name = absl::StrCat("session ", i);
    put.session_id = name;
    MustPut(put);
  }
  Selection selection;
  selection.session_id = "session 0";
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 2u);
  EXPECT_EQ(Matched(sessions[0]), 3u);
  EXPECT_EQ(ExpectOwnBytes(sessions[1]), 5u);
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 0u);
  selection.session_id = "session 1";
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 5u);
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

TEST_F(EngineSpaceTest, DeletingASessionKeepsASessionThatEndsWithinIt) {
  Open();
  const auto tokens = SessionTokens(1, 5 * kTestBlockTokens);
  for (const std::size_t blocks : {3, 5}) {
    PutAnnouncement put = Announce(std::span(tokens).first(blocks * kTestBlockTokens));
    const std::string name = absl::StrCat("first ", blocks);
    put.session_id = name;
    Put(put);
  }
  Selection selection;
  selection.session_id = "first 5";
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 2u);
  EXPECT_EQ(ExpectOwnBytes(tokens), 3u);
  selection.session_id = "first 3";
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 3u);
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

// No lookup passes a block that has expired, or that has lost its frame; a delete does.
TEST_F(EngineSpaceTest, APrefixIsDeletedWhateverStandsBeforeItsEnd) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  PutAnnouncement brief = Announce(std::span(tokens).first(2 * kTestBlockTokens));
  brief.ttl = seconds(100);
  MustPut(brief);
  Put(Announce(tokens));
  clock_.Advance(seconds(100));
  ASSERT_EQ(Matched(tokens), 0u);
  const auto prefix = [&](std::size_t blocks) {
    return SelectionOf(PathOf(std::span(tokens).first(blocks * kTestBlockTokens)));
  };
  EXPECT_EQ(engine_->Delete(tenant_, prefix(4))->blocks, 1u);
  EXPECT_EQ(engine_->Delete(tenant_, prefix(4))->blocks, 0u);
  EXPECT_EQ(engine_->Delete(tenant_, prefix(1))->blocks, 3u);
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

// A session whose blocks are all there already is a session too.
TEST_F(EngineSpaceTest, ASessionOfStoredBlocksIsKnownByItsName) {
  Open();
  const auto tokens = SessionTokens(1, 4 * kTestBlockTokens);
  MustPut(tokens);
  PutAnnouncement put = Announce(std::span(tokens).first(3 * kTestBlockTokens));
  put.session_id = "late";
  EXPECT_TRUE(Put(put).empty());
  Selection selection;
  selection.session_id = "late";
  EXPECT_EQ(*engine_->Touch(tenant_, selection), 3u);
}

// Names of sessions whose blocks are gone go too, or the metadata would grow for ever.
TEST_F(EngineSpaceTest, SessionRowsGoWithTheirBlocks) {
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 0}};
  Open();
  const auto session_rows = [this] {
    engine_.reset();
    std::size_t count = 0;
    {
      auto meta = OpenRocksDbMetaStore(options_.data_dir + "/meta", {});
      EXPECT_TRUE(meta.ok()) << meta.status();
      EXPECT_TRUE(meta->store
                      ->Scan(MetaTable::kSessions, "", "",
                             [&count](std::string_view, std::string_view) { return ++count > 0; })
                      .ok());
    }
    Open();
    return count;
  };
  for (std::uint64_t seed = 0; seed < 1100; ++seed) {
    const auto tokens = SessionTokens(seed, kTestBlockTokens);
    PutAnnouncement put = Announce(tokens);
    const std::string name = absl::StrCat("session ", seed);
    put.session_id = name;
    if (seed % 10 != 0) put.ttl = seconds(10);
    MustPut(put);
  }
  EXPECT_EQ(session_rows(), 1100u);
  clock_.Advance(seconds(20));
  for (int round = 0; round < 3; ++round) engine_->RunMaintenance();
  EXPECT_EQ(session_rows(), 110u);
  Selection selection;
  selection.session_id = "session 1090";
  EXPECT_EQ(*engine_->Touch(tenant_, selection), 1u);
}

TEST_F(EngineSpaceTest, UnusedForSelectsWhatNobodyAskedForLately) {
  Open();
  const auto old = SessionTokens(1, 4 * kTestBlockTokens);
  const auto fresh = SessionTokens(2, 4 * kTestBlockTokens);
  MustPut(old);
  MustPut(fresh);
  clock_.Advance(seconds(100));
  Matched(std::span(fresh).first(2 * kTestBlockTokens));
  Selection selection;
  selection.all = true;
  selection.unused_for = seconds(50);
  EXPECT_EQ(engine_->Delete(tenant_, selection)->blocks, 6u);
  EXPECT_EQ(Matched(old), 0u);
  EXPECT_EQ(Matched(fresh), 2u);
}

// Public report 44: what goes leaves nothing behind, in memory or on disk.
TEST_F(EngineSpaceTest, WavesOfPromptsLeaveTheIndexAsItWas) {
  spec_.kv_groups.front().layer_runs = {{1, 1, 1, 0}};
  Open();
  std::uint64_t settled = 0;
  std::uint64_t seed = 0;
  for (int wave = 0; wave < 4; ++wave) {
    for (int i = 0; i < 8; ++i) {
      const auto tokens = SessionTokens(++seed, 32 * kTestBlockTokens);
      PutAnnouncement put = Announce(tokens);
      put.ttl = seconds(10);
      MustPut(put);
    }
    // One prompt that branches at every position.
    const auto trunk = SessionTokens(77, 32 * kTestBlockTokens);
    for (std::size_t at = 1; at < 32; ++at) {
      auto branch = trunk;
      branch.resize(at * kTestBlockTokens);
      const auto twig = SessionTokens(++seed, kTestBlockTokens);
      branch.insert(branch.end(), twig.begin(), twig.end());
      PutAnnouncement put = Announce(branch);
      put.ttl = seconds(10);
      MustPut(put);
    }
    clock_.Advance(seconds(11));
    AwaitNoOpenPuts();
    engine_->RunMaintenance();
    const EngineStats stats = engine_->Stats();
    ASSERT_EQ(stats.node_count, 0u);
    ASSERT_EQ(stats.live_bytes, 0u);
    if (wave == 1) settled = stats.index_bytes + stats.token_cache_bytes;
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_LE(stats.index_bytes + stats.token_cache_bytes, settled + settled / 5);
}

TEST_F(EngineSpaceTest, PagesOfChildrenStayWithinTheirParent) {
  Open();
  for (std::uint64_t seed = 0; seed < 10; ++seed) MustPut(SessionTokens(seed, kTestBlockTokens));
  const ModelId first = model_;
  ModelSpec second = spec_;
  second.name = "second";
  UseModel(second);
  MustPut(SessionTokens(1, 2 * kTestBlockTokens));
  std::size_t count = 0;
  TrieNodeId after;
  while (true) {
    const auto page = engine_->ListChildren(tenant_, first, {}, after, 3);
    ASSERT_TRUE(page.ok()) << page.status();
    if (page->empty()) break;
    count += page->size();
    after = page->back().id;
  }
  EXPECT_EQ(count, 10u);
  const auto foreign = engine_->ListChildren(tenant_, model_, {}, {}, 10);
  ASSERT_EQ(foreign->size(), 1u);
  // A token from another model, and one from deeper down.
  EXPECT_TRUE(
      absl::IsNotFound(engine_->ListChildren(tenant_, first, {}, foreign->front().id, 3).status()));
  const auto deeper = engine_->ListChildren(tenant_, model_, foreign->front().id, {}, 10);
  ASSERT_EQ(deeper->size(), 1u);
  EXPECT_TRUE(
      absl::IsNotFound(engine_->ListChildren(tenant_, model_, {}, deeper->front().id, 3).status()));
}

}  // namespace
}  // namespace kvtrie
