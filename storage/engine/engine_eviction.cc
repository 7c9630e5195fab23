#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "storage/base/status_macros.h"
#include "storage/engine/engine_core.h"
#include "storage/meta/meta_keys.h"

namespace kvtrie {
namespace {

// Nodes looked at for each one that loses a frame.
constexpr int kFrameLooks = 24;
// What a node without a frame counts for: its place in the index.
constexpr std::uint64_t kFramelessBytes = 4096;

}  // namespace

std::vector<NodeRef> Engine::Core::ChooseVictims(std::uint64_t bytes, std::uint64_t nodes) {
  const auto choose =
      [&](const std::function<bool(const TrieNodeId&)>& is_needed)
          ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
            return retention_.ChooseVictims(
                bytes, nodes, NowSeconds(),
                [this](const IndexNode& node) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                  return node.has_frame() ? PayloadLocation::DiskBytes(StoredBytes(node))
                                          : kFramelessBytes;
                },
                [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                  return holds_.IsHeld(ref) || is_needed(index_.node(ref).id);
                });
          };
  std::vector<NodeRef> victims =
      choose([this](const TrieNodeId& node) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
        return references_.IsReferenced(node);
      });
  if (!victims.empty() || references_.size() == 0) return victims;
  // Leaves that are all references of one another's paths would fill the store for good. What is
  // held stays, and what it was coded against.
  const absl::flat_hash_set<NodeRef> held = HeldPaths();
  return choose([&](const TrieNodeId& node) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    const std::vector<TrieNodeId> members = references_.MembersOf(node);
    return std::any_of(members.begin(), members.end(),
                       [&](const TrieNodeId& member) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
                         return held.contains(index_.FindById(member));
                       });
  });
}

// Nodes with a second frame whose loss costs least: what is left of them still serves.
std::vector<NodeRef> Engine::Core::ChooseTwoFrameNodes(std::uint64_t bytes) {
  std::vector<NodeRef> chosen;
  std::uint64_t left = 0;
  for (std::size_t slot = 0; slot < index_.model_count(); ++slot) {
    left += index_.model(static_cast<ModelSlot>(slot)).other_frame_count;
  }
  if (left == 0) return chosen;
  const absl::flat_hash_set<NodeRef> held = HeldPaths();
  absl::flat_hash_set<NodeRef> taken;
  const std::uint32_t now = NowSeconds();
  const auto other_rung = [this](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return RungOf(index_.node(ref).codec()) == Rung::kExact ? Rung::kCoded : Rung::kExact;
  };
  const auto is_candidate = [&](NodeRef ref) ABSL_SHARED_LOCKS_REQUIRED(index_mutex_) {
    return index_.alive(ref) && index_.node(ref).has_other() && !held.contains(ref) &&
           !taken.contains(ref) && !references_.IsReferenced(index_.node(ref).id, other_rung(ref));
  };
  std::uint64_t total_bytes = 0;
  for (; total_bytes < bytes && left > 0; --left) {
    NodeRef best = 0;
    double best_value = std::numeric_limits<double>::infinity();
    for (int sample = 0; sample < kFrameLooks; ++sample) {
      frame_random_ = frame_random_ * 6364136223846793005u + 1442695040888963407u;
      const auto ref = static_cast<NodeRef>(1 + (frame_random_ >> 33) % (index_.ref_end() - 1));
      if (!is_candidate(ref)) continue;
      const IndexNode& node = index_.node(ref);
      const double value = retention_.Value(node, RawFrameBytes(node.model), now);
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

absl::flat_hash_set<NodeRef> Engine::Core::HeldPaths() const {
  absl::flat_hash_set<NodeRef> paths;
  for (const NodeRef held : holds_.HeldNodes()) {
    for (NodeRef at = held; at != 0 && paths.insert(at).second;) at = index_.parent(at);
  }
  return paths;
}

absl::StatusOr<std::uint64_t> Engine::Core::Evict(std::uint64_t bytes, std::uint64_t nodes) {
  absl::MutexLock change(&change_mutex_);
  std::uint64_t freed_bytes = 0;
  if (bytes > 0) {
    std::vector<NodeRef> with_two;
    {
      absl::ReaderMutexLock lock(&index_mutex_);
      with_two = ChooseTwoFrameNodes(bytes);
    }
    KV_RETURN_IF_ERROR(DropOtherFrames(with_two, &freed_bytes));
    if (freed_bytes >= bytes) return freed_bytes;
    bytes -= freed_bytes;
  }
  std::vector<NodeRef> victims;
  std::vector<TrieNodeId> members;
  {
    absl::ReaderMutexLock lock(&index_mutex_);
    victims = ChooseVictims(bytes, nodes);
    members = MembersOutside(victims);
  }
  KV_RETURN_IF_ERROR(DropMemberFrames(members));
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
        UncountFrame(drop.ref, drop.rung);
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

}  // namespace kvtrie
