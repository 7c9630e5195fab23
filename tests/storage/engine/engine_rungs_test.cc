// Nodes with frames on two rungs: how they come, what they are worth, how they go and how they
// survive.

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;

class EngineRungsTest : public CodedFixture {
 protected:
  const std::vector<TokenId> tokens_ = SessionTokens(1, 4 * kTestBlockTokens);
  PathView Path() const { return PathOf(tokens_); }

  PutAnnouncement Announce(const PathView& path, Quality quality) const {
    PutAnnouncement put;
    put.path = path;
    put.quality = quality;
    return put;
  }
  std::vector<std::uint32_t> Missing(const PutAnnouncement& put) {
    const auto session = engine_->BeginPut(tenant_, put);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? (*session)->missing_blocks() : std::vector<std::uint32_t>();
  }
  // What a node of the path holds, smallest first.
  std::vector<Quality> Held(const PathView& path, std::uint32_t block) {
    std::vector<Quality> qualities;
    const auto described = engine_->DescribePath(tenant_, SelectionOf(path));
    if (!described.ok() || described->size() <= block) return qualities;
    for (const StoredFrame& frame : (*described)[block].frames) qualities.push_back(frame.quality);
    return qualities;
  }
};

// --- how they come

TEST_F(EngineRungsTest, MissingIsWhatIsStoredAtLess) {
  OpenWithProfile();
  MustPutFrames(PathOf(std::span(tokens_).first(2 * kTestBlockTokens)), Residual(Quality::kHigh));
  MustPutFrames(PathOf(std::span(tokens_).first(3 * kTestBlockTokens)), Residual(Quality::kSmall));
  // Blocks: high, high, small, none.
  EXPECT_THAT(Missing(Announce(Path(), Quality::kUnrated)), ElementsAre(3));
  EXPECT_THAT(Missing(Announce(Path(), Quality::kSmall)), ElementsAre(3));
  EXPECT_THAT(Missing(Announce(Path(), Quality::kHigh)), ElementsAre(2, 3));
  EXPECT_THAT(Missing(Announce(Path(), Quality::kNearExact)), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Missing(Announce(Path(), Quality::kExact)), ElementsAre(0, 1, 2, 3));
  // What stands before the first block that is offered is there, good or not.
  PutAnnouncement put = Announce(Path(), Quality::kExact);
  put.first_block = 3;
  EXPECT_THAT(Missing(put), ElementsAre(3));
  EXPECT_TRUE(Put(put).front().ok());
  EXPECT_THAT(Held(Path(), 3), ElementsAre(Quality::kExact));
  ExpectSound();
}

TEST_F(EngineRungsTest, BetterFramesTakeThePlaceOfWorseOnesOfTheirRung) {
  OpenWithProfile();
  MustPutFrames(Path(), Rotated());
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kUnrated));
  MustPutFrames(Path(), Residual(Quality::kSmall));
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kSmall));
  MustPutFrames(Path(), Residual(Quality::kNearExact));
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kNearExact));
  MustPut(Path());
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kNearExact, Quality::kExact));
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.node_count, 4u);
  EXPECT_EQ(stats.codecs[3].frames, 0u);
  EXPECT_EQ(stats.codecs[2].frames, 4u);
  EXPECT_EQ(stats.codecs[0].frames, 4u);
  // What made way gives its space back.
  EXPECT_GT(stats.pending_free_bytes, 0u);
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  ExpectSound();
  Reopen();
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kNearExact, Quality::kExact));
  EXPECT_EQ(engine_->recovery().unreferenced_bytes, 0u);
  ExpectSound();
}

TEST_F(EngineRungsTest, SmallFramesCanBePutBesideExactOnesOnlyWhenAsked) {
  OpenWithProfile();
  MustPut(Path());
  EXPECT_TRUE(Missing(Announce(Path(), Quality::kHigh)).empty());
  PutAnnouncement beside = Announce(Path(), Quality::kHigh);
  beside.beside_exact = true;
  EXPECT_THAT(Missing(beside), ElementsAre(0, 1, 2, 3));
  for (const auto& result : PutFrames(beside, Residual(Quality::kHigh))) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->outcome, PutOutcome::kStored);
  }
  EXPECT_TRUE(Missing(beside).empty());
  EXPECT_THAT(Held(Path(), 3), ElementsAre(Quality::kHigh, Quality::kExact));
  beside.quality = Quality::kExact;
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->BeginPut(tenant_, beside).status()));
  ExpectSound();
}

// Two writers of the same blocks at once, of either rung and in either order.
TEST_F(EngineRungsTest, WritersOfBothRungsMayMeet) {
  OpenWithProfile();
  for (int round = 0; round < 20; ++round) {
    const auto tokens =
        SessionTokens(100 + static_cast<std::uint64_t>(round), 3 * kTestBlockTokens);
    const PathView path = PathOf(tokens);
    auto coded = engine_->BeginPut(tenant_, Announce(path, Quality::kHigh)).value();
    auto exact = engine_->BeginPut(tenant_, Announce(path, Quality::kExact)).value();
    absl::Mutex mutex;
    int open = 6;
    std::vector<absl::Status> bad;
    const auto on_done = [&](absl::StatusOr<PutBlockResult> result) {
      absl::MutexLock lock(&mutex);
      if (!result.ok()) bad.push_back(result.status());
      --open;
    };
    std::vector<PutSession::FinishedBlock> coded_blocks;
    std::vector<PutSession::FinishedBlock> exact_blocks;
    for (std::uint32_t block = 0; block < 3; ++block) {
      const auto frame = MakeFrame(path, block, Residual(Quality::kHigh));
      auto writer = coded->StartFrame(block, FrameView::Parse(frame).value());
      ASSERT_TRUE(writer.ok()) << writer.status();
      const std::span<const std::byte> piece = frame;
      ASSERT_TRUE((*writer)->AppendChunk({&piece, 1}, Crc32c(frame)).ok());
      coded_blocks.push_back({*std::move(writer), on_done});
      exact_blocks.push_back({*FilledBlock(*exact, path, block), on_done});
    }
    coded->FinishBlocks(std::move(coded_blocks));
    exact->FinishBlocks(std::move(exact_blocks));
    {
      absl::MutexLock lock(&mutex);
      const auto none_open = [&open] { return open == 0; };
      mutex.Await(absl::Condition(&none_open));
    }
    EXPECT_THAT(bad, testing::IsEmpty());
    // The coded one is there unless the exact one was first.
    for (std::uint32_t block = 0; block < 3; ++block) {
      EXPECT_EQ(Held(path, block).back(), Quality::kExact);
    }
    EXPECT_EQ(ExpectOwnBytes(path), 3u);
  }
  ExpectSound();
}

TEST_F(EngineRungsTest, FramesOfLessThanAnnouncedFailAlone) {
  OpenWithProfile();
  const auto results = PutFrames(Announce(Path(), Quality::kHigh), Residual(Quality::kSmall));
  ASSERT_EQ(results.size(), 4u);
  for (const auto& result : results) EXPECT_TRUE(absl::IsInvalidArgument(result.status()));
  EXPECT_EQ(engine_->Stats().node_count, 0u);
}

TEST_F(EngineRungsTest, ExpiredNodesMakeWayWithAllTheirFrames) {
  OpenWithProfile();
  PutAnnouncement put = Announce(Path(), Quality::kHigh);
  put.ttl = seconds(10);
  PutFrames(put, Residual(Quality::kHigh));
  MustPut(Path());
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kHigh, Quality::kExact));
  clock_.Advance(seconds(11));
  EXPECT_EQ(LookupAt(Path(), Quality::kUnrated).matched_blocks, 0u);
  MustPutFrames(Path(), Residual(Quality::kSmall));
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kSmall));
  EXPECT_EQ(LookupAt(Path(), Quality::kSmall).matched_blocks, 4u);
  EXPECT_EQ(engine_->Stats().codecs[0].frames, 0u);
  ExpectSound();
  Reopen();
  ExpectSound();
}

// --- what they are worth

// Every level at which a prefix can be restored, and every level that can be asked for.
TEST_F(EngineRungsTest, KvOnALossyPrefixIsWorthNoMoreThanThatPrefix) {
  OpenWithProfile();
  std::uint64_t seed = 50;
  for (const Quality restored :
       {Quality::kUnrated, Quality::kSmall, Quality::kHigh, Quality::kNearExact}) {
    const auto tokens = SessionTokens(seed++, 6 * kTestBlockTokens);
    const PathView prefix = PathOf(std::span(tokens).first(2 * kTestBlockTokens));
    const FrameKind kind = restored == Quality::kUnrated ? Rotated() : Residual(restored);
    MustPutFrames(prefix, kind);
    // Raw KV, computed bit for bit on top of it.
    PutAnnouncement put = Announce(PathOf(tokens), Quality::kExact);
    put.restored_blocks = 2;
    put.restored_quality = restored;
    std::vector<std::uint32_t> missing = Missing(put);
    EXPECT_THAT(missing, ElementsAre(2, 3, 4, 5));  // what was restored is not offered
    for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
    for (const bool reopened : {false, true}) {
      if (reopened) Reopen();
      for (const Quality wanted : kAllQualities) {
        const LookupResult found = LookupAt(PathOf(tokens), wanted);
        EXPECT_EQ(found.matched_blocks, IsAtLeast(restored, wanted) ? 6u : 0u)
            << static_cast<int>(restored) << " " << static_cast<int>(wanted);
        EXPECT_TRUE(found.matched_blocks == 0 || found.quality == restored);
        // By their names, too.
        const auto all = NodesOf(LookupAt(PathOf(tokens), Quality::kUnrated));
        ASSERT_EQ(all.size(), 6u);
        const auto frames = engine_->FindFrames(tenant_, model_, all, wanted);
        for (const auto& frame : *frames) EXPECT_EQ(frame.has_value(), IsAtLeast(restored, wanted));
      }
    }
    EXPECT_EQ(Missing(put), std::vector<std::uint32_t>());  // stored as well as can be
    // The exact path of the same tokens is another one.
    EXPECT_THAT(Missing(Announce(PathOf(tokens), Quality::kExact)), ElementsAre(0, 1, 2, 3, 4, 5));
    MustPut(PathOf(tokens));
    EXPECT_EQ(ExpectOwnBytes(PathOf(tokens)), 6u);
    ExpectSound();
  }
}

TEST_F(EngineRungsTest, EachRestoreLowersTheLevel) {
  OpenWithProfile();
  const auto tokens = SessionTokens(60, 6 * kTestBlockTokens);
  const auto first = [&](std::size_t blocks) {
    return PathOf(std::span(tokens).first(blocks * kTestBlockTokens));
  };
  MustPutFrames(first(2), Residual(Quality::kNearExact));
  PutAnnouncement put = Announce(first(4), Quality::kExact);
  put.restored_blocks = 2;
  put.restored_quality = Quality::kNearExact;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  // A later turn restored all four at a lower level.
  put = Announce(first(6), Quality::kExact);
  put.restored_blocks = 4;
  put.restored_quality = Quality::kSmall;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(LookupAt(first(6), Quality::kNearExact).matched_blocks, 4u);
  EXPECT_EQ(LookupAt(first(6), Quality::kHigh).matched_blocks, 4u);
  const LookupResult all = LookupAt(first(6), Quality::kSmall);
  EXPECT_EQ(all.matched_blocks, 6u);
  EXPECT_EQ(all.quality, Quality::kSmall);
  // A prefix that was never stored so well cannot have been restored so well.
  put = Announce(PathOf(tokens), Quality::kExact);
  put.restored_blocks = 6;
  put.restored_quality = Quality::kHigh;
  EXPECT_TRUE(absl::IsFailedPrecondition(engine_->BeginPut(tenant_, put).status()));
  ExpectSound();
}

TEST_F(EngineRungsTest, ABetterRestoreOfTheSameTokensReplacesAWorseOne) {
  OpenWithProfile();
  const auto tokens = SessionTokens(61, 3 * kTestBlockTokens);
  MustPutFrames(PathOf(std::span(tokens).first(kTestBlockTokens)), Residual(Quality::kNearExact));
  const auto restored_at = [&](Quality quality) {
    PutAnnouncement put = Announce(PathOf(tokens), Quality::kExact);
    put.restored_blocks = 1;
    put.restored_quality = quality;
    return put;
  };
  ASSERT_TRUE(Put(restored_at(Quality::kSmall)).back().ok());
  EXPECT_EQ(LookupAt(PathOf(tokens), Quality::kHigh).matched_blocks, 1u);
  EXPECT_THAT(Missing(restored_at(Quality::kSmall)), testing::IsEmpty());
  EXPECT_THAT(Missing(restored_at(Quality::kHigh)), ElementsAre(1, 2));
  ASSERT_TRUE(Put(restored_at(Quality::kHigh)).back().ok());
  EXPECT_EQ(LookupAt(PathOf(tokens), Quality::kHigh).matched_blocks, 3u);
  EXPECT_EQ(engine_->Stats().node_count, 3u);
  ExpectSound();
}

TEST_F(EngineRungsTest, ExactKvOnExactAncestorsStaysExactWhateverBecomesOfThem) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  MustPut(Path());
  const auto longer = SessionTokens(1, 6 * kTestBlockTokens);
  MustPut(longer);
  const PathView prefix = PathOf(std::span(tokens_).first(2 * kTestBlockTokens));
  ASSERT_TRUE(
      engine_->SetRetention(tenant_, SelectionOf(prefix), {.quality = Quality::kHigh}).ok());
  EXPECT_EQ(LookupAt(PathOf(longer), Quality::kExact).matched_blocks, 0u);
  EXPECT_EQ(LookupAt(PathOf(longer), Quality::kHigh).matched_blocks, 6u);
  MustPut(prefix);
  EXPECT_EQ(ExpectOwnBytes(longer), 6u);
  ExpectSound();
}

// --- how they go

TEST_F(EngineRungsTest, RetentionKeepsAtMostALevel) {
  OpenWithProfile();
  MustPutFrames(PathOf(std::span(tokens_).first(2 * kTestBlockTokens)), Residual(Quality::kHigh));
  MustPutFrames(PathOf(std::span(tokens_).first(3 * kTestBlockTokens)), Residual(Quality::kSmall));
  MustPut(Path());
  // Blocks: high and exact twice, small and exact, exact.
  const auto set = [&](std::optional<Quality> level) {
    const auto change =
        engine_->SetRetention(tenant_, SelectionOf(Path()), {.priority = 3, .quality = level});
    EXPECT_TRUE(change.ok()) << change.status();
    return *change;
  };
  EXPECT_EQ(set(std::nullopt).dropped_frames, 0u);
  RetentionChange change = set(Quality::kExact);
  EXPECT_EQ(change.changed_blocks, 4u);
  EXPECT_EQ(change.unchanged_blocks, 0u);
  EXPECT_EQ(change.dropped_frames, 0u);
  change = set(Quality::kNearExact);
  EXPECT_EQ(change.unchanged_blocks, 4u);
  EXPECT_EQ(change.dropped_frames, 0u);
  change = set(Quality::kHigh);
  EXPECT_EQ(change.changed_blocks, 2u);
  EXPECT_EQ(change.unchanged_blocks, 2u);
  EXPECT_EQ(change.dropped_frames, 2u);
  EXPECT_GT(change.freed_bytes, 2 * raw_block_bytes_);
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kHigh));
  EXPECT_THAT(Held(Path(), 2), ElementsAre(Quality::kSmall, Quality::kExact));
  EXPECT_THAT(Held(Path(), 3), ElementsAre(Quality::kExact));
  change = set(Quality::kSmall);
  EXPECT_EQ(change.dropped_frames, 1u);
  EXPECT_EQ(change.unchanged_blocks, 3u);  // the two that are high, and the one that is exact
  ExpectSound();
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  Reopen();
  EXPECT_EQ(engine_->recovery().unreferenced_bytes, 0u);
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kHigh));
  EXPECT_THAT(Held(Path(), 2), ElementsAre(Quality::kSmall));
  EXPECT_EQ(engine_->DescribePath(tenant_, SelectionOf(Path()))->back().priority, 3u);
  ExpectSound();
}

TEST_F(EngineRungsTest, DeletingTakesAllFrames) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  MustPut(Path());
  const auto deleted = engine_->Delete(tenant_, SelectionOf(Path()));
  ASSERT_TRUE(deleted.ok());
  EXPECT_GT(deleted->bytes, 0u);
  ASSERT_TRUE(
      engine_->Delete(tenant_, SelectionOf(PathOf(std::span(tokens_).first(kTestBlockTokens))))
          .ok());
  engine_->RunMaintenance();
  EXPECT_EQ(engine_->Stats().live_bytes, 0u);
  EXPECT_EQ(engine_->Stats().pending_free_bytes, 0u);
  ExpectSound();
  Reopen();
  EXPECT_EQ(engine_->recovery().unreferenced_bytes, 0u);
}

TEST_F(EngineRungsTest, EvictionDropsExactFramesBeforeItDropsBlocks) {
  options_.disk_limit_bytes = std::uint64_t{64} << 20;
  options_.segment_bytes = std::uint64_t{1} << 20;
  // Blocks of 512 KiB raw.
  spec_.kv_groups.front().layer_runs.front() = {
      .layer_count = 8, .kv_heads = 16, .k_head_dim = 128, .v_head_dim = 128};
  OpenWithProfile();
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t session = 0; session < 16; ++session) {
    sessions.push_back(SessionTokens(200 + session, 4 * kTestBlockTokens));
    MustPutFrames(PathOf(sessions.back()), Residual(Quality::kHigh));
    MustPut(sessions.back());
    engine_->RunMaintenance();
  }
  EXPECT_GT(engine_->Stats().codecs[0].frames, 0u);
  const auto held = Lookup(PathOf(sessions.back()), std::chrono::seconds(30));
  ASSERT_EQ(held.matched_blocks, 4u);
  for (std::uint64_t session = 16; session < 48; ++session) {
    sessions.push_back(SessionTokens(200 + session, 4 * kTestBlockTokens));
    MustPutFrames(PathOf(sessions.back()), Residual(Quality::kHigh));
    MustPut(sessions.back());
    engine_->RunMaintenance();
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.evicted_blocks_total, 0u);
  EXPECT_GT(stats.evicted_frames_total, 48u);
  EXPECT_LE(stats.disk_bytes, options_.disk_limit_bytes);
  for (const auto& session : sessions) {
    EXPECT_EQ(LookupAt(PathOf(session), Quality::kHigh).matched_blocks, 4u);
  }
  // What a lease holds, it holds at the level at which it was found.
  EXPECT_EQ(ExpectOwnBytes(sessions[15]), 4u);
  ExpectSound();
}

// --- how they survive

TEST_F(EngineRungsTest, MetadataIsRebuiltWithBothRungs) {
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  MustPut(Path());
  const auto lossy = SessionTokens(70, 3 * kTestBlockTokens);
  MustPutFrames(PathOf(std::span(lossy).first(kTestBlockTokens)), Residual(Quality::kSmall));
  PutAnnouncement put = Announce(PathOf(lossy), Quality::kExact);
  put.restored_blocks = 1;
  put.restored_quality = Quality::kSmall;
  for (const auto& result : Put(put)) ASSERT_TRUE(result.ok()) << result.status();
  engine_.reset();
  std::filesystem::remove_all(options_.data_dir + "/meta");
  Open();
  EXPECT_TRUE(engine_->recovery().rebuilt_from_segments);
  EXPECT_EQ(engine_->Stats().node_count, 7u);
  EXPECT_THAT(Held(Path(), 3), ElementsAre(Quality::kHigh, Quality::kExact));
  EXPECT_EQ(ExpectOwnBytes(tokens_), 4u);
  EXPECT_EQ(*RawBytes(*FramesAt(Path(), Quality::kHigh)[2]),
            DecodedBytes(Path(), 2, Residual(Quality::kHigh)));
  EXPECT_EQ(LookupAt(PathOf(lossy), Quality::kSmall).matched_blocks, 3u);
  EXPECT_EQ(LookupAt(PathOf(lossy), Quality::kHigh).matched_blocks, 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(engine_->DeleteProfile(profile_)));
  ExpectSound();
}

TEST_F(EngineRungsTest, WhereOneRecordIsLostTheOtherStillServes) {
  options_.segment_bytes = std::uint64_t{1} << 20;
  OpenWithProfile();
  MustPutFrames(Path(), Residual(Quality::kHigh));
  // Exact frames into a segment of their own: the first one is filled up before.
  while (engine_->Stats().segment_count < 2) {
    static std::uint64_t seed = 1000;
    MustPut(SessionTokens(++seed, 8 * kTestBlockTokens));
  }
  MustPut(Path());
  const auto exact = FramesAt(Path(), Quality::kExact);
  ASSERT_NE(exact[0]->at.segment, FramesAt(Path(), Quality::kHigh)[0]->at.segment);
  engine_.reset();
  char name[32];
  std::snprintf(name, sizeof name, "/payload/seg-%08u", exact[0]->at.segment);
  std::filesystem::remove(options_.data_dir + name);
  Open();
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kHigh));
  EXPECT_EQ(LookupAt(Path(), Quality::kHigh).matched_blocks, 4u);
  EXPECT_EQ(Matched(tokens_), 0u);
  ExpectSound();
  Reopen();
  EXPECT_THAT(Held(Path(), 0), ElementsAre(Quality::kHigh));
  MustPut(Path());
  EXPECT_EQ(ExpectOwnBytes(tokens_), 4u);
  ExpectSound();
}

}  // namespace
}  // namespace kvtrie
