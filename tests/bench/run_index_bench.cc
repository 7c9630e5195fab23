// What the index of text runs costs: bytes per stored token, time to add a block, time of a query,
// and of the 8 nearest sessions (walk, runs and comparison).
//   run_index_bench [--tokens 1000000,16000000] [--query_tokens 4096] [--queries 500]
// Sessions of 4,096 tokens: half of each from 200 documents, at any offset, the rest private. A
// query is a session that is not stored, made the same way. Texts come from a seeded generator
// (seed 1). Prints one JSON object per size.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "storage/base/check.h"
#include "storage/trie/run_index.h"
#include "storage/trie/session_ends.h"
#include "storage/trie/similar_sessions.h"

namespace kvtrie {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

constexpr std::uint32_t kBlockTokens = 16;
constexpr std::size_t kSessionTokens = 4096;
constexpr std::size_t kDocuments = 200;
constexpr std::size_t kDocumentTokens = 2000;

std::vector<TokenId> TextOf(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 50'000);
  return tokens;
}

// About half of it from documents, in pieces of at least 500 tokens.
std::vector<TokenId> SessionOf(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens = TextOf(seed ^ 0x5bd1e995u, random() % 400 + 100);
  while (tokens.size() < count) {
    const auto document = TextOf(1 + random() % kDocuments, kDocumentTokens);
    const std::size_t begin = random() % (kDocumentTokens - 500);
    tokens.insert(tokens.end(), document.begin() + static_cast<std::ptrdiff_t>(begin),
                  document.end());
    const auto own = TextOf(random(), random() % 2000 + 100);
    tokens.insert(tokens.end(), own.begin(), own.end());
  }
  tokens.resize(count);
  return tokens;
}

TrieNodeId IdOf(std::uint64_t number) {
  std::mt19937_64 random(number);
  TrieNodeId id;
  for (std::size_t at = 0; at < TrieNodeId::kBytes; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(id.bytes.data() + at, &word, 8);
  }
  return id;
}

void Measure(std::size_t token_count, std::size_t query_tokens, std::size_t query_count) {
  TrieIndex trie(token_count * (sizeof(TokenId) + 1) * 2 + (1u << 20));
  RunIndex runs(77, std::size_t{4} << 30);
  const PathHasher hasher(12345);
  const TenantId tenant{1};
  ModelId model;
  model.bytes[0] = 1;
  const ModelSlot slot = *trie.AddModel(tenant, model, kBlockTokens);
  const std::uint64_t space = hasher.Root(tenant, model, {});
  duration<double> insert_time{};
  duration<double> add_time{};
  for (std::uint64_t session = 0; session * kSessionTokens < token_count; ++session) {
    const auto tokens = SessionOf(session + 1'000'000, kSessionTokens);
    const auto begin = steady_clock::now();
    const HashedPath path(hasher, tenant,
                          {.model = model, .tokens = tokens, .salt = {}, .extra_keys = {}},
                          kBlockTokens);
    std::vector<NodeRef> nodes;
    for (std::uint32_t block = 0; block < path.block_count(); ++block) {
      nodes.push_back(trie.Insert({.id = IdOf(trie.node_count() + 1),
                                   .parent = nodes.empty() ? 0 : nodes.back(),
                                   .model = slot,
                                   .path_hash = path.hash(block),
                                   .salt = {},
                                   .extra_key = {},
                                   .tokens = path.tokens(block),
                                   .frames = {.frame = {1, block, 4096}}}));
    }
    const auto inserted = steady_clock::now();
    for (const NodeRef node : nodes) runs.Add(trie, node, space);
    insert_time += inserted - begin;
    add_time += steady_clock::now() - inserted;
  }

  std::vector<double> microseconds;
  std::vector<double> similar_microseconds;
  const SessionEnds no_names;
  std::uint64_t found_tokens = 0;
  std::uint64_t run_count = 0;
  std::uint64_t steps = 0;
  for (std::uint64_t i = 0; i < query_count; ++i) {
    const auto tokens = SessionOf(2'000'000'000 + i, query_tokens);
    const auto begin = steady_clock::now();
    const RunFindings found =
        runs.FindRuns(trie, {.model = slot, .space = space, .tokens = tokens});
    microseconds.push_back(duration<double, std::micro>(steady_clock::now() - begin).count());
    const auto similar_begin = steady_clock::now();
    const HashedPath path(hasher, tenant,
                          {.model = model, .tokens = tokens, .salt = {}, .extra_keys = {}},
                          kBlockTokens);
    const WalkResult walk = trie.Walk(slot, hasher, path, Quality::kUnrated, 0);
    const SimilarSessions near = FindSimilarSessions(trie, runs, no_names,
                                                     {.model = slot,
                                                      .space = space,
                                                      .tokens = tokens,
                                                      .stored_prefix = walk.refs,
                                                      .session_count = 8});
    similar_microseconds.push_back(
        duration<double, std::micro>(steady_clock::now() - similar_begin).count());
    KV_CHECK(near.is_complete);
    KV_CHECK(found.unread.empty());
    for (const TextRun& run : found.runs) found_tokens += run.token_count;
    run_count += found.runs.size();
    steps += found.steps;
  }
  std::sort(microseconds.begin(), microseconds.end());
  std::sort(similar_microseconds.begin(), similar_microseconds.end());
  const double stored = static_cast<double>(trie.node_count() * kBlockTokens);
  const double queries = static_cast<double>(query_count);
  std::printf(
      "{\"stored_tokens\": %.0f, \"entries\": %zu, \"bytes_per_token\": %.3f, "
      "\"add_ns_per_block\": "
      "%.0f, \"trie_insert_ns_per_block\": %.0f, \"query_tokens\": %zu, \"found_tokens\": %.0f, "
      "\"runs\": %.1f, \"steps\": %.0f, \"query_p50_us\": %.0f, \"query_p99_us\": %.0f, "
      "\"similar_p50_us\": %.0f}\n",
      stored, runs.table().size(), static_cast<double>(runs.table().memory_bytes()) / stored,
      add_time.count() * 1e9 / static_cast<double>(trie.node_count()),
      insert_time.count() * 1e9 / static_cast<double>(trie.node_count()), query_tokens,
      static_cast<double>(found_tokens) / queries, static_cast<double>(run_count) / queries,
      static_cast<double>(steps) / queries, microseconds[microseconds.size() / 2],
      microseconds[microseconds.size() * 99 / 100],
      similar_microseconds[similar_microseconds.size() / 2]);
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvtrie

int main(int argc, char** argv) {
  std::string sizes = "1000000,16000000";
  std::size_t query_tokens = 4096;
  std::size_t query_count = 500;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--tokens") sizes = argv[i + 1];
    if (flag == "--query_tokens") query_tokens = static_cast<std::size_t>(std::atoll(argv[i + 1]));
    if (flag == "--queries") query_count = static_cast<std::size_t>(std::atoll(argv[i + 1]));
  }
  for (std::size_t at = 0; at < sizes.size();) {
    const std::size_t comma = std::min(sizes.find(',', at), sizes.size());
    kvtrie::Measure(static_cast<std::size_t>(std::atoll(sizes.substr(at, comma - at).c_str())),
                    query_tokens, query_count);
    at = comma + 1;
  }
  return 0;
}
