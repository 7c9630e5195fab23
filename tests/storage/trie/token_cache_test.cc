#include "storage/trie/token_cache.h"

#include <map>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::vector<TokenId> TokensOf(NodeRef owner, std::size_t count) {
  std::vector<TokenId> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = owner * 1000 + static_cast<TokenId>(i);
  return tokens;
}

// The cache with what its owners believe, as the index keeps it.
class TokenCacheTest : public testing::Test {
 protected:
  void Insert(NodeRef owner, std::size_t block_tokens) {
    const auto tokens = TokensOf(owner, block_tokens);
    const TokenCache::Slot slot = cache_.Insert(tokens, owner, [this](NodeRef evicted) {
      EXPECT_EQ(slots_.erase(evicted), 1u) << evicted;
    });
    EXPECT_NE(slot, 0u);
    slots_[owner] = {block_tokens, slot};
  }
  void Erase(NodeRef owner) {
    cache_.Erase(slots_.at(owner).first, slots_.at(owner).second);
    slots_.erase(owner);
  }
  void ExpectOwnTokens() const {
    for (const auto& [owner, place] : slots_) {
      const auto found = cache_.Get(place.first, place.second);
      ASSERT_THAT(found, testing::ElementsAreArray(TokensOf(owner, place.first)));
    }
  }

  TokenCache cache_{kMiB};
  std::map<NodeRef, std::pair<std::size_t, TokenCache::Slot>> slots_;
};

TEST_F(TokenCacheTest, GivesBackWhatWasPut) {
  for (NodeRef owner = 1; owner <= 100; ++owner) Insert(owner, 16);
  EXPECT_EQ(slots_.size(), 100u);
  ExpectOwnTokens();
}

TEST_F(TokenCacheTest, StaysWithinItsLimitAndTellsWhoLostTheirPlace) {
  for (NodeRef owner = 1; owner <= 50'000; ++owner) {
    Insert(owner, 16);
    ASSERT_LE(cache_.memory_bytes(), kMiB);
  }
  EXPECT_GT(slots_.size(), 10'000u);
  EXPECT_LT(slots_.size(), kMiB / (16 * sizeof(TokenId)));
  ExpectOwnTokens();
}

TEST_F(TokenCacheTest, WhatIsUsedOutlivesWhatIsNot) {
  NodeRef next = 1;
  while (next <= 20'000) Insert(next++, 16);  // full
  ASSERT_LT(slots_.size(), 20'000u);
  const NodeRef used = slots_.rbegin()->first;
  for (int i = 0; i < 40'000; ++i) {
    cache_.Get(16, slots_.at(used).second);
    Insert(next++, 16);
    ASSERT_TRUE(slots_.contains(used));
  }
}

TEST_F(TokenCacheTest, BlockSizesDoNotMix) {
  for (NodeRef owner = 1; owner <= 300; ++owner) {
    static constexpr std::size_t kSizes[] = {1, 16, 400, 544, 640, 1024};
    Insert(owner, kSizes[owner % std::size(kSizes)]);
  }
  ExpectOwnTokens();
}

TEST_F(TokenCacheTest, ErasedPlacesAreUsedAgain) {
  for (NodeRef owner = 1; owner <= 3000; ++owner) Insert(owner, 16);
  const std::size_t before = cache_.memory_bytes();
  NodeRef next = 3001;
  for (int round = 0; round < 20; ++round) {
    while (!slots_.empty()) Erase(slots_.begin()->first);
    for (int i = 0; i < 3000; ++i) Insert(next++, 16);
  }
  EXPECT_EQ(cache_.memory_bytes(), before);
  EXPECT_EQ(slots_.size(), 3000u);
  ExpectOwnTokens();
}

TEST_F(TokenCacheTest, AgreesWithAMapOverRandomOperations) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  NodeRef next = 1;
  for (int step = 0; step < 60'000; ++step) {
    if (slots_.empty() || random() % 4 != 0) {
      Insert(next++, random() % 2 == 0 ? 16 : 64);
    } else {
      auto at = slots_.lower_bound(static_cast<NodeRef>(random() % next));
      if (at == slots_.end()) at = slots_.begin();
      Erase(at->first);
    }
    if (step % 10'000 == 0) ExpectOwnTokens();
  }
  ExpectOwnTokens();
}

}  // namespace
}  // namespace kvtrie
