#include <algorithm>
#include <utility>

#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/trie/similar_sessions.h"

namespace kvtrie {
namespace {

constexpr int kSimilarReadsMax = 4;

}  // namespace

void Engine::Core::SearchInRounds(TenantId tenant, int reads_max, const SearchRound& search) {
  for (int reads = 0;; ++reads) {
    std::vector<std::pair<NodeRef, TrieNodeId>> unread;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      for (const NodeRef ref : search(/*is_last=*/reads == reads_max)) {
        unread.emplace_back(ref, index_.node(ref).id);
      }
    }
    if (unread.empty() || reads == reads_max) return;
    CacheTokensOf(tenant, unread);
  }
}

void Engine::Core::CacheTokensOf(TenantId tenant,
                                 std::span<const std::pair<NodeRef, TrieNodeId>> nodes) {
  for (const auto& [ref, id] : nodes) {
    counters_.token_cache_misses.fetch_add(1, std::memory_order_relaxed);
    const auto row = ReadRow(tenant, id);
    if (!row.ok()) continue;
    absl::MutexLock lock(&index_mutex_);
    if (index_.alive(ref) && index_.node(ref).id == id) index_.CacheTokens(ref, row->tokens);
  }
}

absl::StatusOr<SimilarResult> Engine::Core::Similar(TenantId tenant,
                                                    const SimilarRequest& request) {
  ModelSlot slot;
  SimilarResult result;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    KV_ASSIGN_OR_RETURN(slot, FindRegistered(tenant, request.path.model));
    result.block_tokens = index_.model(slot).block_tokens;
  }
  const Walked walked = *Walk(slot, tenant, request.path, result.block_tokens, Quality::kUnrated,
                              /*may_block=*/true);
  SimilarQuery query{.model = slot,
                     .space = TextSpaceOf(tenant, request.path.model, request.path.salt),
                     .salt = request.path.salt,
                     .tokens = request.path.tokens,
                     .extra_keys = request.path.extra_keys,
                     .session_count = request.session_count,
                     .now_seconds = NowSeconds()};
  SimilarSessions found;
  SearchInRounds(tenant, kSimilarReadsMax,
                 [&](bool is_last) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                   std::vector<NodeRef> prefix;
                   for (const auto& [ref, id] : walked.nodes) {
                     if (!index_.alive(ref) || index_.node(ref).id != id) break;
                     prefix.push_back(ref);
                   }
                   query.stored_prefix = prefix;
                   found = FindSimilarSessions(index_, *runs_, session_ends_, query);
                   if (!found.unread.empty() && !is_last)
                     return std::span<const NodeRef>(found.unread);
                   result.matched_blocks = static_cast<std::uint32_t>(prefix.size());
                   result.is_complete = found.is_complete && found.unread.empty();
                   for (const SimilarSession& session : found.sessions) {
                     NearSession near{.end = index_.node(session.end).id,
                                      .session_ids = session_ends_.SessionsAt(session.end),
                                      .blocks = index_.node(session.end).depth,
                                      .shared_prefix_blocks = session.shared_prefix_blocks,
                                      .shared_prefix_bits = session.shared_prefix_bits,
                                      .shared_run_tokens = session.shared_run_tokens,
                                      .shared_run_bits = session.shared_run_bits,
                                      .runs = {}};
                     for (std::size_t i = 0; i < session.runs.size(); ++i) {
                       const TextRun& run = session.runs[i];
                       near.runs.push_back({run.first_token, run.token_count,
                                            index_.node(run.nodes.front()).id, run.offset,
                                            session.run_bits[i]});
                     }
                     result.sessions.push_back(std::move(near));
                   }
                   return std::span<const NodeRef>();
                 });
  counters_.similar_queries.fetch_add(1, std::memory_order_relaxed);
  if (!result.is_complete) counters_.similar_cut_short.fetch_add(1, std::memory_order_relaxed);
  return result;
}

}  // namespace kvtrie
