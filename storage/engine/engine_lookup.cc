#include <algorithm>
#include <utility>

#include "storage/base/random_id.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// A node with two frames has one on each rung.
std::uint8_t RungBitsOf(const IndexNode& node) {
  const std::uint8_t both = RungBit(Rung::kCoded) | RungBit(Rung::kExact);
  return static_cast<std::uint8_t>(RungBit(Rung::kTokens) |
                                   (node.has_other() ? both : RungBit(RungOf(node.codec()))));
}

}  // namespace

std::size_t Engine::Core::CompareWithRows(const std::vector<std::pair<NodeRef, TrieNodeId>>& nodes,
                                          const std::vector<std::uint32_t>& unverified,
                                          TenantId tenant, const HashedPath& path) {
  std::vector<std::pair<std::size_t, std::vector<TokenId>>> loaded;
  std::size_t good_blocks = nodes.size();
  for (const std::uint32_t block : unverified) {
    counters_.token_cache_misses.fetch_add(1, std::memory_order_relaxed);
    const auto text =
        meta_->Get(MetaTable::kNodes, NodeRowKey{tenant, nodes[block].second}.Encode());
    const auto wanted = path.tokens(block);
    absl::StatusOr<NodeRow> row = absl::NotFoundError("");
    if (text.ok() && text->has_value()) row = NodeRow::Decode(**text);
    const bool is_wanted = row.ok() && std::equal(row->tokens.begin(), row->tokens.end(),
                                                  wanted.begin(), wanted.end());
    // Kept even when they are others: then the next walk passes this node by.
    if (row.ok()) loaded.emplace_back(block, std::move(row->tokens));
    if (!is_wanted) {
      good_blocks = block;
      break;
    }
  }
  absl::MutexLock lock(&index_mutex_);
  for (const auto& [block, tokens] : loaded) {
    const auto& [ref, id] = nodes[block];
    if (index_.alive(ref) && index_.node(ref).id == id) index_.CacheTokens(ref, tokens);
  }
  return good_blocks;
}

std::optional<Engine::Core::Walked> Engine::Core::Walk(ModelSlot slot, TenantId tenant,
                                                       const PathView& path,
                                                       std::uint32_t block_tokens,
                                                       Quality min_quality, bool may_block) {
  // Nodes of equal hash that stand in the way of the right one; more than one is beyond chance.
  constexpr int kWalksMax = 4;
  const HashedPath hashed(*hasher_, tenant, path, block_tokens);
  Walked walked{{}, 0, hashed.block_count(), hashed.ignored_tail_tokens()};
  for (int walk = 0; walk < kWalksMax; ++walk) {
    std::vector<std::uint32_t> unverified;
    walked.nodes.clear();
    walked.exact_blocks = 0;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      WalkResult found = index_.Walk(slot, *hasher_, hashed, min_quality, NowSeconds());
      if (!found.unverified.empty() && !may_block) return std::nullopt;
      walked.nodes.reserve(found.refs.size());
      for (const NodeRef ref : found.refs) {
        walked.nodes.emplace_back(ref, index_.node(ref).id);
        walked.exact_blocks += index_.node(ref).on_lossy == 0 ? 1 : 0;
      }
      unverified = std::move(found.unverified);
    }
    if (unverified.empty()) break;
    const std::size_t found_blocks = walked.nodes.size();
    walked.nodes.resize(CompareWithRows(walked.nodes, unverified, tenant, hashed));
    if (walked.nodes.size() == found_blocks) break;
  }
  return walked;
}

std::optional<absl::StatusOr<LookupResult>> Engine::Core::Lookup(TenantId tenant,
                                                                 const LookupQuery& query,
                                                                 bool may_block) {
  std::vector<Walked> walks;
  LookupResult result;
  std::vector<ModelSlot> slots;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const ModelId& model : query.models) {
      const auto slot = FindRegistered(tenant, model);
      if (!slot.ok()) return slot.status();
      const std::uint32_t block_tokens = index_.model(*slot).block_tokens;
      if (result.block_tokens != 0 && result.block_tokens != block_tokens) {
        return absl::InvalidArgumentError("model_ids: the models have different block_tokens");
      }
      result.block_tokens = block_tokens;
      slots.push_back(*slot);
    }
    if (query.text_reuse_min_tokens != 0 && slots.size() == 1) {
      result.text_reuse_forbidden = options_.text_reuse.Forbids(
          tenant, query.models.front(), models_.find(slots.front())->second->spec);
    }
  }
  const bool reuses_text = query.text_reuse_min_tokens != 0 && !result.text_reuse_forbidden;
  if (reuses_text && slots.size() > 1) {
    return absl::InvalidArgumentError("allow_text_reuse: only with a single model id");
  }
  if (reuses_text && !may_block) return std::nullopt;
  std::size_t matched = SIZE_MAX;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    PathView path = query.path;
    path.model = query.models[i];
    auto walked = Walk(slots[i], tenant, path, result.block_tokens, query.min_quality, may_block);
    if (!walked) return std::nullopt;
    matched = std::min(matched, walked->nodes.size());
    walks.push_back(*std::move(walked));
  }
  if (walks.empty()) return absl::InvalidArgumentError("model_ids: at least one is needed");
  result.ignored_tail_tokens = walks.front().ignored_tail_tokens;
  std::vector<FoundText> text;
  if (reuses_text) {
    text = FindReusableText(tenant, slots.front(), query, walks.front(),
                            static_cast<std::uint32_t>(matched) * result.block_tokens);
  }
  std::vector<HoldTable::Hold> text_holds;

  const bool prefetches = prefetcher_ != nullptr && query.lease.count() > 0;
  std::vector<ServingFrames> frames(query.want_runs || prefetches ? walks.size() : 0);
  // What was found may have gone since; only what is there now is told, and leased.
  const auto fill = [&]() ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    for (const Walked& walked : walks) {
      for (std::size_t block = 0; block < matched; ++block) {
        const auto& [ref, id] = walked.nodes[block];
        if (!index_.alive(ref) || index_.node(ref).id != id ||
            !index_.node(ref).any_serves(query.min_quality)) {
          matched = block;
        }
      }
    }
    const std::uint32_t now = NowSeconds();
    RetentionPolicy::Uses uses(retention_);
    if (query.want_blocks) result.blocks.resize(walks.size());
    for (std::size_t i = 0; i < walks.size(); ++i) {
      if (query.want_blocks) result.blocks[i].reserve(matched);
      if (!frames.empty()) frames[i].reserve(matched);
      for (std::size_t block = 0; block < matched; ++block) {
        const NodeRef ref = walks[i].nodes[block].first;
        const IndexNode& node = index_.node(ref);
        uses.Add(ref, now);
        index_.Touch(ref, now);
        const ServedSize served = ServedBy(node, query.min_quality);
        result.fetch_bytes += served.bytes;
        result.quality = LowerOf(result.quality, served.quality);
        if (query.want_blocks) {
          result.blocks[i].push_back({node.id, RungBitsOf(node), served.bytes});
        }
        if (frames.empty()) continue;
        frames[i].push_back(FrameInIndex(node));
        if (node.serves(query.min_quality)) continue;
        frames[i].back().at = {.record_bytes = static_cast<std::uint32_t>(served.bytes)};
        frames[i].back().codec = CodecId::kRaw;
        frames[i].back().quality = served.quality;
      }
    }
    result.group = GroupOfPath(walks.front().nodes, matched);
    AddReusableRuns(text, query.min_quality, &result, &text_holds);
  };
  if (query.lease.count() > 0) {
    absl::MutexLock lock(&index_mutex_);
    fill();
    if (matched > 0 || !text_holds.empty()) {
      HoldTable::Lease lease{.tenant = tenant, .holds = std::move(text_holds), .end = {}};
      for (const Walked& walked : walks) {
        if (matched == 0) break;
        const auto& [ref, id] = walked.nodes[matched - 1];
        lease.holds.push_back({ref, id});
      }
      result.lease_granted = std::min(query.lease, options_.lease_max);
      result.lease = RandomId<LeaseId>();
      lease.end = clock_.Monotonic() + result.lease_granted;
      holds_.AddLease(result.lease, std::move(lease));
    }
  } else {
    absl::ReaderMutexLock lock(&index_mutex_);
    fill();
  }
  if (!frames.empty() && matched > 0) {
    std::vector<std::vector<bool>> in_memory;
    for (const ServingFrames& of_model : frames) in_memory.push_back(InMemory(of_model));
    if (query.want_runs) result.runs = RunsOf(frames, in_memory);
    if (prefetches) {
      const auto tail = query.path.tokens.last(result.ignored_tail_tokens);
      Prefetch(query, frames, in_memory,
               matched == walks.front().block_count ? std::optional(tail) : std::nullopt);
    }
  }
  result.matched_blocks = static_cast<std::uint32_t>(matched);
  counters_.lookups.fetch_add(1, std::memory_order_relaxed);
  counters_.lookup_blocks.fetch_add(walks.front().block_count, std::memory_order_relaxed);
  counters_.lookup_hit_blocks.fetch_add(matched, std::memory_order_relaxed);
  if (query.text_reuse_min_tokens != 0) {
    ++counters_.text_reuse_lookups;
    if (result.text_reuse_forbidden) ++counters_.text_reuse_forbidden;
    for (const ReusableRun& run : result.reusable_runs) {
      counters_.text_reuse_offered_tokens += run.token_count;
    }
  }
  return result;
}

void Engine::Core::ReleaseLease(TenantId tenant, const LeaseId& lease) {
  absl::MutexLock lock(&index_mutex_);
  holds_.DropLease(tenant, lease);
}

}  // namespace kvtrie
