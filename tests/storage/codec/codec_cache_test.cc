#include "storage/codec/codec_cache.h"

#include <atomic>
#include <thread>

#include "gtest/gtest.h"
#include "tests/storage/codec/plain_profile_bytes.h"

namespace kvtrie {
namespace {

class CodecCacheTest : public testing::Test {
 protected:
  // Profiles that differ in their steps.
  CodecCacheTest() {
    for (int i = 0; i < 3; ++i) {
      ResidualProfile profile = PlainProfile(spec_);
      profile.levels[0].step = 0.25f + static_cast<float>(i);
      bytes_.push_back(ProfileBytes(profile));
      ids_.push_back(ProfileIdOf(bytes_.back()));
    }
  }

  absl::StatusOr<std::shared_ptr<const FrameCodec>> Get(CodecCache& cache, std::size_t which) {
    return cache.Get(spec_, spec_.Digest(), ids_[which], [&] {
      ++loads_;
      return absl::StatusOr<CodecCache::ProfileBytes>(
          CodecCache::ProfileBytes{nullptr, bytes_[which]});
    });
  }

  const ModelSpec spec_ = SyntheticSpec();
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<ProfileId> ids_;
  std::atomic<int> loads_{0};
};

TEST_F(CodecCacheTest, EachIsMadeOnce) {
  CodecCache cache(1 << 30);
  std::vector<std::shared_ptr<const FrameCodec>> got(4);
  std::vector<std::thread> threads;
  for (auto& to : got) threads.emplace_back([&] { to = *Get(cache, 0); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(loads_, 1);
  for (const auto& codec : got) EXPECT_EQ(codec, got[0]);
  EXPECT_EQ(got[0]->residual()->id(), ids_[0]);
  const CodecCacheStats stats = cache.Stats();
  EXPECT_EQ(stats.builds_total, 1u);
  EXPECT_EQ(stats.hits_total, 3u);
  EXPECT_EQ(stats.codecs, 1u);
  EXPECT_EQ(stats.bytes, 2 * bytes_[0].size());
}

TEST_F(CodecCacheTest, TheOneThatWasNotUsedForLongestGoes) {
  CodecCache cache(5 * bytes_[0].size());
  ASSERT_TRUE(Get(cache, 0).ok());
  ASSERT_TRUE(Get(cache, 1).ok());
  ASSERT_TRUE(Get(cache, 0).ok());
  ASSERT_TRUE(Get(cache, 2).ok());
  EXPECT_EQ(loads_, 3);
  EXPECT_EQ(cache.Stats().codecs, 2u);
  ASSERT_TRUE(Get(cache, 0).ok());
  EXPECT_EQ(loads_, 3);
  ASSERT_TRUE(Get(cache, 1).ok());
  EXPECT_EQ(loads_, 4);
}

TEST_F(CodecCacheTest, OneThatIsLargerThanTheBoundIsKeptAlone) {
  CodecCache cache(10);
  ASSERT_TRUE(Get(cache, 0).ok());
  ASSERT_TRUE(Get(cache, 0).ok());
  EXPECT_EQ(loads_, 1);
  ASSERT_TRUE(Get(cache, 1).ok());
  EXPECT_EQ(cache.Stats().codecs, 1u);
  EXPECT_EQ(cache.Stats().bytes, 2 * bytes_[1].size());
}

TEST_F(CodecCacheTest, WhatCannotBeLoadedIsAskedForAgainAndWhatCannotBeUsedIsNot) {
  CodecCache cache(1 << 30);
  const auto missing =
      cache.Get(spec_, spec_.Digest(), ids_[0], [] { return absl::NotFoundError("not stored"); });
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_TRUE(Get(cache, 0).ok());
  bytes_[1].back() ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(Get(cache, 1).status()));
  EXPECT_TRUE(absl::IsDataLoss(Get(cache, 1).status()));
  EXPECT_EQ(loads_, 2);
  EXPECT_EQ(cache.Stats().codecs, 1u);
  EXPECT_EQ(cache.Stats().failures_total, 3u);
}

TEST_F(CodecCacheTest, ModelsHaveCodecsOfTheirOwnAndForgettingDropsThemAll) {
  CodecCache cache(1 << 30);
  const ModelSpec other = WithBlocks(spec_, 32);
  const auto load = [&]() -> absl::StatusOr<CodecCache::ProfileBytes> {
    return CodecCache::ProfileBytes{nullptr, bytes_[0]};
  };
  const auto first = Get(cache, 0);
  const auto second = cache.Get(other, other.Digest(), ids_[0], load);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(*first, *second);
  cache.Forget(ids_[0]);
  EXPECT_EQ(cache.Stats().codecs, 0u);
  EXPECT_EQ(cache.Stats().bytes, 0u);
  ASSERT_TRUE(Get(cache, 0).ok());
  EXPECT_EQ(loads_, 2);
}

TEST_F(CodecCacheTest, WithoutAProfileNothingIsLoaded) {
  CodecCache cache(1 << 30);
  const auto codec =
      cache.Get(spec_, spec_.Digest(), ProfileId{}, [] { return absl::InternalError("loaded"); });
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_EQ((*codec)->residual(), nullptr);
}

}  // namespace
}  // namespace kvtrie
