#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "storage/base/file_system.h"
#include "storage/base/free_space.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// Nodes per batch when many are removed: bounds how long others wait for their turn.
constexpr std::size_t kRemovalsPerBatch = 1024;
// Session rows looked at in one round of maintenance.
constexpr std::size_t kSessionsPerRound = 1024;
// Leaves looked at for each one that is evicted.
constexpr int kEvictionSamples = 24;
// Uses older than this count for little against a fresh one.
constexpr double kRecencySeconds = 10;
// Prompt length at which attention costs as much as the rest of the model, roughly.
constexpr double kAttentionTokens = 4096;
// What a node without a frame counts for: its place in the index.
constexpr std::uint64_t kFramelessBytes = 4096;
// Kept so that removals can be written when the disk is full: as much as RocksDB wants to go on.
constexpr std::uint64_t kBallastBytesMax = std::uint64_t{16} << 20;

}  // namespace

std::uint64_t Engine::Core::DiskBytes() const {
  return payload_->Usage().disk_bytes + profiles_->disk_bytes() +
         meta_disk_bytes_.load(std::memory_order_relaxed);
}

std::vector<std::string> Engine::Core::DegradedReasons() const {
  static constexpr std::string_view kReasons[] = {"disk full",
                                                  "disk cannot be written",
                                                  "no space for metadata",
                                                  "metadata cannot be written",
                                                  "the last sync failed",
                                                  "other files fill the disk; the store shrinks"};
  std::vector<std::string> reasons;
  const unsigned bits = degraded_;
  for (std::size_t i = 0; i < std::size(kReasons); ++i) {
    if ((bits >> i & 1u) != 0) reasons.emplace_back(kReasons[i]);
  }
  return reasons;
}

void Engine::Core::SetDegraded(Degradation what, bool is_so) {
  const unsigned bit = 1u << static_cast<unsigned>(what);
  if (((degraded_.load(std::memory_order_relaxed) & bit) != 0) == is_so) return;
  if (is_so) {
    degraded_ |= bit;
  } else {
    degraded_ &= ~bit;
  }
}

absl::Status Engine::Core::WriteMeta(const MetaBatch& batch) {
  if (batch.empty()) return absl::OkStatus();
  const absl::Status status = meta_->Write(batch);
  SetDegraded(Degradation::kMetaDiskFull, absl::IsResourceExhausted(status));
  SetDegraded(Degradation::kMetaUnwritable, !status.ok() && !absl::IsResourceExhausted(status));
  dirty_.store(true, std::memory_order_relaxed);
  return status;
}

std::uint64_t Engine::Core::BallastBytes() const {
  return std::min(kBallastBytesMax, options_.disk_limit_bytes / 32);
}

void Engine::Core::KeepBallast() {
  if (ballast_there_) return;
  auto file = PosixFileSystem().Open(ballast_path(), FileSystem::Mode::kReadWrite, false);
  if (!file.ok()) {
    file = PosixFileSystem().Open(ballast_path(), FileSystem::Mode::kCreateNew, false);
  }
  if (!file.ok()) return;
  // One that was kept under a larger limit shrinks.
  if ((*file)->Allocate(0, BallastBytes()).ok() && (*file)->Truncate(BallastBytes()).ok()) {
    ballast_there_ = true;
  } else {
    PosixFileSystem().Remove(ballast_path()).IgnoreError();
  }
}

void Engine::Core::CountMetaBytes() {
  meta_disk_bytes_ = meta_->DiskBytes() + (ballast_there_ ? BallastBytes() : 0);
}

// Once a log has met a full disk, metadata takes nothing more until its buffers are written out,
// which needs as much again as the ballast.
bool Engine::Core::FitsTheDisk(std::uint64_t bytes) const {
  return FreeDiskBytes(options_.data_dir) >= bytes + BallastBytes();
}

bool Engine::Core::DropBallast() {
  if (!ballast_there_) return false;
  ballast_there_ = false;
  return PosixFileSystem().Remove(ballast_path()).ok();
}

absl::Status Engine::Core::MakeRoom(std::uint64_t bytes) {
  const std::uint64_t limit = options_.disk_limit_bytes;
  bool shrunk = false;
  // Evicting in strides keeps puts from waiting one by one.
  const std::uint64_t stride = std::max(bytes, std::min<std::uint64_t>(limit / 16, 64u << 20));
  absl::MutexLock room(&room_mutex_);
  while (true) {
    const std::uint64_t used = DiskBytes() + reserved_bytes_;
    std::uint64_t index_bytes;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      index_bytes = index_.used_bytes();
    }
    const bool index_fits = index_bytes < options_.index_bytes_max;
    const bool limit_fits = used + bytes + allocate_ahead_bytes_ <= limit && index_fits;
    const bool disk_fits = !limit_fits || FitsTheDisk(reserved_bytes_ + bytes);
    if (limit_fits) SetDegraded(Degradation::kDiskShared, !disk_fits);
    // What others fill cannot be evicted: one stride at a time, not all that there is.
    if (limit_fits && (shrunk || disk_fits)) {
      reserved_bytes_ += bytes;
      return absl::OkStatus();
    }
    std::uint64_t pending_bytes;
    {
      absl::MutexLock lock(&sync_mutex_);
      pending_bytes = pending_free_bytes_;
    }
    if (pending_bytes > 0 && index_fits) {
      KV_RETURN_IF_ERROR(SyncAndFree());
      continue;
    }
    if (!options_.eviction) {
      SetDegraded(Degradation::kDiskFull, limit_fits);
      return absl::ResourceExhaustedError(limit_fits
                                              ? absl::StrCat("the disk is full; eviction is off")
                                              : absl::StrCat("the store is full: ", used, " of ",
                                                             limit, " bytes; eviction is off"));
    }
    KV_ASSIGN_OR_RETURN(const std::uint64_t evicted,
                        Evict(limit_fits ? 4 * bytes : stride,
                              index_fits ? Victims::kFramesThenLeaves : Victims::kLeaves));
    shrunk = limit_fits;
    if (evicted == 0 && limit_fits) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the disk is full below the store's limit (", used, " of ", limit,
                       " bytes are used), and nothing can be evicted; free space on it"));
    }
    if (evicted == 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the store is full: ", used, " of ", limit,
                       " bytes, and pins, leases or puts under way hold all of it"));
    }
  }
}

// What losing these bytes of the node costs, per byte: how likely it is used again soon, times the
// time to compute it again.
double Engine::Core::RetentionValue(const IndexNode& node, std::uint64_t bytes,
                                    std::uint32_t now_seconds) const {
  const double idle_seconds =
      now_seconds > node.last_used_seconds ? now_seconds - node.last_used_seconds : 0;
  const double uses_per_second = (1.0 + node.use_count) / (idle_seconds + kRecencySeconds);
  const double block_tokens = index_.model(node.model).block_tokens;
  const double cost = block_tokens * (1 + node.depth * block_tokens / kAttentionTokens);
  return uses_per_second * cost / std::max<double>(1, static_cast<double>(bytes)) *
         static_cast<double>(1u << (2 * node.priority));
}

// Leaves first: a block without its prefix is of no use to anybody. Random sampling instead of an
// order that each read would have to maintain.
std::vector<NodeRef> Engine::Core::ChooseVictims(std::uint64_t bytes) {
  static thread_local absl::BitGen random;
  std::vector<NodeRef> victims;
  absl::flat_hash_set<NodeRef> chosen;
  const std::uint32_t now = NowSeconds();

  // The leaf under a node, when those chosen already are gone; 0 when something holds it.
  const auto leaf_under = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) -> NodeRef {
    while (true) {
      NodeRef child = index_.node(ref).first_child;
      while (child != 0 && chosen.contains(child)) child = index_.node(child).next_sibling;
      if (child == 0) return holds_.IsHeld(ref) ? 0 : ref;
      ref = child;
    }
  };
  const auto any_leaf = [&]() ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) -> NodeRef {
    for (NodeRef ref = 1; ref < index_.ref_end(); ++ref) {
      if (!index_.alive(ref) || chosen.contains(ref)) continue;
      if (const NodeRef leaf = leaf_under(ref); leaf != 0) return leaf;
    }
    return 0;
  };

  const auto disk_bytes = [&](const IndexNode& node) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return PayloadLocation::DiskBytes(StoredBytes(node));
  };
  std::uint64_t total_bytes = 0;
  while (total_bytes < bytes) {
    NodeRef best = 0;
    double best_value = std::numeric_limits<double>::infinity();
    for (int sample = 0; sample < kEvictionSamples && index_.ref_end() > 1; ++sample) {
      const NodeRef ref = absl::Uniform<NodeRef>(random, 1, index_.ref_end());
      if (!index_.alive(ref) || chosen.contains(ref)) continue;
      const NodeRef leaf = leaf_under(ref);
      if (leaf == 0) continue;
      const IndexNode& node = index_.node(leaf);
      if (const double value = RetentionValue(node, disk_bytes(node), now); value < best_value) {
        best = leaf;
        best_value = value;
      }
    }
    if (best == 0) best = any_leaf();
    if (best == 0) break;
    chosen.insert(best);
    victims.push_back(best);
    const IndexNode& node = index_.node(best);
    total_bytes += node.has_frame() ? disk_bytes(node) : kFramelessBytes;
  }
  return victims;
}

// Nodes with a second frame whose loss costs least: what is left of them still serves.
std::vector<NodeRef> Engine::Core::ChooseTwoFrameNodes(std::uint64_t bytes) {
  static thread_local absl::BitGen random;
  std::vector<NodeRef> chosen;
  std::uint64_t left = 0;
  for (std::size_t slot = 0; slot < index_.model_count(); ++slot) {
    left += index_.model(static_cast<ModelSlot>(slot)).other_frame_count;
  }
  if (left == 0) return chosen;
  const absl::flat_hash_set<NodeRef> held = HeldPaths();
  absl::flat_hash_set<NodeRef> taken;
  const std::uint32_t now = NowSeconds();
  const auto is_candidate = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return index_.alive(ref) && index_.node(ref).has_other() && !held.contains(ref) &&
           !taken.contains(ref);
  };
  std::uint64_t total_bytes = 0;
  for (; total_bytes < bytes && left > 0; --left) {
    NodeRef best = 0;
    double best_value = std::numeric_limits<double>::infinity();
    for (int sample = 0; sample < kEvictionSamples; ++sample) {
      const NodeRef ref = absl::Uniform<NodeRef>(random, 1, index_.ref_end());
      if (!is_candidate(ref)) continue;
      const IndexNode& node = index_.node(ref);
      const double value = RetentionValue(node, RawFrameBytes(node.model), now);
      if (value < best_value) {
        best = ref;
        best_value = value;
      }
    }
    // Where they are few, they are looked for in turn: once round for each eviction.
    for (NodeRef steps = index_.ref_end(); best == 0 && steps > 0; --steps) {
      if (two_frame_hand_ >= index_.ref_end()) two_frame_hand_ = 1;
      const NodeRef ref = two_frame_hand_++;
      if (is_candidate(ref)) best = ref;
    }
    if (best == 0) break;
    taken.insert(best);
    chosen.push_back(best);
    total_bytes += PayloadLocation::DiskBytes(RawFrameBytes(index_.node(best).model));
  }
  return chosen;
}

absl::StatusOr<std::uint64_t> Engine::Core::Evict(std::uint64_t bytes, Victims which) {
  absl::MutexLock change(&change_mutex_);
  std::uint64_t freed_bytes = 0;
  if (which == Victims::kFramesThenLeaves) {
    std::vector<NodeRef> nodes;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      nodes = ChooseTwoFrameNodes(bytes);
    }
    KV_RETURN_IF_ERROR(DropOtherFrames(nodes, &freed_bytes));
    if (freed_bytes >= bytes) return freed_bytes;
    bytes -= freed_bytes;
  }
  std::vector<NodeRef> victims;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    victims = ChooseVictims(bytes);
  }
  DeletedCount count;
  KV_RETURN_IF_ERROR(Unlink(victims, RemovalReason::kEvicted, &count));
  freed_bytes += count.bytes;
  return count.blocks == 0 ? freed_bytes : std::max<std::uint64_t>(freed_bytes, 1);
}

absl::Status Engine::Core::DropOtherFrames(const std::vector<NodeRef>& refs,
                                           std::uint64_t* freed_bytes) {
  struct Dropped {
    NodeRef ref;
    NodeRow row;  // without it
    RungRow rung;
  };
  for (std::size_t begin = 0; begin < refs.size(); begin += kRemovalsPerBatch) {
    std::vector<Dropped> drops;
    std::map<TenantId, MetaBatch> batches;
    for (const NodeRef ref :
         std::span(refs).subspan(begin, std::min(kRemovalsPerBatch, refs.size() - begin))) {
      NodeRowKey key;
      FrameRef kept;
      {
        absl::ReaderMutexLock lock(&index_mutex_);
        const IndexNode& node = index_.node(ref);
        key = {index_.model(node.model).tenant, node.id};
        kept = node.frame;
      }
      auto row = ReadRow(key.tenant, key.node);
      if (!row.ok()) continue;  // the next start drops it
      const auto other = std::find_if(
          row->rungs.begin(), row->rungs.end(),
          [&kept](const RungRow& rung) { return !(LocationOf(rung) == LocationOf(kept)); });
      if (other == row->rungs.end()) continue;
      const RungRow rung = *other;
      row->rungs.erase(other);
      batches.try_emplace(key.tenant, key.tenant)
          .first->second.Put(MetaTable::kNodes, key.Encode(), row->Encode());
      drops.push_back({ref, *std::move(row), rung});
    }
    for (const auto& [tenant, batch] : batches) KV_RETURN_IF_ERROR(WriteRemoval(batch));
    std::vector<PayloadLocation> frees;
    {
      absl::MutexLock lock(&index_mutex_);
      for (const Dropped& drop : drops) {
        index_.SetFrames(drop.ref, FramesOf(drop.row));
        census_.Remove(index_.node(drop.ref).model, drop.rung);
        frees.push_back(LocationOf(drop.rung));
      }
    }
    counters_.evicted_frames += frees.size();
    for (const PayloadLocation& at : frees) {
      counters_.evicted_bytes += at.disk_bytes();
      *freed_bytes += at.disk_bytes();
    }
    FreeLater(frees);
  }
  return absl::OkStatus();
}

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
    const bool may_name_a_profile =
        node.codec() == CodecId::kResidual || node.codec() == CodecId::kLossless;
    is_all = !node.has_other() && !may_name_a_profile;
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
          census_.Remove(node.model, rung);
          frees.push_back(LocationOf(rung));
        }
        for (const PinId& pin : holds_.PinsOn(ref)) holds_.DropPin(pin);
        holds_.Forget(ref);
        index_.Erase(ref);
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

  absl::MutexLock change(&change_mutex_);
  std::vector<NodeRef> refs;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
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
      if (!index_.alive(ref) || index_.node(ref).id != id) return count;
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
  }
  KV_RETURN_IF_ERROR(Unlink(refs, RemovalReason::kDeleted, &count));
  if (!selection.session_id.empty()) {
    MetaBatch batch(tenant);
    batch.Delete(MetaTable::kSessions,
                 SessionRowKey{tenant, std::string(selection.session_id)}.Encode());
    KV_RETURN_IF_ERROR(WriteMeta(batch));
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
  NodeRef ref;
  TenantId tenant;
  bool is_leaf;
  bool is_in_index;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    ref = index_.FindById(frame.node);
    if (ref == 0) return;
    const IndexNode& node = index_.node(ref);
    is_in_index = node.has_frame() && LocationOf(node.frame) == frame.at;
    if (!is_in_index && !node.has_other()) return;
    tenant = index_.model(node.model).tenant;
    is_leaf = node.is_leaf();
  }
  const auto old_rungs = RungsOf(ref);
  const auto bad = std::find_if(old_rungs.begin(), old_rungs.end(), [&frame](const RungRow& rung) {
    return LocationOf(rung) == frame.at;
  });
  if (bad == old_rungs.end()) return;
  if (is_leaf && old_rungs.size() == 1) {
    DeletedCount count;
    Unlink({ref}, RemovalReason::kCorrupt, &count).IgnoreError();
    return;
  }
  // What hangs on it is good, and useful again once somebody puts this block again.
  NodeFrames frames;
  if (auto row = ReadRow(tenant, frame.node); row.ok()) {
    std::erase_if(row->rungs,
                  [&frame](const RungRow& rung) { return LocationOf(rung) == frame.at; });
    MetaBatch batch(tenant);
    batch.Put(MetaTable::kNodes, NodeRowKey{tenant, frame.node}.Encode(), row->Encode());
    if (!WriteMeta(batch).ok()) return;
    frames = FramesOf(*row);
  }
  {
    absl::MutexLock lock(&index_mutex_);
    index_.SetFrames(ref, frames);
    census_.Remove(index_.node(ref).model, *bad);
  }
  FreeLater({frame.at});
}

absl::flat_hash_set<NodeRef> Engine::Core::HeldPaths() const {
  absl::flat_hash_set<NodeRef> paths;
  for (const NodeRef held : holds_.HeldNodes()) {
    for (NodeRef at = held; at != 0 && paths.insert(at).second;) at = index_.parent(at);
  }
  return paths;
}

void Engine::Core::ExpireNodes() {
  absl::MutexLock change(&change_mutex_);
  std::vector<NodeRef> refs;
  std::vector<Expiry> roots;
  std::vector<Expiry> later;
  {
    absl::MutexLock lock(&index_mutex_);
    const std::uint32_t now = NowSeconds();
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
      roots.emplace_back(now + 1, id);
      std::vector<NodeRef> subtree;
      CollectSubtree(root, &subtree);
      for (const NodeRef ref : subtree) {
        if (taken.insert(ref).second) refs.push_back(ref);
      }
    }
  }
  DeletedCount count;
  if (!Unlink(refs, RemovalReason::kExpired, &count).ok()) {
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

absl::Status Engine::Core::SyncAndFree() {
  absl::MutexLock syncing(&syncing_mutex_);
  std::vector<Outcome> waiters;
  std::vector<PayloadLocation> frees;
  {
    absl::MutexLock lock(&sync_mutex_);
    waiters.swap(durable_waiters_);
    frees.swap(pending_frees_);
  }
  if (waiters.empty() && frees.empty() && !dirty_.exchange(false)) return absl::OkStatus();
  dirty_ = false;
  // Payload first: a row that is durable names payload that is.
  absl::Status status = payload_->Sync();
  if (status.ok()) status = meta_->Sync();
  if (absl::IsResourceExhausted(status)) {
    bool dropped;
    {
      absl::MutexLock change(&change_mutex_);
      dropped = DropBallast();
    }
    if (dropped) status = meta_->Sync();
  }
  counters_.syncs.fetch_add(1, std::memory_order_relaxed);
  SetDegraded(Degradation::kNotSynced, !status.ok());
  if (!status.ok()) {
    counters_.sync_errors.fetch_add(1, std::memory_order_relaxed);
    dirty_ = true;
    absl::MutexLock lock(&sync_mutex_);
    pending_frees_.insert(pending_frees_.end(), frees.begin(), frees.end());
  } else {
    std::uint64_t freed_bytes = 0;
    for (const PayloadLocation& at : frees) {
      payload_->Free(at);
      freed_bytes += at.disk_bytes();
    }
    absl::MutexLock lock(&sync_mutex_);
    pending_free_bytes_ -= freed_bytes;
  }
  for (Outcome& waiter : waiters) {
    if (!status.ok()) waiter.result = status;
    waiter.on_done(std::move(waiter.result));
  }
  return status;
}

void Engine::Core::RunMaintenance() {
  {
    absl::MutexLock lock(&index_mutex_);
    holds_.DropEndedLeases(clock_.Monotonic());
  }
  DropEndedPins();
  ExpireNodes();
  SweepSessions();
  {
    absl::MutexLock change(&change_mutex_);
    KeepBallast();
    CountMetaBytes();
  }
  SyncAndFree().IgnoreError();  // counted, and shown as degraded
  const std::uint64_t used = DiskBytes();
  if (options_.eviction && used > options_.disk_limit_bytes) {
    if (Evict(used - options_.disk_limit_bytes, Victims::kFramesThenLeaves).ok()) {
      SyncAndFree().IgnoreError();
    }
  }
}

void Engine::Core::RunSyncer() {
  const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(sync_mutex_) {
    return ending_ || !durable_waiters_.empty();
  };
  auto next_round = std::chrono::steady_clock::now() + options_.sync_interval;
  while (true) {
    {
      absl::MutexLock lock(&sync_mutex_);
      const auto wait = next_round - std::chrono::steady_clock::now();
      sync_mutex_.AwaitWithTimeout(absl::Condition(&due), absl::FromChrono(wait));
      if (ending_) return;
    }
    if (std::chrono::steady_clock::now() < next_round) {
      SyncAndFree().IgnoreError();  // those who wait are told
      continue;
    }
    RunMaintenance();
    next_round = std::chrono::steady_clock::now() + options_.sync_interval;
  }
}

}  // namespace kvtrie
