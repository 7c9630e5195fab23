#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "storage/kv/rung_reference.h"

namespace kvtrie {

// Which frames others were coded against, and what nodes hold those: the *members* of a reference.
// Made of the rows, so that no crash can make it say anything else. What is referenced must stay;
// and since a frame is never coded against one that was itself coded against another, a node is a
// reference or a member, not both.
//
// About 40 bytes per reference of a member, and 20 per member. Not thread-safe: belongs under the
// index's lock.
class ReferenceCounts {
 public:
  // A frame of `member` that is in its row now. `references`: as the row has them; a member has one
  // such frame.
  void Add(const TrieNodeId& member, std::span<const RungReference> references);
  // REQUIRES: it was added.
  void Remove(const TrieNodeId& member, std::span<const RungReference> references);

  // Removes what a member has, whatever it is. Looks at all that is there.
  void Forget(const TrieNodeId& member);

  bool IsMember(const TrieNodeId& node) const { return members_.contains(node); }
  bool IsReferenced(const TrieNodeId& node) const;
  bool IsReferenced(const TrieNodeId& node, Rung rung) const;
  std::vector<TrieNodeId> MembersOf(const TrieNodeId& node) const;

  // Pairs of a member and a reference.
  std::size_t size() const { return rungs_.size(); }

  bool operator==(const ReferenceCounts& other) const { return rungs_ == other.rungs_; }

 private:
  // By (reference, member).
  absl::btree_map<std::pair<TrieNodeId, TrieNodeId>, Rung> rungs_;
  absl::flat_hash_set<TrieNodeId> members_;
};

}  // namespace kvtrie
