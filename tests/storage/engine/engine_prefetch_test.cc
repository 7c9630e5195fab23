// What matched blocks cost to have, and reading ahead.

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/storage/engine/coded_fixture.h"

namespace kvtrie {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Goes on by a millisecond each time it is looked at.
class TickingClock final : public Clock {
 public:
  Duration Monotonic() const override { return milliseconds(++milliseconds_); }
  std::int64_t UnixSeconds() const override { return 1'700'000'000; }

 private:
  mutable std::atomic<std::int64_t> milliseconds_{1000};
};

class EnginePrefetchTest : public CodedFixture {
 protected:
  LookupResult Find(std::span<const TokenId> tokens, milliseconds lease = {},
                    Quality min_quality = Quality::kExact) {
    auto result = engine_->Lookup(tenant_, {.models = {model_},
                                            .path = PathOf(tokens),
                                            .min_quality = min_quality,
                                            .lease = lease,
                                            .want_blocks = true,
                                            .want_runs = true});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : LookupResult{};
  }
  // Leases a path and waits for what is read ahead for it.
  LookupResult Lease(std::span<const TokenId> tokens, Quality min_quality = Quality::kExact) {
    const LookupResult found = Find(tokens, seconds(1), min_quality);
    AwaitReadAhead();
    return found;
  }
  void AwaitReadAhead() {
    while (engine_->Stats().prefetch_pending_bytes > 0) std::this_thread::yield();
  }
  // Reads blocks [first, last) as clients do.
  void Read(std::span<const TokenId> tokens, std::uint32_t first, std::uint32_t last) {
    const auto frames = FramesAt(PathOf(tokens), Quality::kExact);
    for (std::uint32_t block = first; block < last; ++block) {
      ASSERT_TRUE(ReadBlock(*frames[block]).ok());
    }
  }
  std::vector<TokenId> FirstBlocks(std::uint32_t blocks, std::size_t more = 0) const {
    return {tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(
                                                   std::size_t{blocks} * kTestBlockTokens + more)};
  }

  const std::vector<TokenId> tokens_ = SessionTokens(1, 8 * kTestBlockTokens);
};

TEST_F(EnginePrefetchTest, RunsTellWhatIsInMemory) {
  Open();
  MustPut(tokens_);
  LookupResult found = Find(tokens_);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].first_block, 0u);
  EXPECT_EQ(found.runs[0].block_count, 8u);
  EXPECT_EQ(found.runs[0].codec, CodecId::kRaw);
  EXPECT_EQ(found.runs[0].quality, Quality::kExact);
  EXPECT_EQ(found.runs[0].bytes, found.fetch_bytes);
  EXPECT_EQ(found.runs[0].memory_bytes, found.fetch_bytes);
  EXPECT_EQ(found.runs[0].read_seconds, 0);
  Reopen();
  Read(tokens_, 2, 5);
  found = Find(tokens_);
  ASSERT_EQ(found.runs.size(), 3u);
  const std::uint64_t bytes = found.blocks[0][0].stored_bytes;
  const std::uint32_t counts[] = {2, 3, 3};
  std::uint32_t first = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(found.runs[i].first_block, first);
    EXPECT_EQ(found.runs[i].block_count, counts[i]);
    EXPECT_EQ(found.runs[i].bytes, counts[i] * bytes);
    EXPECT_EQ(found.runs[i].memory_bytes, i == 1 ? 3 * bytes : 0);
    first += counts[i];
  }
  EXPECT_TRUE(Lookup(tokens_).runs.empty());  // not wanted
  EXPECT_TRUE(Find(SessionTokens(2, 64)).runs.empty());
}

TEST_F(EnginePrefetchTest, RunsTellCodecAndQuality) {
  OpenWithProfile();
  MustPutFrames(PathOf(FirstBlocks(4)), Residual(Quality::kHigh));
  MustPut(tokens_);
  const LookupResult found = Find(tokens_, {}, Quality::kHigh);
  ASSERT_EQ(found.runs.size(), 2u);
  EXPECT_EQ(found.runs[0].block_count, 4u);
  EXPECT_EQ(found.runs[0].codec, CodecId::kResidual);
  EXPECT_EQ(found.runs[0].quality, Quality::kHigh);
  EXPECT_EQ(found.runs[1].block_count, 4u);
  EXPECT_EQ(found.runs[1].codec, CodecId::kRaw);
  EXPECT_EQ(found.runs[1].quality, Quality::kExact);
  EXPECT_EQ(found.runs[0].bytes + found.runs[1].bytes, found.fetch_bytes);
}

TEST_F(EnginePrefetchTest, RunsOfSeveralModelsAreSums) {
  Open();
  const ModelId first = model_;
  MustPut(tokens_);
  UseModel(TestModelSpec("other rank"));
  MustPut(FirstBlocks(5));
  const auto found = engine_->Lookup(
      tenant_,
      {.models = {first, model_}, .path = PathOf(tokens_), .want_blocks = true, .want_runs = true});
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->runs.size(), 1u);
  EXPECT_EQ(found->runs[0].block_count, 5u);
  EXPECT_EQ(found->runs[0].bytes, found->fetch_bytes);
  EXPECT_EQ(found->runs[0].memory_bytes, found->fetch_bytes);
}

TEST_F(EnginePrefetchTest, SecondsAreThoseOfTheLastReads) {
  TickingClock clock;
  options_.memory_tier_bytes = 0;
  auto engine = Engine::OpenEmbedded(options_, clock, {}, nullptr);
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  UseModel(spec_);
  MustPut(tokens_);
  LookupResult found = Find(tokens_);
  ASSERT_EQ(found.runs.size(), 1u);
  EXPECT_EQ(found.runs[0].read_seconds, 0);  // nothing was read yet
  Read(tokens_, 0, 3);
  found = Find(tokens_);
  EXPECT_NEAR(found.runs[0].read_seconds, 8 * 0.001, 1e-9);
  EXPECT_EQ(found.runs[0].decode_seconds, 0);
  engine_.reset();  // before its clock
}

TEST_F(EnginePrefetchTest, SecondsOfDecodingAreThoseOfTheLastOnes) {
  auto codec = std::make_shared<FakeCodec>();
  codec->fail = [this] {
    clock_.Advance(milliseconds(20));
    return absl::OkStatus();
  };
  codec_ = codec;
  OpenWithProfile();
  MustPutFrames(PathOf(tokens_), Residual(Quality::kHigh));
  EXPECT_EQ(Find(tokens_, {}, Quality::kHigh).runs[0].decode_seconds, 0);
  const auto frames = FramesAt(PathOf(tokens_), Quality::kHigh);
  ASSERT_TRUE(ReadBlock(*frames[0], ReadAs::kRaw).ok());
  const LookupResult found = Find(tokens_, {}, Quality::kHigh);
  EXPECT_NEAR(found.runs[0].decode_seconds, 8 * 0.020, 1e-6);
  EXPECT_EQ(found.runs[0].read_seconds, 0);
}

TEST_F(EnginePrefetchTest, LeasedBlocksAreInMemoryWhenTheyAreFetched) {
  Open();
  MustPut(tokens_);
  Reopen();
  EXPECT_EQ(Lease(FirstBlocks(6)).matched_blocks, 6u);
  EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.prefetched_frames_total, 6u);
  EXPECT_EQ(stats.disk_reads_total, 0u);
  Read(tokens_, 0, 5);
  stats = engine_->Stats();
  EXPECT_EQ(stats.disk_reads_total, 0u);
  EXPECT_EQ(stats.memory_reads_total, 5u);
  EXPECT_EQ(stats.prefetch_useful_frames_total, 5u);
  EXPECT_EQ(stats.prefetch_wasted_frames_total, 0u);
  EXPECT_EQ(stats.prefetch_useful_bytes_total * 6, stats.prefetched_bytes_total * 5);
  // The sixth was not asked for, and leaves with its block.
  ASSERT_TRUE(engine_->Delete(tenant_, SelectionOf(PathOf(FirstBlocks(6)))).ok());
  EXPECT_EQ(engine_->Stats().prefetch_wasted_frames_total, 1u);
  EXPECT_EQ(ExpectOwnBytes(tokens_), 5u);
  ExpectSound();
}

TEST_F(EnginePrefetchTest, DamageThatIsFoundAheadIsDroppedAndNeverServed) {
  Open();
  MustPut(tokens_);
  const PayloadLocation at = FramesAt(PathOf(tokens_), Quality::kExact)[5]->at;
  Reopen();
  DamageRecord(at);
  EXPECT_EQ(Lease(tokens_).matched_blocks, 8u);
  EXPECT_EQ(engine_->Stats().corrupt_frames_total, 1u);
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 7u);
  EXPECT_EQ(ExpectOwnBytes(tokens_), 5u);
  ExpectSound();
}

TEST_F(EnginePrefetchTest, WithoutALeaseNothingIsReadAhead) {
  Open();
  MustPut(tokens_);
  Reopen();
  Find(tokens_);
  Lookup(tokens_);
  EXPECT_EQ(engine_->Stats().prefetch_pending_bytes, 0u);
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 0u);
}

TEST_F(EnginePrefetchTest, WithoutBytesForItNothingIsReadAhead) {
  options_.prefetch_bytes = 0;
  Open();
  MustPut(tokens_);
  Reopen();
  Find(tokens_, seconds(1));
  EXPECT_EQ(engine_->Stats().prefetch_pending_bytes, 0u);
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 0u);
  options_.prefetch_bytes = 64 << 20;
  options_.memory_tier_bytes = 0;
  Reopen();
  Find(tokens_, seconds(1));
  EXPECT_EQ(engine_->Stats().prefetch_pending_bytes, 0u);
}

TEST_F(EnginePrefetchTest, BlocksThatLikelyFollowAreReadAheadToo) {
  Open();
  MustPut(tokens_);
  Reopen();
  // Traffic went on here nine times of ten.
  for (int i = 0; i < 60; ++i) Find(tokens_);
  Lease(FirstBlocks(3));
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 8u);
  Read(tokens_, 0, 8);
  EXPECT_EQ(engine_->Stats().prefetch_useful_frames_total, 8u);
}

TEST_F(EnginePrefetchTest, WhatTheRequestGoesOnWithOtherwiseIsNot) {
  Open();
  MustPut(tokens_);
  Reopen();
  for (int i = 0; i < 60; ++i) Find(tokens_);
  // Not enough for a block, but another one than is stored.
  std::vector<TokenId> fork = FirstBlocks(3, 5);
  fork.back() ^= 1;
  Lease(fork);
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 3u);
  // A block that is not stored.
  fork = FirstBlocks(4, kTestBlockTokens);
  fork.back() ^= 1;
  Lease(fork);
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 4u);
  // The tokens that are stored.
  Lease(FirstBlocks(4, 5));
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 8u);
}

TEST_F(EnginePrefetchTest, UnlikelyBlocksAreNotReadAhead) {
  options_.prefetch_percent_min = 100;
  Open();
  MustPut(tokens_);
  Reopen();
  for (int i = 0; i < 60; ++i) Find(tokens_);
  Lease(FirstBlocks(3));
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 3u);
  options_.prefetch_percent_min = 50;
  Reopen();
  for (int i = 0; i < 60; ++i) Find(FirstBlocks(3));  // and no further
  Lease(FirstBlocks(3));
  EXPECT_EQ(engine_->Stats().prefetched_frames_total, 3u);
}

TEST_F(EnginePrefetchTest, AFloodOfLeasesStaysWithinItsBytes) {
  options_.prefetch_bytes = 40'000;  // 3 to 4 blocks
  Open();
  std::vector<std::vector<TokenId>> sessions;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    sessions.push_back(SessionTokens(seed, 8 * kTestBlockTokens));
    MustPut(sessions.back());
  }
  Reopen();
  std::vector<std::thread> threads;
  for (std::size_t id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      for (std::size_t i = id; i < sessions.size(); i += 3) {
        Find(sessions[i], seconds(1));
        const EngineStats stats = engine_->Stats();
        EXPECT_LE(stats.prefetch_pending_bytes, options_.prefetch_bytes);
        EXPECT_LE(stats.prefetch_unasked_bytes, options_.prefetch_bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitReadAhead();
  for (const auto& session : sessions) EXPECT_EQ(ExpectOwnBytes(session), 8u);
  const EngineStats stats = engine_->Stats();
  EXPECT_GE(stats.prefetched_frames_total, 3u);
  EXPECT_EQ(stats.prefetched_frames_total,
            stats.prefetch_useful_frames_total + stats.prefetch_wasted_frames_total);
}

}  // namespace
}  // namespace kvtrie
