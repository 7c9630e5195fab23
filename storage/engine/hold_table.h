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
// takes leaves only, so holding the deepest block of a path holds the path. A hold ends with its
// node: it has no say over the next one in the same place, even if that was made of the same block
// again. Not thread-safe: belongs under the index's lock.
class HoldTable {
 public:
  struct Hold {
    NodeRef ref = 0;
    TrieNodeId id;
    std::uint64_t serial = 0;  // set by Take
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

  void Take(Hold& hold);
  void Release(const Hold& hold);
  bool IsHeld(NodeRef ref) const { return holders_.contains(ref); }
  std::vector<NodeRef> HeldNodes() const;
  // The node is being erased, whoever holds it.
  void Forget(NodeRef ref) { holders_.erase(ref); }

  void AddLease(const LeaseId& id, Lease lease);
  bool DropLease(TenantId tenant, const LeaseId& id);
  // Drops leases that ended before `now`; returns how many.
  std::size_t DropEndedLeases(Clock::Duration now);
  std::size_t lease_count() const { return leases_.size(); }
  bool IsLeased(NodeRef ref) const;

  void AddPin(const PinId& id, Pin pin);
  const Pin* FindPin(TenantId tenant, const PinId& id) const;
  void SetPinEnd(const PinId& id, std::int64_t end_unix_seconds) {
    pins_[id].end_unix_seconds = end_unix_seconds;
  }
  void DropPin(const PinId& id);
  std::vector<PinId> EndedPins(std::int64_t now_unix_seconds) const;
  bool IsPinned(NodeRef ref) const;
  std::vector<PinId> PinsOn(NodeRef ref) const;
  const absl::flat_hash_map<PinId, Pin>& pins() const { return pins_; }
  std::uint64_t pinned_bytes() const { return pinned_bytes_; }

 private:
  // The holds on one node; all have its serial.
  struct Holders {
    std::uint64_t serial = 0;
    std::uint32_t count = 0;
  };
  bool IsCurrent(const Hold& hold) const;

  absl::flat_hash_map<NodeRef, Holders> holders_;
  std::uint64_t next_serial_ = 1;
  absl::flat_hash_map<LeaseId, Lease> leases_;
  std::multimap<Clock::Duration, LeaseId> lease_ends_;
  absl::flat_hash_map<PinId, Pin> pins_;
  std::uint64_t pinned_bytes_ = 0;
};

}  // namespace kvtrie
