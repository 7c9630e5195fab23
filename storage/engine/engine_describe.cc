#include <utility>

#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"

namespace kvtrie {

NodeInfo Engine::Core::Describe(NodeRef ref) const {
  const IndexNode& node = index_.node(ref);
  NodeInfo info;
  info.id = node.id;
  if (const NodeRef parent = index_.parent(ref); parent != 0) info.parent = index_.node(parent).id;
  info.model = index_.model(node.model).model;
  info.depth = node.depth;
  if (node.has_frame()) {
    info.frames.push_back(FrameInIndex(node));
    info.in_memory.push_back(tier_.Contains(info.frames.back().at));
    info.quality = info.frames.back().quality;
  }
  info.holds_two_frames = node.has_other();
  info.use_count = node.use_count();
  info.last_used_unix_seconds = node.last_used_seconds;
  info.expires_unix_seconds = node.expires_seconds;
  info.priority = node.priority;
  info.surprisal_bits = static_cast<double>(node.surprisal_bits);
  info.surprisal_estimated = node.path_is_known == 0;
  info.pinned = holds_.IsPinned(ref);
  info.leased = holds_.IsLeased(ref);
  for (NodeRef child = node.first_child; child != 0; child = index_.node(child).next_sibling) {
    ++info.child_count;
  }
  info.extra_key_bytes = static_cast<std::uint32_t>(index_.extra_key(ref).size());
  return info;
}

void Engine::Core::DescribeOtherFrames(TenantId tenant, std::vector<NodeInfo>* infos) {
  for (NodeInfo& info : *infos) {
    if (!info.holds_two_frames) continue;
    const auto row = ReadRow(tenant, info.id);
    if (!row.ok()) continue;
    for (const RungRow& rung : row->rungs) {
      if (LocationOf(rung) == info.frames.front().at) continue;
      const StoredFrame frame =
          FrameInRow(info.id, *row, rung, info.frames.front().raw_frame_bytes);
      info.frames.push_back(frame);
      info.in_memory.push_back(tier_.Contains(frame.at));
      if (IsAtLeast(frame.quality, info.quality)) info.quality = frame.quality;
      break;
    }
  }
}

absl::StatusOr<std::vector<NodeInfo>> Engine::Core::ListChildren(TenantId tenant,
                                                                 const ModelId& model,
                                                                 const TrieNodeId& parent,
                                                                 const TrieNodeId& after,
                                                                 std::size_t count) {
  std::vector<NodeInfo> infos;
  KV_RETURN_IF_ERROR(CollectChildren(tenant, model, parent, after, count, &infos));
  DescribeOtherFrames(tenant, &infos);
  return infos;
}

absl::Status Engine::Core::CollectChildren(TenantId tenant, const ModelId& model,
                                           const TrieNodeId& parent, const TrieNodeId& after,
                                           std::size_t count, std::vector<NodeInfo>* infos) {
  absl::ReaderMutexLock lock(&index_mutex_);
  KV_ASSIGN_OR_RETURN(const ModelSlot slot, FindRegistered(tenant, model));
  NodeRef child = index_.model(slot).first_child;
  NodeRef parent_ref = 0;
  if (!parent.empty()) {
    const NodeRef ref = parent_ref = index_.FindById(parent);
    if (ref == 0 || index_.node(ref).model != slot) {
      return absl::NotFoundError("parent_id: no such trie node in this model");
    }
    child = index_.node(ref).first_child;
  }
  if (!after.empty()) {
    const NodeRef ref = index_.FindById(after);
    if (ref == 0 || index_.node(ref).model != slot || index_.parent(ref) != parent_ref) {
      return absl::NotFoundError("page_token: its trie node is gone; start again");
    }
    child = index_.node(ref).next_sibling;
  }
  for (; child != 0 && infos->size() < count; child = index_.node(child).next_sibling) {
    infos->push_back(Describe(child));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<NodeInfo>> Engine::Core::DescribePath(TenantId tenant,
                                                                 const Selection& selection) {
  if (selection.model || selection.all) {
    return absl::InvalidArgumentError("selection: a single path is described, not a whole model");
  }
  KV_ASSIGN_OR_RETURN(const auto nodes, SelectPath(tenant, selection));
  if (nodes.empty()) return NothingSelected();
  std::vector<NodeInfo> infos;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [ref, id] : nodes) {
      if (!index_.alive(ref) || index_.node(ref).id != id) break;
      infos.push_back(Describe(ref));
    }
  }
  DescribeOtherFrames(tenant, &infos);
  return infos;
}

EngineStats Engine::Core::Stats() {
  EngineStats stats;
  const EngineCounters& c = counters_;
  stats.lookups_total = c.lookups;
  stats.lookup_blocks_total = c.lookup_blocks;
  stats.lookup_hit_blocks_total = c.lookup_hit_blocks;
  stats.memory_reads_total = c.memory_reads;
  stats.disk_reads_total = c.disk_reads;
  stats.disk_read_bytes_total = c.disk_read_bytes;
  stats.missed_reads_total = c.missed_reads;
  stats.corrupt_frames_total = c.corrupt_frames;
  stats.read_errors_total = c.read_errors;
  stats.decoded_blocks_total = c.decoded_blocks;
  stats.undecoded_blocks_total = c.undecoded_blocks;
  stats.decode_errors_total = c.decode_errors;
  stats.undecodable_frames_total = c.undecodable_frames;
  stats.detached_blocks_total = c.detached_blocks;
  stats.lost_members_total = c.lost_members;
  stats.recoded_blocks_total = c.recoded_blocks;
  stats.recoded_raw_bytes_total = c.recoded_raw_bytes;
  stats.recoded_bytes_total = c.recoded_bytes;
  stats.recode_failed_blocks_total = c.recode_failed_blocks;
  stats.refined_blocks_total = c.refined_blocks;
  stats.recoded_again_blocks_total = c.recoded_again_blocks;
  stats.recode_seconds_total = static_cast<double>(c.recode_nanoseconds) * 1e-9;
  stats.decode_seconds_total = static_cast<double>(c.decode_nanoseconds) * 1e-9;
  if (codec_ != nullptr) {
    const BlockCodecStats codec = codec_->Stats();
    stats.missing_profiles_total = codec.missing_profiles_total;
    stats.unusable_profiles_total = codec.unusable_profiles_total;
    stats.codec_hits_total = codec.codecs.hits_total;
    stats.codec_builds_total = codec.codecs.builds_total;
    stats.codec_count = codec.codecs.codecs;
    stats.codec_bytes = codec.codecs.bytes;
  }
  stats.put_blocks_total = c.put_blocks;
  stats.stored_blocks_total = c.stored_blocks;
  stats.duplicate_blocks_total = c.duplicate_blocks;
  stats.failed_blocks_total = c.failed_blocks;
  stats.stored_bytes_total = c.stored_bytes;
  stats.raw_bytes_total = c.raw_bytes;
  stats.evicted_blocks_total = c.evicted_blocks;
  stats.evicted_frames_total = c.evicted_frames;
  stats.evicted_bytes_total = c.evicted_bytes;
  stats.expired_blocks_total = c.expired_blocks;
  stats.deleted_blocks_total = c.deleted_blocks;
  stats.refused_full_total = c.refused_full;
  stats.similar_queries_total = c.similar_queries;
  stats.similar_cut_short_total = c.similar_cut_short;
  stats.text_reuse_lookups_total = c.text_reuse_lookups;
  stats.text_reuse_forbidden_total = c.text_reuse_forbidden;
  stats.text_reuse_offered_tokens_total = c.text_reuse_offered_tokens;
  stats.token_cache_misses_total = c.token_cache_misses;
  stats.syncs_total = c.syncs;
  stats.sync_errors_total = c.sync_errors;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    stats.model_count = models_.size();
    stats.node_count = index_.node_count();
    for (std::size_t i = 0; i < index_.model_count(); ++i) {
      const ModelRoot& root = index_.model(static_cast<ModelSlot>(i));
      const auto model = models_.find(static_cast<ModelSlot>(i));
      if (model != models_.end()) {
        stats.raw_live_bytes += root.frame_count * model->second->geometry.raw_block_bytes();
        if (options_.recode_quality && ProfileToRecodeWith(static_cast<ModelSlot>(i))) {
          stats.recode_waiting_blocks += root.codable_node_count;
        }
      }
    }
    stats.recode_waiting_blocks += recode_again_waiting_;
    stats.live_bytes = census_.Total().bytes;
    for (const CodecId codec : kAllCodecs) {
      const FrameCensus::Usage usage = census_.OfCodec(codec);
      stats.codecs.push_back({codec, usage.frames, usage.bytes});
    }
    stats.index_bytes = index_.memory_bytes() + retention_.memory_bytes();
    stats.token_cache_bytes = index_.token_cache_bytes();
    stats.run_index_bytes = runs_->table().memory_bytes();
    stats.run_index_entries = runs_->table().size();
    stats.forgotten_runs_total = runs_->table().forgotten_total();
    stats.named_sessions = session_ends_.size();
    stats.group_count = groups_.group_count();
    stats.group_bytes = groups_.memory_bytes();
    stats.lease_count = holds_.lease_count();
    stats.reference_count = references_.size();
    stats.pin_count = holds_.pins().size();
    stats.pinned_bytes = holds_.pinned_bytes();
  }
  stats.profile_count = profiles_->count();
  stats.profile_bytes = profiles_->disk_bytes();
  stats.damaged_profiles_total = profiles_->damaged_total();
  stats.disk_bytes = DiskBytes();
  stats.disk_limit_bytes = options_.disk_limit_bytes;
  stats.segment_count = payload_->Usage().segment_count;
  stats.memory_tier_bytes = tier_.used_bytes();
  const MemoryTier::PrefetchStats prefetched = tier_.prefetch_stats();
  stats.prefetch_unasked_bytes = prefetched.unasked_bytes;
  stats.prefetch_useful_frames_total = prefetched.useful_frames;
  stats.prefetch_useful_bytes_total = prefetched.useful_bytes;
  stats.prefetch_wasted_frames_total = prefetched.wasted_frames;
  stats.prefetch_wasted_bytes_total = prefetched.wasted_bytes;
  if (prefetcher_ != nullptr) {
    const Prefetcher::Stats read_ahead = prefetcher_->stats();
    stats.prefetch_pending_bytes = read_ahead.pending_bytes;
    stats.prefetched_frames_total = read_ahead.frames;
    stats.prefetched_bytes_total = read_ahead.bytes;
    stats.prefetch_wasted_frames_total += read_ahead.late_frames;
    stats.prefetch_wasted_bytes_total += read_ahead.late_bytes;
  }
  stats.memory_tier_limit_bytes = options_.memory_tier_bytes;
  stats.prefaulted_bytes = prefaulted_bytes_;
  stats.put_memory_bytes = put_budget_.used_bytes();
  stats.open_puts = open_puts_;
  stats.io_queue_length =
      read_pool_->queue_length() + write_pool_->queue_length() + blocking_pool_->queue_length();
  stats.decode_queue_length = decode_pool_->queue_length();
  stats.degraded = DegradedReasons();
  absl::MutexLock lock(&sync_mutex_);
  stats.pending_free_bytes = pending_free_bytes_;
  return stats;
}

}  // namespace kvtrie
