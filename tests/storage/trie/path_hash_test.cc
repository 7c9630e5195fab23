#include "storage/trie/path_hash.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

constexpr std::uint64_t kSeed = 0x0123456789abcdefu;

ModelId ModelOf(std::uint8_t number) {
  ModelId model;
  model.bytes.fill(number);
  return model;
}

std::vector<TokenId> Tokens(std::size_t count, TokenId first = 0) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST(PathHasherTest, EverythingThatMakesAPathEntersItsHash) {
  const PathHasher hasher(kSeed);
  const auto tokens = Tokens(16);
  std::set<std::uint64_t> roots;
  for (const std::uint32_t tenant : {1u, 2u}) {
    for (const std::uint8_t model : {std::uint8_t{1}, std::uint8_t{2}}) {
      for (const std::string_view salt : {"", "a", "b", "ab"}) {
        roots.insert(hasher.Root(TenantId{tenant}, ModelOf(model), salt));
      }
    }
  }
  EXPECT_EQ(roots.size(), 16u);
  std::set<std::uint64_t> blocks;
  for (const std::uint64_t root : roots) {
    for (const Provenance provenance : {Provenance::kExact, Provenance::kOnLossy}) {
      for (const std::string_view extra : {"", "x", "y"}) {
        blocks.insert(hasher.Extend(root, provenance, extra, tokens));
      }
    }
  }
  EXPECT_EQ(blocks.size(), 16u * 2 * 3);
  EXPECT_NE(PathHasher(kSeed + 1).Root(TenantId{1}, ModelOf(1), ""),
            hasher.Root(TenantId{1}, ModelOf(1), ""));
}

// Stored in rows: a store that is opened again must find its blocks.
TEST(PathHasherTest, IsTheSameInEveryProcess) {
  const PathHasher hasher(kSeed);
  const std::uint64_t root = hasher.Root(TenantId{1}, ModelOf(7), "salt");
  const std::uint64_t block = hasher.Extend(root, Provenance::kExact, "extra", Tokens(16));
  EXPECT_EQ(root, 17374480627510318321u);
  EXPECT_EQ(block, 9065387481937152282u);
}

TEST(HashedPathTest, CutsFullBlocksAndReportsTheRest) {
  const PathHasher hasher(kSeed);
  for (const std::uint32_t block_tokens : {1u, 16u, 256u}) {
    for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 255u, 256u, 257u, 1024u}) {
      const auto tokens = Tokens(count);
      const HashedPath path(hasher, TenantId{1},
                            {.model = ModelOf(1), .tokens = tokens, .salt = {}, .extra_keys = {}},
                            block_tokens);
      EXPECT_EQ(path.block_count(), count / block_tokens);
      EXPECT_EQ(path.ignored_tail_tokens(), count % block_tokens);
      for (std::uint32_t block = 0; block < path.block_count(); ++block) {
        EXPECT_EQ(path.tokens(block).front(), block * block_tokens);
        EXPECT_EQ(path.tokens(block).size(), block_tokens);
      }
    }
  }
}

TEST(HashedPathTest, IsTheChainThatTheHasherMakes) {
  const PathHasher hasher(kSeed);
  const auto tokens = Tokens(64);
  const std::vector<ExtraKey> extras = {{1, "one"}, {3, "three"}};
  const HashedPath path(hasher, TenantId{1},
                        {.model = ModelOf(1), .tokens = tokens, .salt = "s", .extra_keys = extras},
                        16);
  std::uint64_t hash = hasher.Root(TenantId{1}, ModelOf(1), "s");
  for (std::uint32_t block = 0; block < 4; ++block) {
    EXPECT_EQ(path.hash_above(block), hash);
    hash = hasher.Extend(hash, Provenance::kExact, path.extra_key(block), path.tokens(block));
    EXPECT_EQ(path.hash(block), hash);
  }
  EXPECT_EQ(path.extra_key(0), "");
  EXPECT_EQ(path.extra_key(1), "one");
  EXPECT_EQ(path.extra_key(2), "");
  EXPECT_EQ(path.extra_key(3), "three");
}

TEST(HashedPathTest, PathsThatDifferInOneTokenPartThereForGood) {
  const PathHasher hasher(kSeed);
  const auto tokens = Tokens(64);
  const HashedPath whole(hasher, TenantId{1},
                         {.model = ModelOf(1), .tokens = tokens, .salt = {}, .extra_keys = {}}, 16);
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    auto other = tokens;
    other[at] ^= 1;
    const HashedPath changed(hasher, TenantId{1},
                             {.model = ModelOf(1), .tokens = other, .salt = {}, .extra_keys = {}},
                             16);
    for (std::uint32_t block = 0; block < 4; ++block) {
      EXPECT_EQ(changed.hash(block) == whole.hash(block), block < at / 16);
    }
  }
}

}  // namespace
}  // namespace kvtrie
