#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/base/clock.h"
#include "storage/kv/ids.h"
#include "storage/trie/trie_index.h"

namespace kvtrie {

// What keeps nodes from eviction: leases of readers, pins of operators, puts under way. Eviction
// takes leaves only, so holding the deepest block of a path holds the path. A hold names ref and
// id: a ref that meanwhile names another node is not touched. Not thread-safe: belongs under the
// index's lock.
class HoldTable {
 public:
  struct Hold {
    NodeRef ref = 0;
    TrieNodeId id;
  };
  struct Lease {
    TenantId tenant;
    std::vector<Hold> holds;
    Clock::Duration end{};
  };
  struct Pin {
    TenantId tenant;
    Hold hold;
    std::uint32_t blocks = 0;
    std::uint64_t bytes = 0;
    std::int64_t end_unix_seconds = 0;
  };

  void Take(const Hold& hold) { ++counts_[hold.ref]; }
  void Release(const TrieIndex& index, const Hold& hold);
  bool IsHeld(NodeRef ref) const { return counts_.contains(ref); }
  // The node is being erased, whoever holds it.
  void Forget(NodeRef ref) { counts_.erase(ref); }

  void AddLease(const LeaseId& id, Lease lease);
  bool DropLease(const TrieIndex& index, TenantId tenant, const LeaseId& id);
  // Drops leases that ended before `now`; returns how many.
  std::size_t DropEndedLeases(const TrieIndex& index, Clock::Duration now);
  std::size_t lease_count() const { return leases_.size(); }
  bool IsLeased(NodeRef ref) const;

  void AddPin(const PinId& id, const Pin& pin);
  const Pin* FindPin(TenantId tenant, const PinId& id) const;
  void SetPinEnd(const PinId& id, std::int64_t end_unix_seconds) {
    pins_[id].end_unix_seconds = end_unix_seconds;
  }
  void DropPin(const TrieIndex& index, const PinId& id);
  std::vector<PinId> EndedPins(std::int64_t now_unix_seconds) const;
  bool IsPinned(NodeRef ref) const;
  const absl::flat_hash_map<PinId, Pin>& pins() const { return pins_; }
  std::uint64_t pinned_bytes() const { return pinned_bytes_; }

 private:
  absl::flat_hash_map<NodeRef, std::uint32_t> counts_;
  absl::flat_hash_map<LeaseId, Lease> leases_;
  std::multimap<Clock::Duration, LeaseId> lease_ends_;
  absl::flat_hash_map<PinId, Pin> pins_;
  std::uint64_t pinned_bytes_ = 0;
};

}  // namespace kvtrie
