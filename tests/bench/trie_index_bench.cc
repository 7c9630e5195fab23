// Memory per node and lookup time of the trie index at growing sizes, with synthetic paths.
//   trie_index_bench [--nodes 100000,10000000] [--prompt_blocks 256] [--lookups 2000]
// Tokens come from a seeded generator (seed 1). Prints one JSON object per size.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {
namespace {

constexpr std::uint32_t kBlockTokens = 16;

std::vector<TokenId> PathTokens(std::uint64_t seed, std::uint32_t block_count) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(std::size_t{block_count} * kBlockTokens);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 50'000);
  return tokens;
}

TrieNodeId IdOf(std::uint64_t path, std::uint32_t block) {
  std::mt19937_64 random(path * 1'000'003 + block);
  TrieNodeId id;
  for (std::size_t at = 0; at < TrieNodeId::kBytes; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(id.bytes.data() + at, &word, 8);
  }
  return id;
}

void Measure(std::size_t node_count, std::uint32_t prompt_blocks, std::size_t lookup_count) {
  using std::chrono::duration;
  using std::chrono::steady_clock;
  TrieIndex index(node_count * (kBlockTokens * sizeof(TokenId) + 8) * 2 + (1u << 20));
  const PathHasher hasher(12345);
  const TenantId tenant{1};
  ModelId model;
  model.bytes[0] = 1;
  const ModelSlot slot = *index.AddModel(tenant, model, kBlockTokens);
  const std::size_t path_count = (node_count + prompt_blocks - 1) / prompt_blocks;

  const auto load_begin = steady_clock::now();
  for (std::size_t path = 0; path < path_count; ++path) {
    const auto tokens = PathTokens(path + 1, prompt_blocks);
    const HashedPath hashed(hasher, tenant,
                            {.model = model, .tokens = tokens, .salt = {}, .extra_keys = {}},
                            kBlockTokens);
    NodeRef parent = 0;
    for (std::uint32_t block = 0; block < prompt_blocks; ++block) {
      parent = index.Insert({.id = IdOf(path, block),
                             .parent = parent,
                             .model = slot,
                             .path_hash = hashed.hash(block),
                             .salt = {},
                             .extra_key = {},
                             .tokens = hashed.tokens(block),
                             .frames = {.frame = {1, block, 4096}}});
    }
  }
  const double load_seconds = duration<double>(steady_clock::now() - load_begin).count();

  std::mt19937_64 random(1);
  std::vector<double> microseconds;
  for (std::size_t i = 0; i < lookup_count; ++i) {
    const auto tokens = PathTokens(random() % path_count + 1, prompt_blocks);
    const auto begin = steady_clock::now();
    const HashedPath hashed(hasher, tenant,
                            {.model = model, .tokens = tokens, .salt = {}, .extra_keys = {}},
                            kBlockTokens);
    const WalkResult found = index.Walk(slot, hasher, hashed, Quality::kExact, 0);
    microseconds.push_back(duration<double, std::micro>(steady_clock::now() - begin).count());
    KV_CHECK(found.refs.size() == prompt_blocks);
    KV_CHECK(found.unverified.empty());
  }
  std::sort(microseconds.begin(), microseconds.end());
  std::printf(
      "{\"nodes\": %zu, \"index_bytes_per_node\": %.1f, \"token_bytes_per_node\": %.1f, "
      "\"load_s\": %.2f, \"prompt_blocks\": %u, \"lookup_p50_us\": %.1f, \"lookup_p99_us\": "
      "%.1f}\n",
      index.node_count(),
      static_cast<double>(index.memory_bytes()) / static_cast<double>(index.node_count()),
      static_cast<double>(index.token_cache_bytes()) / static_cast<double>(index.node_count()),
      load_seconds, prompt_blocks, microseconds[microseconds.size() / 2],
      microseconds[microseconds.size() * 99 / 100]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  std::string nodes = "100000,1000000,10000000";
  std::uint32_t prompt_blocks = 256;
  std::size_t lookup_count = 2000;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--nodes") nodes = argv[i + 1];
    if (flag == "--prompt_blocks")
      prompt_blocks = static_cast<std::uint32_t>(std::atoi(argv[i + 1]));
    if (flag == "--lookups") lookup_count = static_cast<std::size_t>(std::atoll(argv[i + 1]));
  }
  for (std::size_t at = 0; at < nodes.size();) {
    const std::size_t comma = std::min(nodes.find(',', at), nodes.size());
    kvtrie::Measure(static_cast<std::size_t>(std::atoll(nodes.substr(at, comma - at).c_str())),
                    prompt_blocks, lookup_count);
    at = comma + 1;
  }
  return 0;
}
