#include "storage/kv/trie_node_id.h"

#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace kvtrie {
namespace {

// Bytes 0x00, 0x01, ...
std::string CountingBytes(std::size_t count, std::uint8_t first = 0) {
  std::string bytes(count, '\0');
  std::iota(bytes.begin(), bytes.end(), static_cast<char>(first));
  return bytes;
}

const ModelId kModel = *ModelId::FromBytes(CountingBytes(16, 0x10));
const TrieNodeId kParent = *TrieNodeId::FromBytes(CountingBytes(16, 0x30));

TrieNodeNamer Namer() { return TrieNodeNamer(CountingBytes(TrieNodeNamer::kSecretBytes)); }

std::vector<TokenId> CountingTokens(std::size_t count) {
  std::vector<TokenId> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

// Expected values: Python's hmac module (tests/golden/make_v1.py).
TEST(TrieNodeNamerTest, NamesAreHmacSha256) {
  const TrieNodeNamer namer = Namer();
  const TrieNodeId first =
      namer.Name(kModel, TrieNodeId{}, Provenance::kExact, "salt", "", CountingTokens(16));
  EXPECT_EQ(first.view(), absl::HexStringToBytes("c5ac1b3e5d183dcd3531d9d75f1556a9"));
  const TrieNodeId second = namer.Name(kModel, first, Provenance::kOnLossy, "", "image",
                                       std::vector<TokenId>{0xFFFFFFFF});
  EXPECT_EQ(second.view(), absl::HexStringToBytes("2c0fe1cb210b470277ca5a28afc759c5"));
  EXPECT_EQ(namer.Name(kModel, kParent, Provenance::kExact, "", "", {}).view(),
            absl::HexStringToBytes("21bdd427aab5a87652fbf2d1b317b617"));
}

TEST(TrieNodeNamerTest, EveryInputChangesTheName) {
  const std::vector<TokenId> tokens = CountingTokens(16);
  std::vector<TokenId> other_tokens = tokens;
  other_tokens.back() ^= 1;
  const TrieNodeNamer namer = Namer();
  const TrieNodeNamer other_secret(CountingBytes(TrieNodeNamer::kSecretBytes, 1));
  constexpr Provenance kExact = Provenance::kExact;

  const std::vector<TrieNodeId> names = {
      namer.Name(kModel, kParent, kExact, "", "", tokens),
      other_secret.Name(kModel, kParent, kExact, "", "", tokens),
      namer.Name(ModelId{}, kParent, kExact, "", "", tokens),
      namer.Name(kModel, TrieNodeId{}, kExact, "", "", tokens),
      namer.Name(kModel, kParent, Provenance::kOnLossy, "", "", tokens),
      namer.Name(kModel, kParent, kExact, "", "", other_tokens),
      namer.Name(kModel, kParent, kExact, "", "", std::span(tokens).first(15)),
      // The counts keep neighbours apart.
      namer.Name(kModel, kParent, kExact, "a", "bc", tokens),
      namer.Name(kModel, kParent, kExact, "ab", "c", tokens),
      namer.Name(kModel, kParent, kExact, "abc", "", tokens),
      namer.Name(kModel, kParent, kExact, "", "abc", tokens),
  };
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
}

TEST(TrieNodeNamerTest, LongKeysEnterWhole) {
  const TrieNodeNamer namer = Namer();
  const std::string key(1024, 'k');
  std::string other = key;
  other.back() = 'l';
  const auto tokens = CountingTokens(16);
  EXPECT_NE(namer.Name(kModel, kParent, Provenance::kExact, "", key, tokens),
            namer.Name(kModel, kParent, Provenance::kExact, "", other, tokens));
}

TEST(TrieNodeNamerTest, ThreadsComputeTheSameNames) {
  const TrieNodeNamer namer = Namer();
  const auto chain = [&namer] {
    std::vector<TrieNodeId> names(256);
    TrieNodeId parent;
    for (TrieNodeId& name : names) {
      parent = namer.Name(kModel, parent, Provenance::kExact, "", "", CountingTokens(16));
      name = parent;
    }
    return names;
  };
  const std::vector<TrieNodeId> expected = chain();
  std::vector<std::vector<TrieNodeId>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = chain(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

TEST(TrieNodeNamerTest, MovedNamerNamesAlike) {
  TrieNodeNamer namer = Namer();
  const auto tokens = CountingTokens(3);
  const TrieNodeId name = namer.Name(kModel, kParent, Provenance::kExact, "", "", tokens);
  TrieNodeNamer moved(std::move(namer));
  EXPECT_EQ(moved.Name(kModel, kParent, Provenance::kExact, "", "", tokens), name);
}

TEST(TrieNodeNamerDeathTest, SecretHasItsSize) {
  EXPECT_DEATH(TrieNodeNamer(std::string(31, 's')), "kSecretBytes");
}

}  // namespace
}  // namespace kvtrie
