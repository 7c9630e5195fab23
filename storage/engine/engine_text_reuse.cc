#include <algorithm>
#include <utility>

#include "storage/engine/engine_core.h"

namespace kvtrie {
namespace {

// All that comes after attends to the first token of a session: its KV is like that of no other
// place. Elsewhere it would draw attention to itself, and no other KV can stand in for it.
constexpr std::uint32_t kFirstReusable = 1;

}  // namespace

bool Engine::Core::MayBeReused(NodeRef ref, Quality min_quality) const {
  const IndexNode& node = index_.node(ref);
  if (!node.any_serves(min_quality) || node.expired(NowSeconds())) return false;
  // KV that may have been reused already: each time it is further from what the model computes.
  const auto is_unrated = [&node](Quality quality) {
    return node.on_lossy != 0 && quality == Quality::kUnrated;
  };
  return !is_unrated(node.quality()) && !(node.has_other() && is_unrated(node.other_quality()));
}

void Engine::Core::LeaveOutFirstToken(TextRun* run) const {
  const IndexNode& front = index_.node(run->nodes.front());
  if (front.depth != 1 || run->offset >= kFirstReusable) return;
  ++run->first_token;
  --run->token_count;
  if (index_.model(front.model).block_tokens == 1) {
    run->nodes.erase(run->nodes.begin());
  } else {
    run->offset = 1;
  }
}

std::vector<Engine::Core::FoundText> Engine::Core::FindReusableText(TenantId tenant, ModelSlot slot,
                                                                    const LookupQuery& query,
                                                                    const Walked& walked,
                                                                    std::uint32_t first_token) {
  std::vector<FoundText> text;
  RunQuery runs{.model = slot,
                .space = TextSpaceOf(tenant, query.models.front(), query.path.salt),
                .salt = query.path.salt,
                .tokens = query.path.tokens,
                .extra_keys = query.path.extra_keys,
                .first_token = std::max(first_token, kFirstReusable)};
  RunFindings found;
  SearchInRounds(tenant, kSearchReadsMax,
                 [&](bool is_last) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                   std::vector<NodeRef> own_path;
                   for (const auto& [ref, id] : walked.nodes) {
                     if (!index_.alive(ref) || index_.node(ref).id != id) break;
                     own_path.push_back(ref);
                   }
                   runs.own_path = own_path;
                   runs.usable = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                     return MayBeReused(ref, query.min_quality);
                   };
                   found = runs_->FindRuns(index_, runs);
                   if (!found.unread.empty() && !is_last)
                     return std::span<const NodeRef>(found.unread);
                   for (TextRun& run : found.runs) {  // longest first
                     LeaveOutFirstToken(&run);
                     if (run.token_count < query.text_reuse_min_tokens) continue;
                     if (text.size() == kReusableRunsMax) break;
                     FoundText& part = text.emplace_back();
                     for (const NodeRef ref : run.nodes) part.ids.push_back(index_.node(ref).id);
                     part.run = std::move(run);
                   }
                   return std::span<const NodeRef>();
                 });
  std::sort(text.begin(), text.end(), [](const FoundText& a, const FoundText& b) {
    return a.run.first_token < b.run.first_token;
  });
  return text;
}

void Engine::Core::AddReusableRuns(std::span<const FoundText> found, Quality min_quality,
                                   LookupResult* result, std::vector<HoldTable::Hold>* holds) {
  const std::uint32_t now = NowSeconds();
  for (const FoundText& text : found) {
    const auto is_there = [&](std::size_t i) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      const NodeRef ref = text.run.nodes[i];
      return index_.alive(ref) && index_.node(ref).id == text.ids[i] &&
             MayBeReused(ref, min_quality);
    };
    bool all_there = true;
    for (std::size_t i = 0; i < text.ids.size(); ++i) all_there = all_there && is_there(i);
    if (!all_there) continue;
    const std::uint32_t depth = index_.node(text.run.nodes.front()).depth;
    ReusableRun run{.first_token = text.run.first_token,
                    .token_count = text.run.token_count,
                    .nodes = text.ids,
                    .node_offset = text.run.offset,
                    .first_position = (depth - 1) * result->block_tokens + text.run.offset};
    RetentionPolicy::Uses uses(retention_);
    for (const NodeRef ref : text.run.nodes) {
      const IndexNode& node = index_.node(ref);
      uses.Add(ref, now);
      index_.Touch(ref, now);
      const ServedSize served = ServedBy(node, min_quality);
      run.fetch_bytes += served.bytes;
      run.source_quality = LowerOf(run.source_quality, served.quality);
    }
    holds->push_back({text.run.nodes.back(), text.ids.back()});
    result->reusable_runs.push_back(std::move(run));
  }
}

}  // namespace kvtrie
