#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// Session rows looked at in one round of maintenance.
constexpr std::size_t kSessionsPerRound = 1024;
// How long a block that ends, or is deleted, waits for those that were coded against it.
constexpr std::uint32_t kDetachSecondsMax = 60;

}  // namespace

// The rungs that a row would say, for nodes of which the index knows all; from the row for others.
std::vector<RungRow> Engine::Core::RungsOf(NodeRef ref) {
  NodeRowKey key;
  RungRow in_index;
  bool is_all;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    const IndexNode& node = index_.node(ref);
    if (!node.has_frame()) return {};
    key = {index_.model(node.model).tenant, node.id};
    in_index = {.rung = RungOf(node.codec()),
                .quality = node.quality(),
                .codec = node.codec(),
                .segment = node.frame.segment,
                .offset_units = node.frame.offset_units,
                .record_bytes = node.frame.record_bytes};
    const bool names_others = node.codec() == CodecId::kResidual ||
                              node.codec() == CodecId::kLossless ||
                              node.codec() == CodecId::kReferenced;
    is_all = !node.has_other() && !names_others;
  }
  if (is_all) return {in_index};
  const auto row = ReadRow(key.tenant, key.node);
  // What is not known stays where it is until the next start, which frees what no row names.
  return row.ok() ? row->rungs : std::vector<RungRow>{in_index};
}

void Engine::Core::FreeLater(const std::vector<PayloadLocation>& locations) {
  std::uint64_t bytes = 0;
  for (const PayloadLocation& at : locations) {
    tier_.Erase(at);
    bytes += at.disk_bytes();
  }
  absl::MutexLock lock(&sync_mutex_);
  pending_frees_.insert(pending_frees_.end(), locations.begin(), locations.end());
  pending_free_bytes_ += bytes;
}

absl::Status Engine::Core::WriteRemoval(const MetaBatch& batch) {
  absl::Status status = WriteMeta(batch);
  if (absl::IsResourceExhausted(status) && DropBallast()) status = WriteMeta(batch);
  return status;
}

void Engine::Core::CollectSubtree(NodeRef root, std::vector<NodeRef>* children_first) const {
  const std::size_t begin = children_first->size();
  children_first->push_back(root);
  for (std::size_t at = begin; at < children_first->size(); ++at) {
    for (NodeRef child = index_.node((*children_first)[at]).first_child; child != 0;
         child = index_.node(child).next_sibling) {
      children_first->push_back(child);
    }
  }
  std::reverse(children_first->begin() + static_cast<std::ptrdiff_t>(begin), children_first->end());
}

absl::Status Engine::Core::Unlink(const std::vector<NodeRef>& refs, RemovalReason reason,
                                  DeletedCount* count) {
  for (std::size_t begin = 0; begin < refs.size(); begin += kRemovalsPerBatch) {
    const auto piece =
        std::span(refs).subspan(begin, std::min(kRemovalsPerBatch, refs.size() - begin));
    std::map<TenantId, MetaBatch> batches;
    std::vector<std::vector<RungRow>> rungs;  // of each node
    for (const NodeRef ref : piece) rungs.push_back(RungsOf(ref));
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      for (const NodeRef ref : piece) {
        const IndexNode& node = index_.node(ref);
        const TenantId tenant = index_.model(node.model).tenant;
        MetaBatch& batch = batches.try_emplace(tenant, tenant).first->second;
        batch.Delete(MetaTable::kNodes, NodeRowKey{tenant, node.id}.Encode());
        for (const PinId& pin : holds_.PinsOn(ref)) {
          batch.Delete(MetaTable::kPins, PinRowKey{tenant, pin}.Encode());
        }
      }
    }
    for (const auto& [tenant, batch] : batches) KV_RETURN_IF_ERROR(WriteRemoval(batch));

    std::vector<StoreEvent> events;
    std::vector<PayloadLocation> frees;
    {
      absl::MutexLock lock(&index_mutex_);
      const std::uint32_t now = NowSeconds();
      for (std::size_t i = 0; i < piece.size(); ++i) {
        const NodeRef ref = piece[i];
        const IndexNode& node = index_.node(ref);
        const NodeRef parent = index_.parent(ref);
        events.push_back({.kind = StoreEventKind::kRemoved,
                          .tenant = index_.model(node.model).tenant,
                          .model = index_.model(node.model).model,
                          .node = node.id,
                          .parent = parent == 0 ? TrieNodeId{} : index_.node(parent).id,
                          .depth = node.depth,
                          .tokens = {}});
        for (const RungRow& rung : rungs[i]) {
          UncountFrame(ref, rung);
          frees.push_back(LocationOf(rung));
        }
        for (const PinId& pin : holds_.PinsOn(ref)) holds_.DropPin(pin);
        holds_.Forget(ref);
        session_ends_.RemoveAt(ref);
        runs_->Remove(index_, ref);
        groups_.OnErasing(ref);
        retention_.BeforeErase(ref, reason == RemovalReason::kEvicted, now);
        index_.Erase(ref);
        retention_.AfterErase(parent);
      }
    }
    sweep_sessions_ = true;
    count->blocks += piece.size();
    std::uint64_t freed_bytes = 0;
    for (const PayloadLocation& at : frees) freed_bytes += at.disk_bytes();
    count->bytes += freed_bytes;
    switch (reason) {
      case RemovalReason::kEvicted:
        counters_.evicted_blocks += piece.size();
        counters_.evicted_bytes += freed_bytes;
        break;
      case RemovalReason::kExpired:
        counters_.expired_blocks += piece.size();
        break;
      case RemovalReason::kDeleted:
        counters_.deleted_blocks += piece.size();
        break;
      case RemovalReason::kCorrupt:
        break;  // counted where it was found
    }
    FreeLater(frees);
    events_.Append(std::move(events));
  }
  return absl::OkStatus();
}

// The nodes of exactly this path, those without a frame too, which no walk passes. Empty: the last
// one is not there.
absl::StatusOr<std::vector<std::pair<NodeRef, TrieNodeId>>> Engine::Core::NamedPath(
    TenantId tenant, const PathView& path) {
  KV_ASSIGN_OR_RETURN(const ModelInfo model, GetModel(tenant, path.model));
  const HashedPath hashed(*hasher_, tenant, path, model.spec.block_tokens);
  std::vector<std::pair<NodeRef, TrieNodeId>> nodes;
  absl::ReaderMutexLock lock(&index_mutex_);
  TrieNodeId id;
  Provenance provenance = Provenance::kExact;
  for (std::uint32_t index = 0; index < hashed.block_count(); ++index) {
    const auto find = [&]() ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      id = namer_->Name(path.model, nodes.empty() ? TrieNodeId{} : nodes.back().second, provenance,
                        index == 0 ? path.salt : std::string_view(), hashed.extra_key(index),
                        hashed.tokens(index));
      return index_.FindById(id);
    };
    NodeRef ref = find();
    if (ref == 0 && provenance == Provenance::kExact) {
      // Once on lossy KV, a path stays so.
      provenance = Provenance::kOnLossy;
      ref = find();
    }
    if (ref == 0) return std::vector<std::pair<NodeRef, TrieNodeId>>();
    nodes.emplace_back(ref, id);
  }
  return nodes;
}

// The nodes of `path` at which sessions with another name end.
absl::StatusOr<absl::flat_hash_set<TrieNodeId>> Engine::Core::EndsOfOtherSessions(
    TenantId tenant, std::string_view session_id,
    const std::vector<std::pair<NodeRef, TrieNodeId>>& path) {
  absl::flat_hash_set<TrieNodeId> on_path;
  for (const auto& [ref, id] : path) on_path.insert(id);
  const std::string own_key = SessionRowKey{tenant, std::string(session_id)}.Encode();
  absl::flat_hash_set<TrieNodeId> ends;
  KV_RETURN_IF_ERROR(meta_->Scan(MetaTable::kSessions, TenantPrefix(tenant), "",
                                 [&](std::string_view row_key, std::string_view row_value) {
                                   const auto end = TrieNodeId::FromBytes(row_value);
                                   if (end && row_key != own_key && on_path.contains(*end)) {
                                     ends.insert(*end);
                                   }
                                   return true;
                                 }));
  return ends;
}

// With all below them, children first.
std::vector<NodeRef> Engine::Core::SelectedNodes(
    TenantId tenant, const Selection& selection,
    const std::vector<std::pair<NodeRef, TrieNodeId>>& path,
    const absl::flat_hash_set<TrieNodeId>& other_ends) const {
  std::vector<NodeRef> refs;
  if (selection.model || selection.all) {
    for (std::size_t i = 0; i < index_.model_count(); ++i) {
      const auto slot = static_cast<ModelSlot>(i);
      if (index_.model(slot).tenant != tenant) continue;
      if (selection.model && index_.model(slot).model != *selection.model) continue;
      for (NodeRef child = index_.model(slot).first_child; child != 0;
           child = index_.node(child).next_sibling) {
        CollectSubtree(child, &refs);
      }
    }
  } else {
    const auto& [ref, id] = path.back();
    if (!index_.alive(ref) || index_.node(ref).id != id) return refs;
    if (selection.node || selection.path) {
      CollectSubtree(ref, &refs);
    } else if (index_.node(ref).is_leaf()) {
      // A session: upwards from its end, as far as no other path goes through or ends.
      for (NodeRef at = ref; at != 0; at = index_.parent(at)) {
        if (other_ends.contains(index_.node(at).id)) break;
        refs.push_back(at);
        const NodeRef parent = index_.parent(at);
        if (parent != 0 &&
            (index_.node(parent).first_child != at || index_.node(at).next_sibling != 0)) {
          break;
        }
      }
    }
  }
  if (selection.unused_for.count() > 0) {
    const std::uint32_t now = NowSeconds();
    absl::flat_hash_set<NodeRef> kept;
    std::erase_if(refs, [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      const IndexNode& node = index_.node(ref);
      const bool recent = now < node.last_used_seconds + selection.unused_for.count();
      if (!recent && !kept.contains(ref)) return false;
      if (const NodeRef parent = index_.parent(ref); parent != 0) kept.insert(parent);
      return true;
    });
  }
  return refs;
}

absl::StatusOr<DeletedCount> Engine::Core::Delete(TenantId tenant, const Selection& selection) {
  // One path: found before the lock, since comparing tokens may read rows.
  std::vector<std::pair<NodeRef, TrieNodeId>> path;
  DeletedCount count;
  if (!selection.model && !selection.all) {
    KV_ASSIGN_OR_RETURN(
        path, selection.path ? NamedPath(tenant, *selection.path) : SelectPath(tenant, selection));
    if (path.empty()) return count;
  }
  absl::flat_hash_set<TrieNodeId> other_ends;
  if (!selection.session_id.empty()) {
    KV_ASSIGN_OR_RETURN(other_ends, EndsOfOtherSessions(tenant, selection.session_id, path));
  }

  // What others outside were coded against goes once they are coded anew; those that cannot be, or
  // not in time, go too. Nothing new is coded against it meanwhile.
  const Clock::Duration until = clock_.Monotonic() + std::chrono::seconds(kDetachSecondsMax);
  absl::flat_hash_set<TrieNodeId> tried;
  std::vector<TrieNodeId> leaving;
  const auto keep_no_longer = absl::MakeCleanup([&] {
    absl::MutexLock lock(&index_mutex_);
    for (const TrieNodeId& node : leaving) leaving_.erase(node);
  });
  while (true) {
    std::vector<TrieNodeId> untried;
    {
      absl::MutexLock change(&change_mutex_);
      std::vector<NodeRef> refs;
      std::vector<TrieNodeId> members;
      {
        absl::ReaderMutexLock lock(&index_mutex_);
        refs = SelectedNodes(tenant, selection, path, other_ends);
        members = MembersOutside(refs);
      }
      std::copy_if(members.begin(), members.end(), std::back_inserter(untried),
                   [&tried](const TrieNodeId& member) { return !tried.contains(member); });
      if (untried.empty() || clock_.Monotonic() >= until) {
        KV_RETURN_IF_ERROR(DropMemberFrames(members));
        KV_RETURN_IF_ERROR(Unlink(refs, RemovalReason::kDeleted, &count));
        break;
      }
      absl::MutexLock lock(&index_mutex_);
      for (const NodeRef ref : refs) {
        const TrieNodeId& node = index_.node(ref).id;
        if (leaving_.insert(node).second) leaving.push_back(node);
      }
    }
    for (const TrieNodeId& member : untried) {
      if (clock_.Monotonic() >= until) break;
      tried.insert(member);
      Detach(member);
    }
  }
  if (!selection.session_id.empty()) {
    absl::MutexLock change(&change_mutex_);
    MetaBatch batch(tenant);
    batch.Delete(MetaTable::kSessions,
                 SessionRowKey{tenant, std::string(selection.session_id)}.Encode());
    const auto moves = FindMoves({{{tenant, std::string(selection.session_id)}, TrieNodeId{}}});
    KV_RETURN_IF_ERROR(WriteMeta(batch));
    absl::MutexLock lock(&index_mutex_);
    MoveSessions(moves);
  }
  return count;
}

void Engine::Core::OnDamagedFrame(const StoredFrame& frame, const absl::Status& why) {
  counters_.corrupt_frames.fetch_add(1, std::memory_order_relaxed);
  if (const auto held_back = damage_lines_.Admit(clock_.Monotonic())) {
    spdlog::warn(
        "block {}: its frame in segment {} at byte {} is damaged and dropped: {}{}",
        frame.node.ToHex(), frame.at.segment,
        std::uint64_t{frame.at.offset_units} * PayloadLocation::kUnitBytes,
        std::string(why.message()),
        *held_back == 0 ? "" : absl::StrCat(" (", *held_back, " more since the last line)"));
  }
  DropDamagedFrame(frame);
}

void Engine::Core::DropDamagedFrame(const StoredFrame& frame) {
  absl::MutexLock change(&change_mutex_);
  std::vector<TrieNodeId> members;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    // Its digest would tell them anyway; what they hold is of no use any more.
    if (references_.IsReferenced(frame.node, frame.rung)) {
      members = references_.MembersOf(frame.node);
    }
  }
  // What could not be written is found damaged, or to name what is gone, again.
  DropFrame(frame).IgnoreError();
  DropMemberFrames(members).IgnoreError();
}

absl::Status Engine::Core::DropFrame(const StoredFrame& frame) {
  NodeRef ref;
  TenantId tenant;
  bool is_leaf;
  bool is_in_index;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    ref = index_.FindById(frame.node);
    if (ref == 0) return absl::OkStatus();
    const IndexNode& node = index_.node(ref);
    is_in_index = node.has_frame() && LocationOf(node.frame) == frame.at;
    if (!is_in_index && !node.has_other()) return absl::OkStatus();
    tenant = index_.model(node.model).tenant;
    is_leaf = node.is_leaf();
  }
  const auto old_rungs = RungsOf(ref);
  const auto bad = std::find_if(old_rungs.begin(), old_rungs.end(), [&frame](const RungRow& rung) {
    return LocationOf(rung) == frame.at;
  });
  if (bad == old_rungs.end()) return absl::OkStatus();
  if (is_leaf && old_rungs.size() == 1) {
    DeletedCount count;
    return Unlink({ref}, RemovalReason::kCorrupt, &count);
  }
  // What hangs on it is good, and useful again once somebody puts this block again.
  NodeFrames frames;
  if (auto row = ReadRow(tenant, frame.node); row.ok()) {
    std::erase_if(row->rungs,
                  [&frame](const RungRow& rung) { return LocationOf(rung) == frame.at; });
    MetaBatch batch(tenant);
    batch.Put(MetaTable::kNodes, NodeRowKey{tenant, frame.node}.Encode(), row->Encode());
    KV_RETURN_IF_ERROR(WriteRemoval(batch));
    frames = FramesOf(*row);
  }
  {
    absl::MutexLock lock(&index_mutex_);
    index_.SetFrames(ref, frames);
    UncountFrame(ref, *bad);
  }
  FreeLater({frame.at});
  return absl::OkStatus();
}

void Engine::Core::ExpireNodes() {
  absl::MutexLock change(&change_mutex_);
  std::vector<NodeRef> refs;
  std::vector<Expiry> roots;
  std::vector<Expiry> later;
  std::vector<TrieNodeId> lost_members;
  {
    absl::MutexLock lock(&index_mutex_);
    const std::uint32_t now = NowSeconds();
    const auto has_ended = [&](const TrieNodeId& member) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
      return index_.node(index_.FindById(member)).expired(now);
    };
    absl::flat_hash_set<NodeRef> taken;
    std::optional<absl::flat_hash_set<NodeRef>> held_paths;
    while (!expiries_.empty() && expiries_.top().first <= now) {
      const TrieNodeId id = expiries_.top().second;
      expiries_.pop();
      const NodeRef root = index_.FindById(id);
      if (root == 0 || !index_.node(root).expired(now) || taken.contains(root)) continue;
      if (!held_paths) held_paths = HeldPaths();
      if (held_paths->contains(root)) {
        later.emplace_back(now + 1, id);  // nobody finds it any more; readers may finish
        continue;
      }
      std::vector<NodeRef> subtree;
      CollectSubtree(root, &subtree);
      // What others were coded against goes once they are coded anew, or had time enough to be.
      std::vector<TrieNodeId> members = MembersOutside(subtree);
      std::erase_if(members, has_ended);
      if (!members.empty() && now < index_.node(root).expires_seconds + kDetachSecondsMax) {
        later.emplace_back(now + 1, id);
        to_detach_.insert(members.begin(), members.end());
        continue;
      }
      roots.emplace_back(now + 1, id);
      for (const NodeRef ref : subtree) {
        if (taken.insert(ref).second) refs.push_back(ref);
      }
    }
    lost_members = MembersOutside(refs);
  }
  DeletedCount count;
  if (!DropMemberFrames(lost_members).ok() || !Unlink(refs, RemovalReason::kExpired, &count).ok()) {
    later.insert(later.end(), roots.begin(), roots.end());  // tried again
  }
  absl::MutexLock lock(&index_mutex_);
  for (const Expiry& expiry : later) expiries_.push(expiry);
}

void Engine::Core::DropEndedPins() {
  absl::MutexLock change(&change_mutex_);
  std::map<TenantId, MetaBatch> batches;
  std::vector<PinId> ended;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    ended = holds_.EndedPins(clock_.UnixSeconds());
    for (const PinId& id : ended) {
      const TenantId tenant = holds_.pins().find(id)->second.tenant;
      batches.try_emplace(tenant, tenant)
          .first->second.Delete(MetaTable::kPins, PinRowKey{tenant, id}.Encode());
    }
  }
  // A row that stays behind is dropped at the next start: its end has passed.
  for (const auto& [tenant, batch] : batches) WriteMeta(batch).IgnoreError();
  absl::MutexLock lock(&index_mutex_);
  for (const PinId& id : ended) holds_.DropPin(id);
}

// Nodes do not know who is named after them, so rows of sessions whose last block is gone are
// looked for, a few in each round.
void Engine::Core::SweepSessions() {
  absl::MutexLock change(&change_mutex_);
  if (session_cursor_.empty() && !std::exchange(sweep_sessions_, false)) return;
  std::vector<std::pair<std::string, TrieNodeId>> rows;
  const absl::Status scanned = meta_->Scan(
      MetaTable::kSessions, "", session_cursor_, [&](std::string_view key, std::string_view value) {
        rows.emplace_back(key, TrieNodeId::FromBytes(value).value_or(TrieNodeId{}));
        return rows.size() < kSessionsPerRound;
      });
  // The key behind the last one.
  session_cursor_ =
      scanned.ok() && rows.size() == kSessionsPerRound ? rows.back().first + '\0' : "";
  std::map<TenantId, MetaBatch> batches;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    for (const auto& [key, node] : rows) {
      const auto row_key = SessionRowKey::Decode(key);
      if (!row_key || index_.FindById(node) != 0) continue;
      batches.try_emplace(row_key->tenant, row_key->tenant)
          .first->second.Delete(MetaTable::kSessions, key);
    }
  }
  // What stays behind is found by the next sweep.
  for (const auto& [tenant, batch] : batches) WriteMeta(batch).IgnoreError();
}

}  // namespace kvtrie
